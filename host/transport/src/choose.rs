//! Which way of moving bytes do two ends share, and why that one?

use std::fmt;

use crate::{Address, Descriptor, Kind, NixlAddress};

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

/// What is tried, and what it takes beside the kind itself.
#[derive(Clone, Copy)]
enum Way {
    Plain(Kind),
    /// By NIXL if both ends have RDMA: the network's own speed, and no processor copies.
    Rdma,
}

/// Fastest first, as measured: one copy at memory speed, then the same without a common address space, then the network. NIXL
/// without RDMA uses TCP sockets, and is slower there than one stream that is written and read in place: it comes last.
const ORDER: [Way; 5] =
    [Way::Plain(Kind::Reference), Way::Plain(Kind::Memfd), Way::Rdma, Way::Plain(Kind::Tcp), Way::Plain(Kind::Nixl)];

/// Chooses the fastest kind that both ends offer and that can work between where they run. `failed` are kinds that were tried
/// between these two and did not work: a Unix socket may be out of sight, an address out of reach.
///
/// # Errors
///
/// [`NoWay`] with the reason against each kind.
pub fn choose(ours: &[Descriptor], theirs: &[Descriptor], failed: &[Kind]) -> Result<Choice, NoWay> {
    first(ORDER, ours, theirs, failed)
}

/// The same in an order of the caller's, of these kinds and no others.
///
/// # Errors
///
/// As [`choose`].
pub fn choose_in(order: &[Kind], ours: &[Descriptor], theirs: &[Descriptor], failed: &[Kind]) -> Result<Choice, NoWay> {
    first(order.iter().copied().map(Way::Plain), ours, theirs, failed)
}

fn first(
    ways: impl IntoIterator<Item = Way>,
    ours: &[Descriptor],
    theirs: &[Descriptor],
    failed: &[Kind],
) -> Result<Choice, NoWay> {
    let mut passed_over = Vec::new();
    for way in ways {
        let (kind, lacks_rdma) = match way {
            Way::Plain(kind) => (kind, false),
            Way::Rdma => (Kind::Nixl, !(has_rdma(ours) && has_rdma(theirs))),
        };
        let verdict = match judge(kind, ours, theirs, failed) {
            Ok(_) if lacks_rdma => Err("without RDMA on both ends it is slower than tcp"),
            verdict => verdict,
        };
        match verdict {
            Ok((ours, theirs)) => {
                // It may stand there from its first turn.
                passed_over.retain(|other: &PassedOver| other.kind != kind);
                return Ok(Choice { kind, ours, theirs, passed_over });
            }
            Err(_) if passed_over.iter().any(|other| other.kind == kind) => {}
            Err(why) => passed_over.push(PassedOver { kind, why }),
        }
    }
    Err(NoWay(passed_over))
}

fn has_rdma(side: &[Descriptor]) -> bool {
    side.iter().any(|descriptor| matches!(descriptor.address, Address::Nixl(NixlAddress { has_rdma: true, .. })))
}

