//! Which way of moving bytes do two ends share, and why that one?

use std::fmt;

use crate::{Descriptor, Kind};

/// What was chosen, with the reason to show.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// The kind that both ends have.
    pub kind: Kind,
    /// Which of our descriptors.
    pub ours: usize,
    /// Which of theirs: the one to connect to.
    pub theirs: usize,
    /// Faster kinds that were not taken, fastest first.
    pub passed_over: Vec<PassedOver>,
}

/// A kind that was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PassedOver {
    /// Which.
    pub kind: Kind,
    /// Why not.
    pub why: &'static str,
}

/// Two ends that share no way.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("no transport in common: {}", list(.0))]
pub struct NoWay(
    /// Every kind with the reason against it.
    pub Vec<PassedOver>,
);

/// Fastest first, as measured: one copy at memory speed, then the same without a common address space, then sockets.
const ORDER: [Kind; 3] = [Kind::Reference, Kind::Memfd, Kind::Tcp];

/// Chooses the fastest kind that both ends offer and that can work between where they run. `failed` are kinds that were tried
/// between these two and did not work: a Unix socket may be out of sight, an address out of reach.
///
/// # Errors
///
/// [`NoWay`] with the reason against each kind.
pub fn choose(ours: &[Descriptor], theirs: &[Descriptor], failed: &[Kind]) -> Result<Choice, NoWay> {
    let mut passed_over = Vec::new();
    for kind in ORDER {
        match judge(kind, ours, theirs, failed) {
            Ok((ours, theirs)) => return Ok(Choice { kind, ours, theirs, passed_over }),
            Err(why) => passed_over.push(PassedOver { kind, why }),
        }
    }
    Err(NoWay(passed_over))
}

fn judge(
    kind: Kind,
    ours: &[Descriptor],
    theirs: &[Descriptor],
    failed: &[Kind],
) -> Result<(usize, usize), &'static str> {
    let at = |side: &[Descriptor]| side.iter().position(|descriptor| descriptor.address.kind() == kind);
    let (own, other) = match (at(ours), at(theirs)) {
        (Some(own), Some(other)) => (own, other),
        (None, None) => return Err("neither end has it"),
        (None, Some(_)) => return Err("this end does not have it"),
        (Some(_), None) => return Err("the other end does not have it"),
    };
    let (here, there) = (ours[own].place, theirs[other].place);
    match kind {
        _ if failed.contains(&kind) => Err("it was tried and failed"),
        Kind::Reference if here.process != there.process => Err("the ends are two processes"),
        Kind::Memfd if here.host != there.host => Err("the ends are on two hosts"),
        Kind::Memfd if here.user != there.user => Err("the ends belong to two users"),
        _ => Ok((own, other)),
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = match self.kind {
            Kind::Reference => "both ends are in one process",
            Kind::Memfd => "both ends are on one host and belong to one user",
            Kind::Tcp => "both ends have it, and it works anywhere",
        };
        write!(f, "{}: {reason}", self.kind)?;
        if self.passed_over.is_empty() { Ok(()) } else { write!(f, "; not {}", list(&self.passed_over)) }
    }
}

fn list(passed_over: &[PassedOver]) -> String {
    let each = passed_over.iter().map(|PassedOver { kind, why }| format!("{kind} ({why})"));
    each.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::path::PathBuf;

    use super::*;
    use crate::{Address, Layout, PeerId, Place};

    fn end(kinds: &[Kind], host: u8, process: u8, user: u32) -> Vec<Descriptor> {
        let describe = |kind: &Kind| Descriptor {
            identity: PeerId { endpoint: 1, epoch: 1 },
            place: Place { host: [host; 16], process: [process; 16], user },
            token: [0; 16],
            address: match kind {
                Kind::Reference => Address::Reference(1),
                Kind::Memfd => Address::Memfd(PathBuf::from("/x")),
                Kind::Tcp => Address::Tcp(SocketAddr::from(([127, 0, 0, 1], 1))),
            },
            regions: vec![Layout { block_bytes: 1, blocks: 1 }],
        };
        kinds.iter().map(describe).collect()
    }

    const ALL: [Kind; 3] = [Kind::Tcp, Kind::Memfd, Kind::Reference];

    #[test]
    fn the_fastest_that_can_work_is_taken() {
        let ours = end(&ALL, 1, 1, 1000);
        let chosen = |theirs: &[Descriptor], failed: &[Kind]| choose(&ours, theirs, failed).unwrap();
        let choice = chosen(&end(&ALL, 1, 1, 1000), &[]);
        assert_eq!((choice.kind, choice.ours, choice.theirs), (Kind::Reference, 2, 2));
        assert_eq!(choice.to_string(), "reference: both ends are in one process");
        assert_eq!(chosen(&end(&ALL, 1, 2, 1000), &[]).kind, Kind::Memfd);
        assert_eq!(chosen(&end(&ALL, 1, 2, 1001), &[]).kind, Kind::Tcp);
        assert_eq!(chosen(&end(&ALL, 1, 2, 1000), &[Kind::Memfd]).kind, Kind::Tcp);
        let choice = chosen(&end(&[Kind::Tcp, Kind::Memfd], 2, 2, 1000), &[]);
        assert_eq!(
            choice.to_string(),
            "tcp: both ends have it, and it works anywhere; not reference (the other end does not have it), \
             memfd (the ends are on two hosts)"
        );
    }

    #[test]
    fn no_way_says_why_for_each() {
        let none = choose(&end(&[Kind::Reference], 1, 1, 1), &end(&[Kind::Reference, Kind::Tcp], 1, 2, 1), &[]);
        assert_eq!(
            none.unwrap_err().to_string(),
            "no transport in common: reference (the ends are two processes), memfd (neither end has it), \
             tcp (this end does not have it)"
        );
    }
}
