//! Native routing: the least work, counting what is cached as done.

use alloc::vec::Vec;

use penstock_base::limits::RANKED_MAX;

use crate::call::Call;
use crate::declare::{Declaration, Declared, InContext, RoutingDeclaration, Terms};
use crate::generated::{CommonSignal, RoutingSignal};
use crate::matrix::{Context, Matrix};
use crate::policy::{Policy, RoutingPolicy, RoutingQuestion};
use crate::proposal::{Answer, Placement};
use crate::records::RequestRecord;
use crate::sat;

use super::{is_known, positions};

positions! { at: ReplicaSignal {
    KNOWN = KnownMask,
    ID = ReplicaId,
    OVERLAP = OverlapBlocks,
    CACHE_AGE = CacheAgeUs,
    LOAD_AGE = LoadAgeUs,
    PREFILL = PrefillTokens,
    UNREPORTED_PREFILL = UnreportedPrefillTokens,
    ACTIVE = ActiveBlocks,
    UNREPORTED = UnreportedBlocks,
    CREDIT_REQUESTS = CreditRequests,
    CREDIT_TOKENS = CreditTokens,
    CREDIT_BLOCKS = CreditBlocks,
    INFLIGHT = InflightRequests,
} }

const CONTEXT: [InContext<RoutingSignal>; 4] = [
    InContext::Own(RoutingSignal::NeedBlocks),
    InContext::Common(CommonSignal::BlockSizeTokens),
    InContext::Common(CommonSignal::StaleLoadUs),
    InContext::Common(CommonSignal::StaleCacheUs),
];
const NEED_BLOCKS: usize = 0;
const BLOCK_SIZE: usize = 1;
const STALE_LOAD: usize = 2;
const STALE_CACHE: usize = 3;

/// Rows whose credit covers the request first, then by uncached prompt work in blocks plus blocks in use. A row whose load is unknown or
/// stale comes after every known one, by requests in flight. With no overlap anywhere this is pure load, and a miss goes to the least
/// loaded. Never waits.
#[derive(Debug)]
pub struct OverlapLoad {
    declaration: RoutingDeclaration,
    keys: Vec<Key>,
}

/// Smaller is better; the row makes it total.
type Key = (bool, bool, u64, u64, u64, u32);

impl Default for OverlapLoad {
    fn default() -> Self {
        let (context, rows) = (Declared::exactly(&CONTEXT), Declared::exactly(at::ALL));
        Self { declaration: Declaration { terms: Terms::native("overlap-load"), context, rows }, keys: Vec::new() }
    }
}

impl OverlapLoad {
    /// The policy; it has no parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ranks every row into `ranked`, best first.
    pub(crate) fn rank(
        &mut self,
        request: &RequestRecord,
        context: Context<'_>,
        replicas: &Matrix,
        ranked: &mut Vec<u32>,
    ) {
        self.rank_best(request, context, replicas, usize::MAX, ranked);
    }

    /// Ranks the best `most` rows. Those beyond are not put in order, which is most of the work where there are many.
    fn rank_best(
        &mut self,
        request: &RequestRecord,
        context: Context<'_>,
        replicas: &Matrix,
        most: usize,
        ranked: &mut Vec<u32>,
    ) {
        self.keys.clear();
        self.keys.extend((0..replicas.rows()).map(|row| key(request, context, replicas, row)));
        if self.keys.len() > most {
            self.keys.select_nth_unstable(most);
            self.keys.truncate(most);
        }
        self.keys.sort_unstable();
        ranked.clear();
        ranked.extend(self.keys.iter().map(|key| key.5));
    }
}

fn key(request: &RequestRecord, context: Context<'_>, replicas: &Matrix, row: usize) -> Key {
    let cell = |position| replicas.get(row, position);
    let mask = cell(at::KNOWN);
    let unknown = !is_known(mask, at::PREFILL) || !is_known(mask, at::ACTIVE);
    let stale = unknown || cell(at::LOAD_AGE) >= context.get(STALE_LOAD);
    let slots = u64::from(request.sequences.max(1));
    // As the gateway debits: any prefill credit covers one prompt of whatever length.
    let covered = cell(at::CREDIT_REQUESTS) >= slots
        && cell(at::CREDIT_TOKENS) > 0
        && cell(at::CREDIT_BLOCKS) >= context.get(NEED_BLOCKS);
    let cost = if stale { 0 } else { work(request, context, replicas, row) };
    (stale, !covered, cost, cell(at::INFLIGHT), cell(at::ID), row as u32)
}

fn work(request: &RequestRecord, context: Context<'_>, replicas: &Matrix, row: usize) -> u64 {
    let cell = |position| replicas.get(row, position);
    let block = context.get(BLOCK_SIZE).max(1);
    let seen = is_known(cell(at::KNOWN), at::OVERLAP) && cell(at::CACHE_AGE) < context.get(STALE_CACHE);
    let cached = if seen { sat::mul(cell(at::OVERLAP), block) } else { 0 };
    let uncached = sat::sub(u64::from(request.input_tokens), cached);
    let prefill = sat::add(sat::add(cell(at::PREFILL), cell(at::UNREPORTED_PREFILL)), uncached) / block;
    let held = sat::add(sat::add(cell(at::ACTIVE), cell(at::UNREPORTED)), context.get(NEED_BLOCKS));
    sat::add(prefill, held)
}

impl Policy for OverlapLoad {
    fn terms(&self) -> &Terms {
        &self.declaration.terms
    }
}

impl RoutingPolicy for OverlapLoad {
    fn describe(&self) -> &RoutingDeclaration {
        &self.declaration
    }

    fn decide(&mut self, _call: &Call, asked: &RoutingQuestion<'_>, ranked: &mut Vec<u32>) -> Answer<Placement> {
        self.rank_best(asked.request, asked.context, asked.replicas, RANKED_MAX, ranked);
        Answer::Proposal(Placement::Place { wait_us: 0, colocate: false })
    }
}
