//! A deterministic executor for tests of the driver, an oracle for what it must produce, and a rig around an engine.
//!
//! The fake keeps KV as the tokens themselves, block by block, and samples from what it reads back *through the block table*. A block
//! that is wrongly shared, copied, freed or addressed therefore changes the tokens.

#![allow(dead_code, unused_imports, reason = "each test file uses a part of the rig")]

pub mod cluster;
mod executor;
mod policies;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration as StdDuration;

use penstock_base::{
    ClassRank, Duration, FlowId, Instant, Outcome, Priority, SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_engine::{
    Engine, EngineConfig, EngineError, EventStream, RequestEvent, ServedModel, Status, Submission, Vocabulary,
};
use penstock_exec::{Executor, SamplingParams};
use penstock_model::Namespace;
use penstock_sched::message::Usage;

pub use executor::{Control, FakeExecutor, Fault, Sizes};
pub use policies::{FusedPolicies, Nonsense, OptimisticPolicies, PanickingPolicies};

/// Token ids are below this.
pub const VOCABULARY: u32 = 64;
/// The token that ends an answer, where a request says so.
pub const STOP_TOKEN: u32 = 63;
/// Longer than anything here takes, on a machine that does ten other things.
pub const PATIENCE: StdDuration = StdDuration::from_secs(60);

/// Two letters a token, so that a stop string can begin in the middle of one.
pub struct Letters;

impl Vocabulary for Letters {
    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        let letter = |n: u32| b'a' + (n % 8) as u8;
        if id >= VOCABULARY { Cow::Borrowed(&[]) } else { Cow::Owned(vec![letter(id / 8), letter(id)]) }
    }
}

/// A vocabulary that breaks whoever asks it.
pub struct PanickingVocabulary;

impl Vocabulary for PanickingVocabulary {
    fn token_bytes(&self, _: u32) -> Cow<'_, [u8]> {
        panic!("the test wants a panic")
    }
}

/// Text of some tokens.
pub fn text_of(tokens: &[u32]) -> String {
    tokens.iter().flat_map(|&id| Letters.token_bytes(id).into_owned()).map(char::from).collect()
}

/// The next token after `history`: what the fake executor is, as a plain function.
pub fn next_token(history: &[u32], prompt: usize, params: &SamplingParams) -> u32 {
    let seed = if params.temperature > 0.0 { params.seed } else { 0 };
    let mut hash = seed ^ 0x9e37_79b9_7f4a_7c15;
    for &token in history {
        hash = (hash ^ u64::from(token)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash ^= hash >> 29;
    }
    let id = (hash >> 17) as u32 % VOCABULARY;
    let early = history.len() - prompt < params.min_tokens as usize;
    if early && params.stop_tokens.contains(&id) { (id + 1) % VOCABULARY } else { id }
}

/// The whole answer: up to `max` tokens, ended before a stop token.
pub fn answer(prompt: &[u32], params: &SamplingParams, max: u32) -> Vec<u32> {
    let mut history = prompt.to_vec();
    for _ in 0..max {
        let token = next_token(&history, prompt.len(), params);
        if params.stop_tokens.contains(&token) {
            break;
        }
        history.push(token);
    }
    history.split_off(prompt.len())
}

/// A prompt of `length` tokens that differs with `which`.
pub fn prompt(which: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| (which.wrapping_mul(31) + i.wrapping_mul(i + which + 7)) % VOCABULARY).collect()
}

/// A greedy request.
pub fn submission(engine: &Engine, prompt: &[u32], max_output_tokens: u32) -> Submission {
    Submission {
        tenant: TenantId(1),
        terms: TenantTerms::default(),
        flow: FlowId(1),
        session: SessionId(0),
        trust: TrustGroup(1),
        class: ClassRank::default(),
        priority: Priority(0),
        prompt: prompt.into(),
        sequences: 1,
        max_output_tokens,
        sampling: Arc::new(SamplingParams::default()),
        stop_strings: Vec::new().into(),
        arrived: engine.clock().now(),
        deadline: Instant::NEVER,
        slo_ttft: Duration::MAX,
        slo_tpot: Duration::MAX,
        traits: Traits::STREAMING,
        retention: 50,
        retry: false,
    }
}

/// An engine on fakes.
pub struct Rig {
    pub engine: Engine,
    pub controls: Vec<Arc<Control>>,
}

impl Rig {
    /// `replicas` fakes of equal sizes.
    pub fn new(replicas: usize, sizes: Sizes, config: EngineConfig) -> Self {
        Self::start(replicas, sizes, config).expect("the rig's values can work")
    }

