//! Do the same inputs give the same bytes?

use penstock_policy_api::{RestoreCause, RestoreInfo};

use super::Tested;
use crate::bench::Bench;
use crate::course::{Course, Seats, run};
use crate::moment::Moment;

/// Moments between two looks at the state.
const LOOK_EVERY: usize = 16;

/// The course of `moments` once, in a fresh instance, and in a fresh instance of another engine: proposals, states and fuel are equal. And
/// twice in one instance, from equal saved state: proposals and states are equal; fuel may differ there, since two instances of equal
/// state need not have reached it the same way.
pub fn repeats(tested: Tested<'_>, elsewhere: &Bench, bytes: &[u8], moments: &[Moment]) -> Result<Course, String> {
    let first = run(&mut tested.seat()?, &mut Seats::new(3), moments, LOOK_EVERY)?;
    let again = run(&mut tested.seat()?, &mut Seats::new(3), moments, LOOK_EVERY)?;
    same("in a fresh instance", &first, &again, true)?;
    let component = elsewhere.load(bytes)?;
    let mut policy = elsewhere.seat(&component, tested.how)?;
    let other = run(&mut policy, &mut Seats::new(3), moments, LOOK_EVERY)?;
    same("in another engine", &first, &other, true)?;

    let mut policy = tested.seat()?;
    let mut seats = Seats::new(3);
    let (before, after) = moments.split_at(moments.len() / 2);
    run(&mut policy, &mut seats, before, usize::MAX)?;
    let state = policy.save()?;
    let now_us = before.last().map_or(0, |moment| moment.now_us);
    let schema = policy.policy().terms().state_schema;
    let info = RestoreInfo { schema, cause: RestoreCause::Replay, saved_now_us: now_us, now_us, elapsed_us: 0 };
    let once = run(&mut policy, &mut seats.again(), after, LOOK_EVERY)?;
    policy.policy().restore(&info, &state).map_err(|error| format!("its own state: {error}"))?;
    let twice = run(&mut policy, &mut seats, after, LOOK_EVERY)?;
    same("twice in one instance", &once, &twice, false)?;
    Ok(first)
}

/// Where do two courses part?
pub(super) fn same(what: &str, one: &Course, other: &Course, with_fuel: bool) -> Result<(), String> {
    if one.len() != other.len() {
        return Err(format!("{what}: {} steps and {}", one.len(), other.len()));
    }
    for (at, (one, other)) in one.iter().zip(other).enumerate() {
        let differs = if one.proposal != other.proposal {
            "the proposal differs"
        } else if one.fallback != other.fallback {
            "what became of the proposal differs"
        } else if one.state != other.state {
            "the saved state differs"
        } else if with_fuel && one.fuel != other.fuel {
            "the fuel differs"
        } else {
            continue;
        };
        return Err(format!("{what}, moment {at}: {differs}"));
    }
    Ok(())
}
