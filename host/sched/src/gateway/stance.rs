//! The stance in force, and what it means for one request: the eight actions carried out, and what replicas are told.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::{ACTIONS_MAX, BUSY_PROBE_INTERVAL, STANCE_FRESH, STANCE_REPEAT};
use penstock_base::{ClassRank, Duration, Instant, Manifest, Refusal, Traits};
use penstock_policy_api::{ActionKind, Question, Stance, StanceAction, busy_is_founded, seed::call_seed};

use super::State;
use super::io::GatewayEffect;
use super::seats::Cx;
use super::signals::ReplicaRows;
use crate::message::{ReplicaStance, ToReplica};

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StanceState {
    /// 0 normal .. 4.
    level: u8,
    /// Since when.
    level_since: Instant,
    /// What it does.
    actions: [Option<StanceAction>; ACTIONS_MAX],
    /// When the native default stands again; [`Instant::NEVER`] while nothing was proposed.
    until: Instant,
    /// Number of the last word to the replicas.
    number: u64,
    /// When that was.
    told_at: Instant,
    /// There is news for the replicas.
    news: bool,
    /// Blocks are to be freed with the next word: once for each stance that says so.
    preempt_due: bool,
    /// Step time that `order` asked for.
    tpot_target_us: u32,
    /// When that lapses.
    tpot_until: Instant,
    /// While everyone is refused as busy: when the next one is let through.
    probe_at: Instant,
}

impl StanceState {
    /// Normal service.
    pub fn new(now: Instant) -> Self {
        Self {
            level: 0,
            level_since: now,
            actions: [None; ACTIONS_MAX],
            until: Instant::NEVER,
            number: 0,
            told_at: now,
            news: true,
            preempt_due: false,
            tpot_target_us: u32::MAX,
            tpot_until: Instant::ZERO,
            probe_at: Instant::ZERO,
        }
    }

    /// 0 normal .. 4.
    pub fn level(&self) -> u8 {
        self.level
    }

    /// Time at the present level.
    pub fn level_held(&self, now: Instant) -> Duration {
        now.since(self.level_since)
    }

    /// Level 0 and nothing done?
    pub fn is_normal(&self) -> bool {
        self.level == 0 && self.actions[0].is_none()
    }

    /// Has what was proposed held as long as it should?
    pub fn hold_is_over(&self, now: Instant) -> bool {
        self.until <= now
    }

    /// When its hold ends, or the replicas must hear of it again.
    pub fn next_due(&self) -> Instant {
        let word = if self.news { self.told_at } else { self.told_at + STANCE_REPEAT };
        word.min(self.until)
    }

    /// The replicas hear of it with this step.
    pub fn repeat_now(&mut self) {
        self.news = true;
    }

    /// Puts a stance in force. `true` when it differs from the one before.
    pub fn take(&mut self, stance: Stance, actions: &[StanceAction], now: Instant) -> bool {
        let mut new = [None; ACTIONS_MAX];
        for (place, action) in new.iter_mut().zip(actions) {
            *place = Some(*action);
        }
        self.until = now + Duration::from_us(u64::from(stance.hold_us));
        let changed = stance.level != self.level || new != self.actions;
        if stance.level != self.level {
            self.level = stance.level;
            self.level_since = now;
        }
        self.actions = new;
        let preempts = self.of(ActionKind::PreemptClass).next().is_some();
        self.preempt_due = preempts;
        self.news |= changed || preempts;
        changed
    }

    /// A step time that `order` asks for; it lapses.
    pub fn take_tpot_target(&mut self, target_us: u32, now: Instant) {
        self.news |= self.tpot_target(now) != target_us;
        self.tpot_target_us = target_us;
        self.tpot_until = now + STANCE_FRESH;
    }

    fn tpot_target(&self, now: Instant) -> u32 {
        if now < self.tpot_until { self.tpot_target_us } else { u32::MAX }
    }

    /// Actions of one kind.
    pub fn of(&self, kind: ActionKind) -> impl Iterator<Item = StanceAction> + '_ {
        self.actions.iter().flatten().copied().filter(move |action| action.kind == kind)
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        out.u8(self.level);
        out.u64(self.level_since.0);
        for action in &self.actions {
            out.option(*action, |out, action| {
                out.u16(action.kind.code());
                out.u8(action.class.get());
                out.u64(action.amount);
            });
        }
        out.u64(self.until.0);
        out.u64(self.number);
        out.u64(self.told_at.0);
        out.bool(self.news);
        out.bool(self.preempt_due);
        out.u32(self.tpot_target_us);
        out.u64(self.tpot_until.0);
        out.u64(self.probe_at.0);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut stance = Self::new(Instant::ZERO);
        stance.level = from.u8()?;
        stance.level_since = Instant(from.u64()?);
        for action in &mut stance.actions {
            *action = from.option(|from| {
                Ok(StanceAction {
                    kind: ActionKind::from_code(from.u16()?).ok_or(DecodeError::Invalid("action"))?,
                    class: ClassRank::new(from.u8()?).ok_or(DecodeError::Invalid("class"))?,
                    amount: from.u64()?,
                })
            })?;
        }
        stance.until = Instant(from.u64()?);
        stance.number = from.u64()?;
        stance.told_at = Instant(from.u64()?);
        stance.news = from.bool()?;
        stance.preempt_due = from.bool()?;
        stance.tpot_target_us = from.u32()?;
        stance.tpot_until = Instant(from.u64()?);
        stance.probe_at = Instant(from.u64()?);
        Ok(stance)
    }
}

