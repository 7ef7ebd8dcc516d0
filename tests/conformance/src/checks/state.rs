//! Does its memory outlive an instance, and does it survive what is no memory of its own?

use penstock_policy_api::{RestoreCause, RestoreError, RestoreInfo};

use super::repeats::same;
use super::{Tested, is_legal};
use crate::course::{Course, Seats, run};
use crate::dice::Dice;
use crate::guest::Seated;
use crate::moment::Moment;

const CAUSES: [RestoreCause; 4] = [RestoreCause::Swap, RestoreCause::Trap, RestoreCause::Restart, RestoreCause::Replay];
/// Damaged states that are tried of each kind.
const DAMAGES: u64 = 64;

/// State after a part of `moments`, handed to a fresh instance for each cause: it goes on as if nothing had happened, and what it has taken
/// it saves again, byte for byte. Returns the size of the state.
pub fn remembers(tested: Tested<'_>, moments: &[Moment]) -> Result<usize, String> {
    let mut largest = 0;
    for part in [0, moments.len() / 3, moments.len() * 2 / 3] {
        let (before, after) = moments.split_at(part);
        let mut policy = tested.seat()?;
        let mut seats = Seats::new(4);
        run(&mut policy, &mut seats, before, usize::MAX)?;
        let state = policy.save()?;
        largest = largest.max(state.len());
        let onward = run(&mut policy, &mut seats.again(), after, 8)?;
        let now_us = before.last().map_or(0, |moment| moment.now_us);
        for cause in CAUSES {
            let fault = |problem: String| format!("after {part} moments, restored by {cause:?}: {problem}");
            let mut next = tested.seat()?;
            let info = info(&mut next, cause, now_us);
            next.policy().restore(&info, &state).map_err(|error| fault(error.to_string()))?;
            if next.save()? != state {
                return Err(fault("it saves something else than it was given".to_owned()));
            }
            let course = run(&mut next, &mut seats.again(), after, 8)?;
            same("going on", &onward, &course, false).map_err(fault)?;
        }
    }
    Ok(largest)
}

/// What an instance does after it refused a state is what a fresh one does; and whatever bytes it is given, it refuses them or goes on
/// legally. Never a trap.
pub fn forgets_what_is_damaged(tested: Tested<'_>, moments: &[Moment]) -> Result<usize, String> {
    let (before, after) = moments.split_at(moments.len() / 2);
    let mut policy = tested.seat()?;
    run(&mut policy, &mut Seats::new(5), before, usize::MAX)?;
    let state = policy.save()?;
    let now_us = before.last().map_or(0, |moment| moment.now_us);
    let after = &after[..after.len().min(16)];
    let fresh = run(&mut tested.seat()?, &mut Seats::new(5), after, 4)?;
    let mut tried = 0;
    for (what, schema, bytes, must_refuse) in damaged(&mut tested.seat()?, &state) {
        tried += 1;
        let fault = |problem: String| format!("{what}: {problem}");
        let mut policy = tested.seat()?;
        let given = RestoreInfo { schema, ..info(&mut policy, CAUSES[tried % CAUSES.len()], now_us) };
        match policy.policy().restore(&given, &bytes) {
            Ok(_) if must_refuse => return Err(fault("it takes it".to_owned())),
            Err(RestoreError::Fault(kind)) => return Err(fault(format!("it fails on it: {}", kind.name()))),
            Ok(_) => legal(&run(&mut policy, &mut Seats::new(5), after, 4).map_err(fault)?).map_err(fault)?,
            Err(refused) => {
                let is_foreign = what == "another schema";
                if is_foreign && refused != RestoreError::UnknownSchema {
                    return Err(fault(format!("it calls it something else: {refused}")));
                }
                let course = run(&mut policy, &mut Seats::new(5), after, 4).map_err(fault)?;
                same("as new", &fresh, &course, false).map_err(fault)?;
            }
        }
    }
    Ok(tried)
}

/// States that are none: what, the schema they are said to be of, the bytes, and whether nothing else will do than to refuse them.
fn damaged(policy: &mut Seated, state: &[u8]) -> Vec<(&'static str, u32, Vec<u8>, bool)> {
    let schema = policy.policy().terms().state_schema;
    let dice = &mut Dice::new(state.len() as u64);
    let mut all = Vec::new();
    for foreign in [schema.wrapping_add(1), schema.wrapping_add(256), u32::MAX] {
        all.push(("another schema", foreign, state.to_vec(), true));
    }
    all.push(("a byte too many", schema, [state, &[0]].concat(), true));
    if !state.is_empty() {
        all.push(("nothing at all", schema, Vec::new(), true));
        for _ in 0..DAMAGES.min(state.len() as u64) {
            all.push(("a part", schema, state[..dice.below(state.len() as u64) as usize].to_vec(), true));
        }
        for _ in 0..DAMAGES {
            let mut bytes = state.to_vec();
            let at = dice.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << dice.below(8);
            all.push(("a bit turned", schema, bytes, false));
        }
        for _ in 0..DAMAGES {
            // Lengths and counts of the largest number, wherever they stand.
            let mut bytes = state.to_vec();
            let at = dice.below(bytes.len() as u64) as usize;
            bytes.iter_mut().skip(at).take(8).for_each(|byte| *byte = 0xff);
            all.push(("eight bytes of ones", schema, bytes, false));
        }
    }
    for length in [1, 8, 100, 64 << 10] {
        all.push(("noise", schema, (0..length).map(|_| dice.bits() as u8).collect(), true));
    }
    all
}

fn info(policy: &mut Seated, cause: RestoreCause, now_us: u64) -> RestoreInfo {
    RestoreInfo { schema: policy.policy().terms().state_schema, cause, saved_now_us: now_us, now_us, elapsed_us: 0 }
}

fn legal(course: &Course) -> Result<(), String> {
    course
        .iter()
        .enumerate()
        .try_for_each(|(at, step)| is_legal(step).map_err(|problem| format!("moment {at}: {problem}")))
}
