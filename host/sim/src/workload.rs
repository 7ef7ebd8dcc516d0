//! Who asks for what, and what is the right answer?
//!
//! Prompts are token-free in the core's sense: a token is a hash of its family and position, the content of a KV position a hash over all
//! tokens up to it, a block's key a hash of its last position. Equal keys mean equal content. A sampled token is a function of content,
//! the sequence's seed and its index alone, so that the right answer is known before anything is scheduled.

use std::sync::Arc;

use penstock_base::{
    BlockKey, CancelCause, ClassRank, Duration, FlowId, GatewayEpoch, Instant, Manifest, Outcome, Priority, RequestId,
    SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};

use crate::rng::{Rng, mix};
use crate::scenario::{Faults, Scenario};

/// One request with everything that will be known of it.
#[derive(Clone, Debug)]
pub struct Planned {
    /// As it arrives.
    pub manifest: Arc<Manifest>,
    /// At which gateway, by place.
    pub gateway: usize,
    /// When.
    pub at: Instant,
    /// How the client behaves.
    pub leaves: Option<Leave>,
    /// One for each sequence.
    pub answers: Vec<Answer>,
}

/// A client that does not wait for the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leave {
    /// How it looks from here.
    pub cause: CancelCause,
    /// When.
    pub when: LeaveWhen,
}

/// When a client leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LeaveWhen {
    /// At a moment.
    At(Instant),
    /// Once it has this many tokens.
    AfterTokens(u32),
}

/// The right answer of one sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Content of each KV position, prompt and output.
    pub content: Vec<u64>,
    /// Output tokens up to the cap asked for.
    pub tokens: Vec<u64>,
    /// Seed of the sampler.
    pub seed: u64,
    /// Index of the stop token, if one comes.
    pub stop_at: Option<u32>,
    /// Index of the token that completes a stop string, if one comes before all else.
    pub stop_string_at: Option<u32>,
}

impl Answer {
    /// How it ends at an output cap when nobody interferes: outcome and tokens that count.
    pub fn natural_end(&self, cap: u32) -> (Outcome, u32) {
        match self.stop_at {
            Some(at) if at < cap => (Outcome::Stop, at),
            _ => (Outcome::Length, cap),
        }
    }

    /// Is this a right end at an output cap?
    pub fn may_end(&self, outcome: Outcome, tokens: u32, cap: u32) -> bool {
        let in_text = self.stop_string_at.is_some_and(|at| (outcome, tokens) == (Outcome::Stop, at));
        in_text || (outcome, tokens) == self.natural_end(cap)
    }
}

/// Content behind `before` once `token` is computed.
pub fn content_after(before: u64, token: u64) -> u64 {
    mix(before, token)
}

/// The token behind a content.
pub fn sample(content: u64, seed: u64, index: u32) -> u64 {
    mix(mix(content, seed), u64::from(index))
}

/// Content before the first position.
pub fn root(trust: TrustGroup) -> u64 {
    mix(trust.0, 0x0f00)
}

/// Key of the block that ends with this content.
pub fn key_of(content: u64) -> BlockKey {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mix(content, 1).to_le_bytes());
    bytes[8..].copy_from_slice(&mix(content, 2).to_le_bytes());
    BlockKey(bytes)
}

/// The traffic of a scenario, in order of arrival.
pub fn requests(scenario: &Scenario) -> Vec<Planned> {
    let mut arrivals = Rng::stream(scenario.seed, 3);
    let traffic = &scenario.traffic;
    let (mut at, mut burst) = (Instant(1_000_000), 0);
    (0..scenario.requests)
        .map(|index| {
            if burst > 0 {
                burst -= 1;
                at = at + Duration(arrivals.below(50_000));
            } else {
                at = at + Duration(arrivals.below(2 * traffic.gap.0));
                if traffic.burst_one_in > 0 && arrivals.one_in(traffic.burst_one_in) {
                    burst = arrivals.between(4, 30);
                }
            }
            request(scenario, index, at)
        })
        .collect()
}

