//! What gives way? Four steps, each with what the last one did and one thing more: background work pauses; new answers are cut and long
//! prompts refused; less important classes are shed; everyone is told when everything is full.
//!
//! It climbs at once and comes down slowly: a step is left when the saturation has stayed clearly below it for a while. Answers are cut
//! before anyone is refused, since a shorter answer is worth more than none.

use penstock_policy_sdk::overload::{ALL_PPM, Asked, Overload};
use penstock_policy_sdk::{
    Action, ActionKind, DecodeError, Document, ParameterError, Parameters, Policy, Reader, RestoreInfo, Sat, Stance,
    Writer, declare,
};

declare! {
    /// What it reads of the call.
    pub Reads: Overload = [
        "stale-load-us",
        "since-us",
        "queued-tokens",
        "queue-limit-tokens",
        "missed-requests",
        "finished-requests",
    ];
    /// What it reads of each class.
    pub Classes: Class = ["class-rank", "oldest-wait-us", "slo-ttft-us", "queued-requests"];
    /// What it reads of each replica.
    pub Sees: Replica = ["known-mask", "load-age-us", "total-blocks", "active-blocks", "unreported-blocks"];
}

const ONE_PPM: u64 = 1_000_000;
/// Steps of the ladder above the ground.
const STEPS: usize = 4;
/// The highest class, and so everyone.
const EVERYONE: u8 = 7;
/// The class that pauses first.
const BACKGROUND: u8 = 0;
/// Half-life of what is remembered about missed targets, in microseconds.
const MEMORY_US: u64 = 1_000_000;
/// Fewer finished requests than this say nothing about how many are late.
const FINISHED_MIN: u64 = 16;
/// Counters are kept in thousandths, so that halving them loses nothing that matters.
const THOUSAND: u64 = 1_000;

/// What can be set without a new build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Share of a pool that counts as all of it: the rest is room for what runs to grow.
    pub full_ppm: u64,
    /// Share of requests outside their targets that counts as full saturation.
    pub missed_ppm: u64,
    /// Saturation from which each step stands.
    pub steps_ppm: [u64; STEPS],
    /// How far below its step the saturation has to be for the step to be left.
    pub below_ppm: u64,
    /// And for how long, in microseconds.
    pub calm_us: u64,
    /// How long a stance holds without another call, in microseconds.
    pub hold_us: u32,
    /// Output caps from the second and from the third step on, in tokens.
    pub caps_tokens: [u64; 2],
    /// Inputs above this are refused to classes that may be shed, from the second step on.
    pub long_tokens: u64,
    /// Classes up to this one may be shed.
    pub shed_class: u8,
    /// Share of their arrivals that the third step sheds; the fourth sheds all.
    pub shed_ppm: u64,
}

impl Parameters for Settings {
    fn read(document: &mut Document) -> Result<Self, ParameterError> {
        const PPM: core::ops::RangeInclusive<u64> = 1..=10_000_000;
        let steps_ppm = [
            document.u64("steps-ppm.one", 800_000, PPM)?,
            document.u64("steps-ppm.two", 900_000, PPM)?,
            document.u64("steps-ppm.three", 1_000_000, PPM)?,
            document.u64("steps-ppm.four", 1_200_000, PPM)?,
        ];
        if !steps_ppm.is_sorted() {
            return Err(ParameterError::new("steps-ppm", "must not fall from one to four"));
        }
        Ok(Self {
            full_ppm: document.u64("full-ppm", 900_000, 1..=ONE_PPM)?,
            missed_ppm: document.u64("missed-ppm", 200_000, 1..=ONE_PPM)?,
            steps_ppm,
            below_ppm: document.u64("below-ppm", 100_000, 0..=ONE_PPM)?,
            calm_us: document.u64("calm-us", 2_000_000, 0..=600_000_000)?,
            hold_us: document.u32("hold-us", 1_000_000, 10_000..=60_000_000)?,
            caps_tokens: [
                document.u64("caps-tokens.two", 512, 16..=1_000_000)?,
                document.u64("caps-tokens.three", 256, 16..=1_000_000)?,
            ],
            long_tokens: document.u64("long-tokens", 8_192, 1..=u64::MAX)?,
            shed_class: document.u64("shed-class", 2, 0..=7)? as u8,
            shed_ppm: document.u64("shed-ppm", 500_000, 1..=ONE_PPM)?,
        })
    }
}

