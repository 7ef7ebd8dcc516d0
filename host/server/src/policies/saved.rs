//! What do policies remember over a restart, in bytes?
//!
//! Times are the saving machine's, which mean nothing in the next process: beside each state stands how old it is, and the file says when it
//! was written. From both follows how much time has passed when it is given back.

use std::collections::BTreeMap;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_engine::Machine;
use penstock_policy_api::Decision;
use penstock_policy_wasm::{Remembered, SavedSeat, Snapshot};

/// Opens the bytes; the number is the form's version.
const MAGIC: &[u8; 16] = b"penstock state 1";
/// Machines that a file may name: the gateway and more replicas than a process has.
const MACHINES_MAX: usize = 1 << 10;
/// Bytes of a policy's name.
const NAME_BYTES_MAX: usize = 256;

/// States by machine.
pub type States = BTreeMap<Machine, Remembered>;

/// Writes what `machines` remember at `now_us` of their clock, which is `unix_us`. Nothing when they remember nothing.
pub fn encode<'a>(
    machines: impl Iterator<Item = (Machine, &'a Remembered)>,
    now_us: u64,
    unix_us: u64,
) -> Option<Vec<u8>> {
    let seats: Vec<_> = machines
        .flat_map(|(machine, remembered)| {
            Decision::ALL.into_iter().filter_map(move |decision| Some((machine, decision, remembered.seat(decision)?)))
        })
        .collect();
    if seats.is_empty() {
        return None;
    }
    let mut out = Writer::new();
    out.raw(MAGIC);
    out.u64(unix_us);
    out.list(seats.iter(), |out, (machine, decision, saved)| {
        let SavedSeat { policy, snapshot } = saved;
        out.u32(match machine {
            Machine::Gateway => 0,
            Machine::Replica(replica) => replica.saturating_add(1),
        });
        out.u8(*decision as u8);
        out.blob(policy.as_bytes());
        out.u32(snapshot.schema);
        out.u64(snapshot.saved_now_us);
        // How old it is now.
        out.u64(snapshot.elapsed_us.saturating_add(now_us.saturating_sub(snapshot.at_us)));
        out.blob(&snapshot.bytes);
    });
    Some(out.into_bytes())
}

/// Reads them at `unix_us`, for a machine whose clock begins now.
///
/// # Errors
/// Bytes that no server has written.
pub fn decode(bytes: &[u8], unix_us: u64) -> Result<States, DecodeError> {
    let mut reader = Reader::new(bytes);
    if reader.raw(MAGIC.len())? != MAGIC {
        return Err(DecodeError::Invalid("magic"));
    }
    let away_us = unix_us.saturating_sub(reader.u64()?);
    let mut states = States::new();
    for _ in 0..reader.count()? {
        let machine = match reader.u32()? {
            0 => Machine::Gateway,
            replica => Machine::Replica(replica - 1),
        };
        let decision = Decision::ALL.get(usize::from(reader.u8()?)).copied();
        let decision = decision.ok_or(DecodeError::Invalid("decision"))?;
        let name = reader.blob()?;
        let policy = String::from_utf8(name.to_vec()).map_err(|_| DecodeError::Invalid("policy"))?;
        let (schema, saved_now_us) = (reader.u32()?, reader.u64()?);
        let elapsed_us = reader.u64()?.saturating_add(away_us);
        let bytes = reader.blob()?.into();
        let snapshot = Snapshot { schema, saved_now_us, at_us: 0, elapsed_us, bytes };
        if states.len() >= MACHINES_MAX || policy.len() > NAME_BYTES_MAX {
            return Err(DecodeError::Invalid("size"));
        }
        states.entry(machine).or_default().set(decision, SavedSeat { policy, snapshot });
    }
    reader.finish()?;
    Ok(states)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remembered(decision: Decision, policy: &str, snapshot: Snapshot) -> Remembered {
        let mut remembered = Remembered::default();
        remembered.set(decision, SavedSeat { policy: policy.to_owned(), snapshot });
        remembered
    }

    #[test]
    fn each_state_comes_back_with_the_time_that_has_passed_since_it_was_saved() {
        let gateway = remembered(Decision::Fairness, "vtc", Snapshot::here(2, 4_000_000, vec![1, 2, 3]));
        let brought = Snapshot { schema: 1, saved_now_us: 77, at_us: 1_000_000, elapsed_us: 500, bytes: [].into() };
        let replica = remembered(Decision::Eviction, "gdsf", brought);
        let machines = [(Machine::Gateway, &gateway), (Machine::Replica(3), &replica)];
        let bytes = encode(machines.into_iter(), 5_000_000, 1_000).unwrap();
        let states = decode(&bytes, 61_000).unwrap();
        let at = |machine, decision| states[&machine].seat(decision).unwrap().clone();
        let vtc = at(Machine::Gateway, Decision::Fairness);
        // Saved one second before the file was written, which was 60 ms ago.
        assert_eq!(
            (vtc.policy.as_str(), vtc.snapshot),
            (
                "vtc",
                Snapshot {
                    schema: 2,
                    saved_now_us: 4_000_000,
                    at_us: 0,
                    elapsed_us: 1_060_000,
                    bytes: [1, 2, 3].into()
                }
            )
        );
        // It was 500 µs old when it came, four seconds before the file was written.
        let gdsf = at(Machine::Replica(3), Decision::Eviction).snapshot;
        assert_eq!((gdsf.saved_now_us, gdsf.at_us, gdsf.elapsed_us), (77, 0, 4_060_500));
        assert_eq!(states.len(), 2);
        // A wall clock that was set back meanwhile adds nothing.
        let back = decode(&bytes, 10).unwrap();
        assert_eq!(back[&Machine::Gateway].seat(Decision::Fairness).unwrap().snapshot.elapsed_us, 1_000_000);
    }

    #[test]
    fn nothing_is_written_for_nothing_and_damage_is_refused() {
        assert_eq!(encode([(Machine::Gateway, &Remembered::default())].into_iter(), 0, 0), None);
        let one = remembered(Decision::Routing, "r", Snapshot::here(1, 0, vec![9; 4]));
        let bytes = encode([(Machine::Gateway, &one)].into_iter(), 0, 0).unwrap();
        for length in 0..bytes.len() {
            assert!(decode(&bytes[..length], 0).is_err(), "{length} bytes");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(decode(&longer, 0).is_err());
        let mut other = bytes;
        other[0] ^= 1;
        assert_eq!(decode(&other, 0), Err(DecodeError::Invalid("magic")));
    }
}