fn request(scenario: &Scenario, index: u32, at: Instant) -> Planned {
    let rng = &mut Rng::stream(mix(scenario.seed, 4), u64::from(index));
    let traffic = &scenario.traffic;
    let tenant = rng.below(traffic.tenants);
    let trust = TrustGroup(1 + tenant % 3);
    let context = u64::from(scenario.replica.context_tokens_max);
    // One in twenty asks for more than there ever can be.
    let prompt_max = if rng.one_in(20) { context + 20 } else { traffic.prompt_tokens_max.max(1) };
    let input_tokens = rng.between(1, prompt_max);
    let room = context.saturating_sub(input_tokens).max(1);
    let max_output_tokens = rng.between(1, traffic.output_tokens_max.clamp(1, room)) as u32;
    let sequences = if rng.one_in(3) { rng.between(1, traffic.sequences_max) } else { 1 };
    let prompt = prompt(rng, traffic.families, trust, input_tokens);
    let faults = scenario.faults;
    let answers: Vec<Answer> =
        (0..sequences).map(|_| answer(rng, &prompt, max_output_tokens, faults.has(Faults::STOP_STRINGS))).collect();
    let size = scenario.replica.block_size_tokens as usize;
    let keys: Vec<BlockKey> = prompt.chunks_exact(size).map(|block| key_of(block[size - 1])).collect();
    let prefix_key = keys.get(3).map_or(0, |key| key.short());
    let class = ClassRank::clamped(rng.below(8) as u8);
    // Each draws whether it applies or not, so that leaving a fault out leaves the rest as it is.
    let leaves = leave(rng, at, max_output_tokens, faults);
    let (has_deadline, patience) = (rng.one_in(3), Duration::from_ms(rng.between(1, 5_000)));
    let deadline = if faults.has(Faults::DEADLINES) && has_deadline { at + patience } else { Instant::NEVER };
    let gateway = rng.below(scenario.gateways as u64) as usize;
    let slo = |rng: &mut Rng, most_us| {
        if rng.one_in(3) { Duration::from_us(rng.between(1_000, most_us)) } else { Duration::MAX }
    };
    let manifest = Manifest {
        request: id(GatewayEpoch(gateway as u16 + 1), index),
        tenant: TenantId(tenant),
        flow: FlowId(mix(tenant, u64::from(class.get())) | 1),
        session: SessionId(if rng.one_in(2) { 1 + rng.below(10) } else { 0 }),
        trust,
        class,
        priority: Priority(rng.below(5) as i32 - 2),
        sequences: sequences as u16,
        input_tokens: input_tokens as u32,
        max_output_tokens,
        arrived: at,
        deadline,
        slo_ttft: slo(rng, 2_000_000),
        slo_tpot: slo(rng, 100_000),
        traits: traits(rng),
        keys: keys.into_boxed_slice(),
        prefix_key,
        retention: rng.below(101) as u8,
        retry: rng.one_in(10),
        terms: terms(&mut Rng::stream(mix(scenario.seed, 5), tenant), traffic.quota_one_in),
    };
    Planned { manifest: Arc::new(manifest), gateway, at, leaves, answers }
}

/// One request of a written-out workload: whoever makes it knows what it is for, so nothing about it is left to chance.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wish {
    /// Tenant and flow alike.
    pub flow: u64,
    /// How important.
    pub class: ClassRank,
    /// Share of its flow against others, 1,000,000 is one.
    pub weight_ppm: u64,
    /// When it arrives, at the first gateway.
    pub at: Instant,
    /// Prompt.
    pub input_tokens: u32,
    /// How many of its first tokens are those of a family: the same for all prompts of one family.
    pub shared: Option<(u64, u32)>,
    /// Output cap, for each answer.
    pub max_output_tokens: u32,
    /// Answers end here if that is before the cap.
    pub stop_at: Option<u32>,
    /// Answers.
    pub sequences: u16,
    /// First-token target.
    pub slo_ttft: Duration,
    /// What may be done with it.
    pub traits: Traits,
    /// How the client behaves.
    pub leaves: Option<Leave>,
}

impl Wish {
    /// One answer to a prompt that nobody shares, wanted to its end.
    pub fn plain(flow: u64, at: Instant, input_tokens: u32, max_output_tokens: u32) -> Self {
        Self {
            flow,
            class: ClassRank::default(),
            weight_ppm: 1_000_000,
            at,
            input_tokens,
            shared: None,
            max_output_tokens,
            stop_at: None,
            sequences: 1,
            slo_ttft: Duration::MAX,
            traits: Traits::STREAMING,
            leaves: None,
        }
    }

    /// The request, as the `index`-th of its scenario.
    fn planned(&self, scenario: &Scenario, index: u32) -> Planned {
        let rng = &mut Rng::stream(mix(scenario.seed, 6), u64::from(index));
        let own = rng.word() | 1 << 63;
        let trust = TrustGroup(1);
        let (family, shared) = self.shared.unwrap_or((own, 0));
        let mut content = root(trust);
        let step = |at: u32| {
            content = content_after(content, mix(if at < shared { family } else { own }, u64::from(at)));
            content
        };
        let prompt: Vec<u64> = (0..self.input_tokens).map(step).collect();
        let answers = (0..self.sequences).map(|_| Answer {
            stop_at: self.stop_at,
            stop_string_at: None,
            ..answer(rng, &prompt, self.max_output_tokens, false)
        });
        let answers = answers.collect();
        let size = scenario.replica.block_size_tokens as usize;
        let keys: Vec<BlockKey> = prompt.chunks_exact(size).map(|block| key_of(block[size - 1])).collect();
        let prefix_key = keys.get(3).map_or(0, |key| key.short());
        let manifest = Manifest {
            request: id(GatewayEpoch(1), index),
            tenant: TenantId(self.flow),
            flow: FlowId(self.flow),
            session: SessionId(0),
            trust,
            class: self.class,
            priority: Priority(0),
            sequences: self.sequences,
            input_tokens: self.input_tokens,
            max_output_tokens: self.max_output_tokens,
            arrived: self.at,
            deadline: Instant::NEVER,
            slo_ttft: self.slo_ttft,
            slo_tpot: Duration::MAX,
            traits: self.traits,
            keys: keys.into_boxed_slice(),
            prefix_key,
            retention: 50,
            retry: false,
            terms: TenantTerms { weight_ppm: self.weight_ppm, ..TenantTerms::default() },
        };
        Planned { manifest: Arc::new(manifest), gateway: 0, at: self.at, leaves: self.leaves, answers }
    }
}