/// The policy.
#[derive(Debug)]
pub struct DegradeLadder {
    settings: Settings,
    /// The step it stands on; changed by each decision.
    level: u8,
    /// Since when the saturation has been clearly below the step; none while it is not.
    calm_since_us: Option<u64>,
    /// Thousandths of requests outside their targets, halved every second.
    missed: u64,
    /// Thousandths of requests that ended, likewise.
    finished: u64,
}

impl Policy for DegradeLadder {
    const NAME: &'static str = "degrade-ladder";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const ACTIONS: &'static [ActionKind] = &[
        ActionKind::CapOutput,
        ActionKind::ShedClass,
        ActionKind::PauseClass,
        ActionKind::RefuseLong,
        ActionKind::Busy,
    ];
    const STATE_SCHEMA: u32 = 1;
    type Parameters = Settings;

    fn new(settings: &Settings) -> Self {
        Self { settings: *settings, level: 0, calm_since_us: None, missed: 0, finished: 0 }
    }

    fn save(&self, out: &mut Writer) {
        out.u8(self.level);
        out.option(self.calm_since_us, |out, since| out.u64(since));
        out.u64(self.missed);
        out.u64(self.finished);
    }

    fn restore(&mut self, info: &RestoreInfo, from: &mut Reader<'_>) -> Result<(), DecodeError> {
        self.level = from.u8()?;
        if usize::from(self.level) > STEPS {
            return Err(DecodeError::Invalid("level"));
        }
        self.calm_since_us = if from.bool()? { Some(info.moved(from.u64()?)) } else { None };
        self.missed = from.u64()?;
        self.finished = from.u64()?;
        Ok(())
    }
}

impl Overload for DegradeLadder {
    type Context = Reads;
    type Classes = Classes;
    type Replicas = Sees;

    fn decide(&mut self, asked: &Asked<'_, Self>, actions: &mut Vec<Action>) -> Option<Stance> {
        self.remember(asked);
        let pool = Pool::of(asked);
        let worst = pool.saturation_ppm(self.settings.full_ppm).max(queue_ppm(asked)).max(self.missed_ppm());
        self.step(asked.call.now_us, worst);
        self.act(pool.is_full, actions);
        Some(Stance { level: self.level, hold_us: self.settings.hold_us })
    }
}

impl DegradeLadder {
    /// Adds what happened since the last call to what is left of the past.
    fn remember(&mut self, asked: &Asked<'_, Self>) {
        let context = asked.context;
        let halvings = context.since_us() / MEMORY_US;
        let part_us = context.since_us() % MEMORY_US;
        let fade = |counted: u64| {
            let halved = counted.checked_shr(u32::try_from(halvings).unwrap_or(u32::MAX)).unwrap_or(0);
            // Between two halvings in a straight line: what fades is less than the half.
            halved - Sat(halved / 2).times_over(part_us, MEMORY_US).unwrap_or(0)
        };
        self.missed = (Sat(context.missed_requests()) * THOUSAND + fade(self.missed)).0;
        self.finished = (Sat(context.finished_requests()) * THOUSAND + fade(self.finished)).0;
    }

    /// Requests outside their targets, as parts per million of what may be.
    fn missed_ppm(&self) -> u64 {
        if self.finished < FINISHED_MIN * THOUSAND {
            return 0;
        }
        let share = Sat(self.missed).times_over(ONE_PPM, self.finished).unwrap_or(0).min(ONE_PPM);
        Sat(share).times_over(ONE_PPM, self.settings.missed_ppm).unwrap_or(0)
    }

