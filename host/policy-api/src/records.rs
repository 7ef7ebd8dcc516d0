//! The fixed record of a request, as admission and routing see it. Frozen: what is new is a signal.

use penstock_base::{ClassRank, Manifest, Priority, RequestId, Traits};

use crate::signal::FillBasis;

/// One request. Its meaning never changes while the request lives, save `attempt`, `class_rank` and the cap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestRecord {
    /// Minted by the host.
    pub request_id: RequestId,
    /// Keyed hash of the tenant; 0 is none.
    pub tenant_id: u64,
    /// Unit of fairness.
    pub flow_id: u64,
    /// Keyed hash of the session key; 0 is none.
    pub session_id: u64,
    /// Effective class, after every clamp so far.
    pub class_rank: ClassRank,
    /// 1 is the first; a re-placement after a lost replica counts on.
    pub attempt: u8,
    /// Answers asked for (n).
    pub sequences: u16,
    /// Inside the class; larger is more important.
    pub priority: Priority,
    /// Prompt length.
    pub input_tokens: u32,
    /// Output cap now in force, of each sequence.
    pub max_output_tokens: u32,
    /// Absolute in the machine's time; [`u64::MAX`] is none.
    pub deadline_us: u64,
    /// What the host may do with it.
    pub traits: Traits,
}

impl RequestRecord {
    /// The record of a request on its first attempt.
    pub fn of(manifest: &Manifest) -> Self {
        Self {
            request_id: manifest.request,
            tenant_id: manifest.tenant.0,
            flow_id: manifest.flow.0,
            session_id: manifest.session.0,
            class_rank: manifest.class,
            attempt: 1,
            sequences: manifest.sequences,
            priority: manifest.priority,
            input_tokens: manifest.input_tokens,
            max_output_tokens: manifest.max_output_tokens,
            deadline_us: manifest.deadline.as_us(),
            traits: manifest.traits,
        }
    }

    /// Time left until the deadline; [`u64::MAX`] without one, 0 when it has passed.
    pub fn deadline_left_us(&self, now_us: u64) -> u64 {
        if self.deadline_us == u64::MAX { u64::MAX } else { self.deadline_us.saturating_sub(now_us) }
    }

    /// What the named fills of a context read as for this request.
    pub fn basis(&self, basis: FillBasis) -> u64 {
        match basis {
            FillBasis::Input => u64::from(self.input_tokens),
            FillBasis::MaxOutput | FillBasis::MaxLeft => u64::from(self.max_output_tokens),
            FillBasis::TotalBlocks | FillBasis::Computed => 0,
        }
    }
}

/// What a placement is for. An open set on the wall.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(u8)]
pub enum RoutingPhase {
    /// One replica does it all.
    #[default]
    Whole = 0,
    /// The replica that will decode; asked first, its capacity is reserved before prefill.
    Decode = 1,
    /// The replica that computes the prompt, with the decode peer known.
    Prefill = 2,
}
