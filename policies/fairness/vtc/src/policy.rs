//! Whose turn is it? Between classes the more important one, unless a less important one has been passed over for long; inside a class the
//! flow that has been served least, in weighted tokens; inside a flow the request that came first.
//!
//! The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv 2401.00588), with the prompt
//! charged at dispatch and settled on what was computed, and output charged as it is delivered.

mod counters;
mod lowest;
mod turns;
mod victims;

use penstock_policy_sdk::fairness::{Fairness, NO_TARGET, OrderAsked, VictimsAsked};
use penstock_policy_sdk::{
    DecodeError, Document, Fact, FactKind, ParameterError, Parameters, Policy, Ranking, Reader, Rest, RestoreInfo,
    Writer, Yielder, declare,
};

use counters::Counters;
use turns::Turns;

declare! {
    /// What `order` reads of the call.
    pub OrderReads: Order = ["take-requests"];
    /// What `order` reads of each waiting request.
    pub Sees: Waiting = [
        "flow-id",
        "class-rank",
        "flow-count",
        "waited-us",
        "uncached-tokens",
        "flow-weight-ppm",
    ];
    /// What `victims` reads of the call.
    pub VictimsReads: Victims = ["short-blocks", "take-sequences", "dram-free-blocks", "needy-class-rank"];
    /// What `victims` reads of each running sequence.
    pub Runs: Running = [
        "known-mask",
        "class-rank",
        "admit-count",
        "freed-blocks",
        "recompute-tokens",
        "emitted-tokens",
        "est-recompute-us",
        "est-offload-us",
    ];
}

/// What can be set without a new build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// What a prompt token counts.
    pub input_weight: u64,
    /// What an output token counts.
    pub output_weight: u64,
    /// How long a class is passed over before it counts as one more important, in microseconds.
    pub age_us: u64,
    /// Are sequences that have emitted output the last ones to yield?
    pub protect_emitted: bool,
}

impl Parameters for Settings {
    fn read(document: &mut Document) -> Result<Self, ParameterError> {
        Ok(Self {
            input_weight: document.u64("weights.input", 1, 1..=1_000)?,
            output_weight: document.u64("weights.output", 2, 1..=1_000)?,
            age_us: document.u64("age-us", 5_000_000, 1_000..=3_600_000_000)?,
            protect_emitted: document.flag("protect-emitted", true)?,
        })
    }
}

/// The policy. The gateway's instance keeps counters; a replica's keeps nothing.
#[derive(Debug)]
pub struct Vtc {
    settings: Settings,
    /// What every flow has been served, and when each class had its last turn.
    counters: Counters,
    /// Of the present call; kept for its room.
    turns: Turns,
    loss: Vec<victims::Loss>,
}

impl Policy for Vtc {
    const NAME: &'static str = "vtc";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const FACTS: &'static [FactKind] = &[
        FactKind::FlowActive,
        FactKind::FlowIdle,
        FactKind::FlowGone,
        FactKind::Taken,
        FactKind::Skipped,
        FactKind::Served,
    ];
    const STATE_SCHEMA: u32 = 1;
    type Parameters = Settings;

    fn new(settings: &Settings) -> Self {
        Self { settings: *settings, counters: Counters::default(), turns: Turns::default(), loss: Vec::new() }
    }

    fn observe(&mut self, fact: &Fact) {
        self.counters.hear(&self.settings, fact);
    }

    fn save(&self, out: &mut Writer) {
        self.counters.encode(out);
    }

    fn restore(&mut self, info: &RestoreInfo, from: &mut Reader<'_>) -> Result<(), DecodeError> {
        self.counters = Counters::decode(from, info)?;
        Ok(())
    }
}

impl Fairness for Vtc {
    type Order = OrderReads;
    type Waiting = Sees;
    type Victims = VictimsReads;
    type Running = Runs;

    fn order(&mut self, asked: &OrderAsked<'_, Self>, ranked: &mut Vec<u32>) -> Option<Ranking> {
        self.turns.gather(&mut self.counters, asked);
        self.turns.give(&self.settings, asked, ranked);
        (!ranked.is_empty()).then_some(Ranking { rest: Rest::Append, tpot_target_us: NO_TARGET })
    }

    fn victims(&mut self, asked: &VictimsAsked<'_, Self>, yielders: &mut Vec<Yielder>) {
        victims::choose(&self.settings, asked, &mut self.loss, yielders);
    }
}

#[cfg(test)]
mod tests {
    use penstock_policy_sdk::Load as _;

    use crate::Seat;

    #[test]
    fn parameters_are_read_by_path() {
        assert!(Seat::configure(r#"{"weights": {"input": 1, "output": 4}, "age-us": 1000}"#).is_ok());
        let refused = Seat::configure(r#"{"weights": {"input": 0}}"#).map(|_| ()).unwrap_err();
        assert_eq!(refused.field, "weights.input");
    }

    #[test]
    fn its_manifest_is_one_the_host_takes() {
        let declared = Seat::manifest().fairness().unwrap();
        assert_eq!((declared.waiting.len(), declared.running.len(), declared.terms.state_schema), (6, 8, 1));
    }
}