    /// Up at once; down one step when it has been calm for long enough, and then the next one needs a calm of its own.
    fn step(&mut self, now_us: u64, worst_ppm: u64) {
        let steps =
            |above: u64| self.settings.steps_ppm.iter().filter(|step| worst_ppm >= **step - above.min(**step)).count();
        let (up, stay) = (steps(0) as u8, steps(self.settings.below_ppm) as u8);
        if up > self.level {
            self.level = up;
        }
        if stay >= self.level {
            self.calm_since_us = None;
            return;
        }
        let since = *self.calm_since_us.get_or_insert(now_us);
        if now_us.saturating_sub(since) >= self.settings.calm_us {
            self.level -= 1;
            self.calm_since_us = Some(now_us);
        }
    }

    /// The measures of the step, each step adding its own.
    fn act(&self, is_full: bool, actions: &mut Vec<Action>) {
        let settings = &self.settings;
        let mut push = |kind: ActionKind, class_rank, amount| {
            actions.push(Action { what: kind.code(), class_rank, amount });
        };
        if self.level >= 1 {
            push(ActionKind::PauseClass, BACKGROUND, 0);
        }
        if self.level >= 2 {
            let cap = settings.caps_tokens[usize::from(self.level >= 3)];
            push(ActionKind::CapOutput, EVERYONE, cap);
            push(ActionKind::RefuseLong, settings.shed_class, settings.long_tokens);
        }
        if self.level >= 3 {
            let share = if self.level >= 4 { ALL_PPM } else { settings.shed_ppm };
            push(ActionKind::ShedClass, settings.shed_class, share);
        }
        if self.level >= 4 && is_full {
            push(ActionKind::Busy, EVERYONE, 0);
        }
    }
}

/// The replicas together, as far as they have ever reported. Unknown is neither idle nor full.
#[derive(Clone, Copy, Debug)]
struct Pool {
    held: Sat,
    total: Sat,
    /// Is every replica known, fresh and without a block to give?
    is_full: bool,
}

impl Pool {
    fn of(asked: &Asked<'_, DegradeLadder>) -> Self {
        let mut pool = Self { held: Sat(0), total: Sat(0), is_full: !asked.replicas.is_empty() };
        for row in asked.replicas.iter() {
            let Some(active) = row.try_active_blocks() else {
                pool.is_full = false;
                continue;
            };
            let held = Sat(active) + row.unreported_blocks();
            pool.held += held;
            pool.total += row.total_blocks();
            let is_fresh = row.load_age_us() < asked.context.stale_load_us();
            pool.is_full &= is_fresh && row.total_blocks() > 0 && held.0 >= row.total_blocks();
        }
        pool
    }

    fn saturation_ppm(&self, full_ppm: u64) -> u64 {
        let share = self.held.times_over(ONE_PPM, self.total.0).unwrap_or(0);
        Sat(share).times_over(ONE_PPM, full_ppm).unwrap_or(0)
    }
}

/// The worse of tokens against the queue's bound, and of the longest wait of a class that waits against its target. Background work waits
/// because the first step pauses it: if its wait counted, the step would hold itself up.
fn queue_ppm(asked: &Asked<'_, DegradeLadder>) -> u64 {
    let context = asked.context;
    let tokens = Sat(context.queued_tokens()).times_over(ONE_PPM, context.queue_limit_tokens()).unwrap_or(0);
    let is_held_up = |class: u64| class > u64::from(BACKGROUND);
    let waiting = asked.classes.iter().filter(|row| row.queued_requests() > 0 && is_held_up(row.class_rank()));
    let wait = waiting.map(|class| Sat(class.oldest_wait_us()).times_over(ONE_PPM, class.slo_ttft_us()).unwrap_or(0));
    wait.fold(tokens, u64::max)
}

#[cfg(test)]
mod tests {
    use penstock_policy_sdk::Load as _;

    use crate::Seat;

    #[test]
    fn steps_that_fall_are_refused() {
        let refused = Seat::configure(r#"{"steps-ppm": {"one": 950000}}"#).map(|_| ()).unwrap_err();
        assert_eq!((refused.field.as_str(), refused.problem.as_str()), ("steps-ppm", "must not fall from one to four"));
    }

    #[test]
    fn its_manifest_is_one_the_host_takes() {
        let declared = Seat::manifest().overload().unwrap();
        assert_eq!((declared.context.len(), declared.rows.classes.len(), declared.rows.replicas.len()), (6, 4, 5));
    }
}