impl State {
    /// May the product shed it?
    pub(super) fn is_sheddable(&self, class: ClassRank, traits: Traits) -> bool {
        self.config.class_sheddable[class.index()] || traits.has(Traits::SHEDDABLE)
    }

    /// Actions of one kind that reach a request: they reach downward, and pass over what may not be shed.
    fn reaching(&self, kind: ActionKind, class: ClassRank, traits: Traits) -> impl Iterator<Item = StanceAction> + '_ {
        let sheddable = self.is_sheddable(class, traits);
        self.stance.of(kind).filter(move |action| sheddable && action.reaches(class))
    }

    /// What the stance says to an arrival: refused, or let through.
    pub(super) fn stance_on_arrival(&mut self, manifest: &Manifest, cx: &mut Cx<'_>) -> Result<(), Refusal> {
        let (class, traits) = (manifest.class, manifest.traits);
        let mut shed = self.reaching(ActionKind::ShedClass, class, traits).map(|action| action.amount);
        // Which ones of a share: by the request's id, so that a retry is a new throw and a replay the same one.
        let thrown = call_seed(self.config.run_seed, Question::Overload, manifest.request.0) % 1_000_000;
        if shed.any(|share_ppm| thrown < share_ppm) {
            return Err(Refusal::Shed);
        }
        drop(shed);
        let long = self.reaching(ActionKind::RefuseLong, class, traits).map(|action| action.amount).min();
        if long.is_some_and(|tokens| u64::from(manifest.input_tokens) > tokens) {
            return Err(Refusal::TooLong);
        }
        if self.stance.of(ActionKind::Busy).next().is_some() && self.is_busy(cx) {
            if self.now < self.stance.probe_at {
                return Err(Refusal::AllBusy);
            }
            self.stance.probe_at = self.now + BUSY_PROBE_INTERVAL;
        }
        Ok(())
    }

    /// Every ready replica is known to be loaded, now. The first idle or unknown one lifts it.
    fn is_busy(&self, cx: &mut Cx<'_>) -> bool {
        let scratch = &mut cx.seats.scratch.candidates;
        scratch.clear();
        scratch.extend(self.replicas.iter_ready().map(|(slot, _)| slot));
        busy_is_founded(&ReplicaRows::for_overload(self, scratch), self.config.stale_load.as_us())
    }

    /// The output cap that the stance leaves to an arrival.
    pub(super) fn capped_output(&self, manifest: &Manifest) -> u32 {
        let asked = manifest.max_output_tokens;
        if !manifest.traits.has(Traits::MAY_DEGRADE) {
            return asked;
        }
        let cap =
            self.reaching(ActionKind::CapOutput, manifest.class, manifest.traits).map(|action| action.amount).min();
        cap.map_or(asked, |cap| asked.min(u32::try_from(cap).unwrap_or(u32::MAX)))
    }

    /// May a waiting request be started, as far as the stance goes? One that starves may whatever is paused.
    pub(super) fn may_start(&self, class: ClassRank, traits: Traits, starves: bool) -> bool {
        let paused = !starves && self.reaching(ActionKind::PauseClass, class, traits).next().is_some();
        let full = |limit: StanceAction| self.inflight_up_to(limit.class) >= limit.amount;
        !paused && !self.reaching(ActionKind::LimitInflight, class, traits).any(full)
    }

    /// Tells every replica what is asked of it: on news, and often enough to stay fresh.
    pub(super) fn tell_replicas(&mut self, cx: &mut Cx<'_>) {
        if !self.stance.news && self.stance.told_at + STANCE_REPEAT > self.now {
            return;
        }
        let preempt = self.stance.of(ActionKind::PreemptClass).last().filter(|_| self.stance.preempt_due);
        let active_all: u128 = self.replicas.iter().map(|(_, replica)| active_blocks(replica)).sum();
        self.stance.news = false;
        self.stance.preempt_due = false;
        self.stance.told_at = self.now;
        self.stance.number += 1;
        for (_, replica) in self.replicas.iter() {
            let share = preempt.map_or(0, |action| {
                let share = u128::from(action.amount) * active_blocks(replica) / active_all.max(1);
                u64::try_from(share).unwrap_or(u64::MAX)
            });
            let stance = ReplicaStance {
                number: self.stance.number,
                level: self.stance.level,
                preempt_blocks: share,
                preempt_class: preempt.map_or(ClassRank::MIN, |action| action.class),
                tpot_target_us: self.stance.tpot_target(self.now),
            };
            cx.effects.push(GatewayEffect::Send {
                replica: replica.facts.replica,
                epoch: replica.facts.epoch,
                message: ToReplica::Stance(stance),
            });
        }
    }
}

fn active_blocks(replica: &super::replicas::Replica) -> u128 {
    replica.load().map_or(0, |load| u128::from(load.active_blocks))
}
