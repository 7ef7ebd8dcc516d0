//! Is this request handed off at all, and between whom?

use super::message::Peer;

/// How much it matters that both ends are near each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Topology {
    /// It does not.
    Any,
    /// A pair in one domain goes before a better ranked pair across domains.
    Preferred,
    /// Only a pair in one domain; without one, the unified path.
    Required,
}

/// What holds for a pool of replicas.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathTerms {
    /// Hand-off is on.
    pub enabled: bool,
    /// Fewer prompt tokens to compute than this are not worth a transfer.
    pub prefill_tokens_min: u32,
    /// See [`Topology`].
    pub topology: Topology,
}

/// What is known of one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathAsk {
    /// Answers asked for.
    pub sequences: u16,
    /// Prompt tokens that no decode replica has cached.
    pub uncached_tokens: u32,
}

/// A replica that has credit for its part, in the order of routing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// Which.
    pub peer: Peer,
    /// Where: a host, a rack, whatever bandwidth depends on. Equal is near.
    pub domain: u32,
}

/// How a request goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// Prefill and decode at one replica.
    Unified,
    /// Prefill at one, decode at another.
    Split {
        /// Prefills.
        sender: Peer,
        /// Decodes.
        receiver: Peer,
    },
}

/// Chooses in two phases, decode first: the best ranked decode replica that a prefill replica can serve under the topology, and for it the
/// best ranked such prefill replica. Requests of several sequences, short prompts, and a pool without a fitting pair go the unified path.
pub fn choose(terms: &PathTerms, ask: &PathAsk, decode: &[Candidate], prefill: &[Candidate]) -> Path {
    if !terms.enabled || ask.sequences != 1 || ask.uncached_tokens < terms.prefill_tokens_min {
        return Path::Unified;
    }
    let pair = |near: bool| {
        decode.iter().find_map(|receiver| {
            let fits = |sender: &&Candidate| {
                sender.peer.replica != receiver.peer.replica && (!near || sender.domain == receiver.domain)
            };
            prefill.iter().find(fits).map(|sender| Path::Split { sender: sender.peer, receiver: receiver.peer })
        })
    };
    let chosen = match terms.topology {
        Topology::Any => pair(false),
        Topology::Preferred => pair(true).or_else(|| pair(false)),
        Topology::Required => pair(true),
    };
    chosen.unwrap_or(Path::Unified)
}

#[cfg(test)]
mod tests {
    use penstock_base::{ReplicaEpoch, ReplicaId};

    use super::*;

    fn at(replica: u32, domain: u32) -> Candidate {
        Candidate { peer: Peer { replica: ReplicaId(replica), epoch: ReplicaEpoch(1) }, domain }
    }

    fn ids(path: Path) -> Option<(u32, u32)> {
        match path {
            Path::Unified => None,
            Path::Split { sender, receiver } => Some((sender.replica.0, receiver.replica.0)),
        }
    }

    #[test]
    fn decode_is_chosen_first_and_topology_says_how_near() {
        let (decode, prefill) = ([at(1, 7), at(2, 8)], [at(3, 9), at(4, 8)]);
        let ask = PathAsk { sequences: 1, uncached_tokens: 500 };
        let with = |topology| PathTerms { enabled: true, prefill_tokens_min: 100, topology };
        assert_eq!(ids(choose(&with(Topology::Any), &ask, &decode, &prefill)), Some((3, 1)));
        assert_eq!(ids(choose(&with(Topology::Preferred), &ask, &decode, &prefill)), Some((4, 2)));
        assert_eq!(ids(choose(&with(Topology::Required), &ask, &decode, &prefill)), Some((4, 2)));
        let far = &prefill[..1];
        assert_eq!(ids(choose(&with(Topology::Preferred), &ask, &decode, far)), Some((3, 1)), "the next best");
        assert_eq!(choose(&with(Topology::Required), &ask, &decode, far), Path::Unified, "the stated fallback");
    }

    #[test]
    fn a_request_that_gains_nothing_or_cannot_goes_unified() {
        let terms = PathTerms { enabled: true, prefill_tokens_min: 100, topology: Topology::Any };
        let (decode, prefill) = ([at(1, 0)], [at(2, 0)]);
        let path = |terms: &PathTerms, sequences, uncached_tokens| {
            choose(terms, &PathAsk { sequences, uncached_tokens }, &decode, &prefill)
        };
        assert_eq!(ids(path(&terms, 1, 100)), Some((2, 1)));
        assert_eq!(path(&terms, 1, 99), Path::Unified, "short");
        assert_eq!(path(&terms, 2, 100), Path::Unified, "several sequences");
        assert_eq!(path(&PathTerms { enabled: false, ..terms }, 1, 100), Path::Unified, "off");
        let itself = choose(&terms, &PathAsk { sequences: 1, uncached_tokens: 100 }, &decode, &decode);
        assert_eq!(itself, Path::Unified, "nobody sends to itself");
    }
}