/// A written-out workload, in order of arrival.
pub fn wished(scenario: &Scenario, mut wishes: Vec<Wish>) -> Vec<Planned> {
    wishes.sort_by_key(|wish| wish.at);
    wishes.iter().zip(0..).map(|(wish, index)| wish.planned(scenario, index)).collect()
}

/// The id of a request at an incarnation of its gateway. The counter says which request of the scenario it is.
pub fn id(gateway: GatewayEpoch, index: u32) -> RequestId {
    RequestId((u64::from(gateway.0) << 48) | (u64::from(index) + 1))
}

/// Which request of the scenario an id belongs to.
pub fn index_of(request: RequestId) -> usize {
    (request.counter() as usize).wrapping_sub(1)
}

/// Contents of a prompt: the first tokens are its family's, the rest its own.
fn prompt(rng: &mut Rng, families: u64, trust: TrustGroup, tokens: u64) -> Vec<u64> {
    let (family, own) = (rng.below(families), rng.word() | 1 << 63);
    // Families are nested: some prompts of a family leave it early.
    let shared = rng.below(tokens + tokens / 2 + 1);
    let mut content = root(trust);
    let step = |at: u64| {
        content = content_after(content, mix(if at < shared { family } else { own }, at));
        content
    };
    (0..tokens).map(step).collect()
}

fn answer(rng: &mut Rng, prompt: &[u64], cap: u32, stop_strings: bool) -> Answer {
    let seed = rng.word();
    let mut content = prompt.to_vec();
    let tokens = (0..cap).map(|index| {
        let before = content.last().copied().unwrap_or_default();
        let token = sample(before, seed, index);
        content.push(content_after(before, token));
        token
    });
    let tokens = tokens.collect();
    let stop_at = if rng.one_in(2) { Some(rng.below(u64::from(cap)) as u32) } else { None };
    let (has_string, string_at) = (rng.one_in(3), rng.below(u64::from(stop_at.unwrap_or(cap)).max(1)) as u32);
    let comes = stop_strings && has_string && string_at < stop_at.unwrap_or(cap);
    Answer { content, tokens, seed, stop_at, stop_string_at: comes.then_some(string_at) }
}

fn leave(rng: &mut Rng, at: Instant, cap: u32, faults: Faults) -> Option<Leave> {
    let (leaves, slow) = (rng.one_in(4), rng.one_in(8));
    let moment = LeaveWhen::At(at + Duration::from_us(rng.below(3_000_000)));
    let tokens = LeaveWhen::AfterTokens(1 + rng.below(u64::from(cap)) as u32);
    let by_time = rng.one_in(2);
    if faults.has(Faults::SLOW_CLIENTS) && slow {
        return Some(Leave { cause: CancelCause::SlowClient, when: tokens });
    }
    let when = if by_time { moment } else { tokens };
    (faults.has(Faults::CANCELS) && leaves).then_some(Leave { cause: CancelCause::Client, when })
}

fn traits(rng: &mut Rng) -> Traits {
    let all = [Traits::STREAMING, Traits::MAY_DEGRADE, Traits::MAY_DEFER, Traits::SHEDDABLE, Traits::BATCH];
    let some = all.into_iter().filter(|_| rng.one_in(2)).fold(Traits::default(), Traits::with);
    if rng.one_in(8) { some.with(Traits::NO_STORE) } else { some }
}

fn terms(rng: &mut Rng, quota_one_in: u64) -> TenantTerms {
    let weight_ppm = rng.pick(&[500_000, 1_000_000, 4_000_000]);
    if quota_one_in == 0 || !rng.one_in(quota_one_in) {
        return TenantTerms { weight_ppm, ..TenantTerms::default() };
    }
    TenantTerms {
        weight_ppm,
        requests_max: rng.between(1, 20) as u32,
        window_tokens_max: rng.between(100, 20_000),
        guaranteed_tokens: rng.below(2_000),
        borrow_tokens_max: rng.below(2_000),
        rate_tokens_per_sec: rng.between(100, 10_000),
        burst_tokens: rng.between(100, 10_000),
        cache_blocks_max: rng.between(1, 100),
    }
}