    /// The same, where the values may not work.
    pub fn start(replicas: usize, sizes: Sizes, config: EngineConfig) -> Result<Self, EngineError> {
        let controls: Vec<_> = (0..replicas).map(|_| Control::open()).collect();
        let executors = controls
            .iter()
            .map(|control| Box::new(FakeExecutor::new(sizes, Arc::clone(control))) as Box<dyn Executor>)
            .collect();
        let model = ServedModel { name: "fake".into(), namespace: Namespace([3; 32]), vocabulary: Arc::new(Letters) };
        Ok(Self { engine: Engine::start(config, model, executors)?, controls })
    }

    /// One replica, usual sizes.
    pub fn usual() -> Self {
        Self::new(1, Sizes::default(), EngineConfig::default())
    }

    /// A greedy request.
    pub fn submission(&self, prompt: &[u32], max_output_tokens: u32) -> Submission {
        submission(&self.engine, prompt, max_output_tokens)
    }

    /// Hands one in.
    pub fn submit(&self, submission: Submission) -> EventStream {
        self.engine.submit(submission).expect("the rig is not full").1
    }

    /// Waits until `holds` of the status.
    pub fn wait_until(&self, what: &str, holds: impl Fn(&Status) -> bool) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while !holds(&self.engine.status()) {
            assert!(std::time::Instant::now() < deadline, "{what} did not come: {:?}", self.engine.status());
            std::thread::sleep(StdDuration::from_millis(2));
        }
    }

    /// Waits until nothing is left of any request, anywhere.
    pub fn wait_until_empty(&self) {
        self.wait_until("emptiness", |status| {
            let queue = status.queue;
            queue.waiting_requests == 0
                && queue.waiting_tokens == 0
                && queue.placed_requests == 0
                && queue.in_flight_requests == 0
                && queue.pending_bytes == 0
                && queue.send_buffer_bytes == 0
                && status.sum(|load| u64::from(load.active_blocks + load.reclaimable_blocks)) == 0
                && status.sum(|load| u64::from(load.transfer_blocks)) == 0
                && status.sum(|load| u64::from(load.reserved_blocks + load.ready_requests)) == 0
                && status.sum(|load| u64::from(load.running_requests)) == 0
                && status.sum(|load| load.prefill_tokens) == 0
        });
    }

    /// The value of a metric line that begins with `name`.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.engine.metrics_text();
        let value = page
            .lines()
            .filter(|line| line.starts_with(name))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        value.sum::<f64>()
    }
}

/// Everything a client got.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Got {
    pub texts: Vec<String>,
    pub tokens: Vec<Vec<u32>>,
    pub choices: Vec<Option<(Outcome, u32)>>,
    pub end: Option<(Outcome, Usage)>,
    pub text_events: usize,
    pub retry_after_ms: u32,
}

impl Got {
    /// Takes one event, checking the order that clients rely on.
    pub fn take(&mut self, event: RequestEvent) {
        assert!(self.end.is_none(), "nothing follows the end, but {event:?} did");
        match event {
            RequestEvent::Text { choice, text, tokens } => {
                let choice = usize::from(choice);
                self.room(choice);
                assert!(self.choices[choice].is_none(), "text after the end of its answer");
                self.texts[choice].push_str(&text);
                self.tokens[choice].extend(tokens.iter().map(|token| token.id));
                self.text_events += 1;
            }
            RequestEvent::ChoiceEnded { choice, outcome, tokens } => {
                self.room(usize::from(choice));
                let before = self.choices[usize::from(choice)].replace((outcome, tokens));
                assert!(before.is_none(), "an answer ends once");
            }
            RequestEvent::Ended { outcome, usage, retry_after_ms } => {
                self.end = Some((outcome, usage));
                self.retry_after_ms = retry_after_ms;
            }
            RequestEvent::Queued { .. } | RequestEvent::Dispatched { .. } => {}
        }
    }

    fn room(&mut self, choice: usize) {
        let size = self.texts.len().max(choice + 1);
        self.texts.resize(size, String::new());
        self.tokens.resize(size, Vec::new());
        self.choices.resize(size, None);
    }

    pub fn outcome(&self) -> Outcome {
        self.end.expect("the stream has ended").0
    }

    pub fn usage(&self) -> Usage {
        self.end.expect("the stream has ended").1
    }
}

/// Reads a stream to its end.
pub fn read(stream: &mut EventStream) -> Got {
    let mut got = Got::default();
    while let Some(event) = stream.recv_timeout(PATIENCE).expect("the stream goes on") {
        got.take(event);
    }
    stream.acknowledge();
    assert!(got.end.is_some());
    got
}
