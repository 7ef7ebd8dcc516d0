//! Which replica runs it? The one with the fewest requests in flight; a replica that served the session before counts as if it had some fewer.

use penstock_policy_sdk::routing::{Asked, RANKED_MAX, Routing};
use penstock_policy_sdk::{Document, ParameterError, Parameters, Placement, Policy, Sat, declare};

declare! {
    /// What it reads of the call: nothing.
    pub Reads: Routing = [];
    /// What it reads of each replica. Reading anything else does not compile.
    pub Sees: Replica = ["replica-id", "inflight-requests", "session-flag"];
}

/// What can be set without a new build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Requests that a session's own replica may have more than the others and still be first.
    pub session_requests: u64,
}

impl Parameters for Settings {
    fn read(document: &mut Document) -> Result<Self, ParameterError> {
        Ok(Self { session_requests: document.u64("session-requests", 2, 0..=1_000)? })
    }
}

/// The policy. It keeps nothing between calls but room; what it kept would be saved and restored.
#[derive(Debug)]
pub struct FewestFirst {
    settings: Settings,
    ranks: Vec<(u64, u64, u32)>,
}

impl Policy for FewestFirst {
    const NAME: &'static str = "fewest-first";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    type Parameters = Settings;

    fn new(settings: &Settings) -> Self {
        Self { settings: *settings, ranks: Vec::new() }
    }
}

impl Routing for FewestFirst {
    type Context = Reads;
    type Replicas = Sees;

    fn decide(&mut self, asked: &Asked<'_, Self>, ranked: &mut Vec<u32>) -> Option<Placement> {
        self.ranks.clear();
        self.ranks.extend(asked.replicas.iter().map(|row| {
            let bonus = if row.session_flag() == 1 { self.settings.session_requests } else { 0 };
            ((Sat(row.inflight_requests()) - bonus).0, row.replica_id(), row.index())
        }));
        self.ranks.sort_unstable();
        ranked.extend(self.ranks.iter().take(RANKED_MAX).map(|rank| rank.2));
        // An empty ranking is no opinion: the native default decides.
        Some(Placement::Place { wait_us: 0, colocate: false })
    }
}