fn wire(descriptor: &Descriptor) -> Option<u16> {
    if let Address::Nixl(address) = &descriptor.address { Some(address.wire) } else { None }
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
        Kind::Nixl if wire(&ours[own]) != wire(&theirs[other]) => Err("the ends have two versions of it"),
        _ => Ok((own, other)),
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = match self.kind {
            Kind::Reference => "both ends are in one process",
            Kind::Memfd => "both ends are on one host and belong to one user",
            Kind::Nixl => "both ends have it, in one version",
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
    use crate::{Layout, PeerId, Place};

    fn end(kinds: &[Kind], host: u8, process: u8, user: u32) -> Vec<Descriptor> {
        let describe = |kind: &Kind| Descriptor {
            identity: PeerId { endpoint: 1, epoch: 1 },
            place: Place { host: [host; 16], process: [process; 16], user },
            token: [0; 16],
            is_guarded: false,
            address: match kind {
                Kind::Reference => Address::Reference(1),
                Kind::Memfd => Address::Memfd(PathBuf::from("/x")),
                Kind::Nixl => {
                    let control = SocketAddr::from(([127, 0, 0, 1], 2));
                    Address::Nixl(NixlAddress { control, wire: 0x0105, has_rdma: false })
                }
                Kind::Tcp => Address::Tcp(SocketAddr::from(([127, 0, 0, 1], 1))),
            },
            regions: vec![Layout { block_bytes: 1, blocks: 1 }],
        };
        kinds.iter().map(describe).collect()
    }

    const ALL: [Kind; 4] = [Kind::Tcp, Kind::Nixl, Kind::Memfd, Kind::Reference];

    #[test]
    fn the_fastest_that_can_work_is_taken() {
        let ours = end(&ALL, 1, 1, 1000);
        let chosen = |theirs: &[Descriptor], failed: &[Kind]| choose(&ours, theirs, failed).unwrap();
        let choice = chosen(&end(&ALL, 1, 1, 1000), &[]);
        assert_eq!((choice.kind, choice.ours, choice.theirs), (Kind::Reference, 3, 3));
        assert_eq!(choice.to_string(), "reference: both ends are in one process");
        assert_eq!(chosen(&end(&ALL, 1, 2, 1000), &[]).kind, Kind::Memfd);
        assert_eq!(chosen(&end(&ALL, 1, 2, 1001), &[]).kind, Kind::Tcp);
        assert_eq!(chosen(&end(&ALL, 1, 2, 1000), &[Kind::Memfd]).kind, Kind::Tcp);
        let choice = chosen(&end(&[Kind::Tcp, Kind::Memfd], 2, 2, 1000), &[]);
        assert_eq!(
            choice.to_string(),
            "tcp: both ends have it, and it works anywhere; not reference (the other end does not have it), \
             memfd (the ends are on two hosts), nixl (the other end does not have it)"
        );
    }

    #[test]
    fn an_order_of_the_callers_is_kept_to() {
        let (ours, theirs) = (end(&ALL, 1, 1, 1), end(&ALL, 1, 2, 1));
        let choice = choose_in(&[Kind::Tcp, Kind::Memfd], &ours, &theirs, &[]).unwrap();
        assert_eq!(choice.to_string(), "tcp: both ends have it, and it works anywhere");
        let choice = choose_in(&[Kind::Nixl, Kind::Memfd], &ours, &theirs, &[Kind::Nixl]).unwrap();
        assert_eq!(choice.kind, Kind::Memfd);
        let none = choose_in(&[Kind::Memfd], &ours, &theirs, &[Kind::Memfd]).unwrap_err();
        assert_eq!(none.to_string(), "no transport in common: memfd (it was tried and failed)");
    }

    /// The same with RDMA, and another version of NIXL.
    fn nixl(mut end: Vec<Descriptor>, wire: u16, has_rdma: bool) -> Vec<Descriptor> {
        for descriptor in &mut end {
            if let Address::Nixl(address) = &mut descriptor.address {
                *address = NixlAddress { wire, has_rdma, ..*address };
            }
        }
        end
    }

    #[test]
    fn nixl_comes_before_tcp_only_with_rdma_on_both_ends() {
        let kinds = [Kind::Tcp, Kind::Nixl, Kind::Memfd];
        let ours = nixl(end(&kinds, 1, 1, 0), 0x0105, true);
        let there = |wire, has_rdma| nixl(end(&kinds, 2, 2, 0), wire, has_rdma);
        let rdma = choose(&ours, &there(0x0105, true), &[]).unwrap();
        assert_eq!((rdma.kind, rdma.ours, rdma.theirs), (Kind::Nixl, 1, 1));
        assert_eq!(
            rdma.to_string(),
            "nixl: both ends have it, in one version; not reference (neither end has it), memfd (the ends are on two hosts)"
        );
        let plain = choose(&ours, &there(0x0105, false), &[]).unwrap();
        assert_eq!(plain.kind, Kind::Tcp);
        assert!(plain.to_string().ends_with("nixl (without RDMA on both ends it is slower than tcp)"));
        let last = choose(&ours, &there(0x0105, false), &[Kind::Tcp]).unwrap();
        assert_eq!(last.kind, Kind::Nixl, "better than nothing");
        assert!(!last.passed_over.iter().any(|other| other.kind == Kind::Nixl));
        let other = choose(&ours, &there(0x0106, true), &[]).unwrap();
        assert!(other.to_string().ends_with("nixl (the ends have two versions of it)"));
        assert_eq!(choose(&ours, &nixl(end(&kinds, 1, 2, 0), 0x0105, true), &[]).unwrap().kind, Kind::Memfd);
    }

    #[test]
    fn no_way_says_why_for_each() {
        let none = choose(&end(&[Kind::Reference], 1, 1, 1), &end(&[Kind::Reference, Kind::Tcp], 1, 2, 1), &[]);
        assert_eq!(
            none.unwrap_err().to_string(),
            "no transport in common: reference (the ends are two processes), memfd (neither end has it), \
             nixl (neither end has it), tcp (this end does not have it)"
        );
    }
}
