//! Drives a replica machine against the content executor and plays the clients: every promise of the machine's effects is asserted here.

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use penstock_base::codec::{Reader, Writer};
use penstock_base::plan::{BatchFailure, Plan, PlanOp, RowDone, TokenSource};
use penstock_base::{
    BatchId, ClassRank, DispatchNumber, Duration, FlowId, GatewayEpoch, Generation, Instant, Manifest, Outcome,
    Priority, RefuseReason, RequestId, SeqId, SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_policy_api::Policies;
use penstock_policy_api::native::NativePolicies;
use penstock_sched::message::{Dispatch, FromReplica, ToReplica, Usage};
use penstock_sched::replica::{
    FinishedTokens, Replica, ReplicaConfig, ReplicaEffect, ReplicaEffects, ReplicaEvent, ReplicaInput,
};

use crate::content::{ContentExecutor, Opening, STOP_STRING, block_keys, expected_output, sequence_seed};

/// The gateway that the driver plays unless told otherwise.
pub const GATEWAY: GatewayEpoch = GatewayEpoch(1);

/// What a test says of a request.
#[derive(Clone, Debug)]
pub struct Spec {
    pub prompt: Vec<u32>,
    pub seed: u64,
    pub sequences: u16,
    pub max_output: u32,
    pub reserve_output: u32,
    pub class: u8,
    pub trust: u64,
    /// One more than this is its tenant, in the usual trust group.
    pub tenant: u64,
    pub deadline: Instant,
    pub no_store: bool,
    /// The client ends an answer before the first [`STOP_STRING`].
    pub stop_string: bool,
}

impl Spec {
    /// One answer of at most `max_output` tokens to `prompt`, all of it reserved.
    pub fn new(prompt: Vec<u32>, max_output: u32) -> Self {
        Self {
            prompt,
            seed: 1,
            sequences: 1,
            max_output,
            reserve_output: max_output,
            class: 3,
            trust: 1,
            tenant: 0,
            deadline: Instant::NEVER,
            no_store: false,
            stop_string: false,
        }
    }

    fn manifest(&self, request: RequestId, block_size: u32) -> Manifest {
        let traits = if self.no_store { Traits::NO_STORE } else { Traits::default() };
        Manifest {
            request,
            tenant: TenantId(self.trust + self.tenant),
            flow: FlowId(self.trust),
            session: SessionId(0),
            trust: TrustGroup(self.trust),
            class: ClassRank::clamped(self.class),
            priority: Priority(0),
            sequences: self.sequences,
            input_tokens: self.prompt.len() as u32,
            max_output_tokens: self.max_output,
            arrived: Instant::ZERO,
            deadline: self.deadline,
            slo_ttft: Duration::MAX,
            slo_tpot: Duration::MAX,
            traits,
            keys: block_keys(self.trust, &self.prompt, block_size as usize).into_boxed_slice(),
            prefix_key: 0,
            retention: 50,
            retry: false,
            terms: TenantTerms::default(),
        }
    }
}

/// What the driver knows of a request.
pub struct Client {
    pub spec: Spec,
    pub manifest: Arc<Manifest>,
    pub outputs: Vec<Vec<u32>>,
    /// How each sequence ended.
    pub ends: Vec<Option<Outcome>>,
    /// How the request ended.
    pub end: Option<(Outcome, Usage)>,
    pub label: String,
    /// A test ended an answer by its own choice.
    pub cut: bool,
    pub started: bool,
    pub refused: Option<RefuseReason>,
    /// It is at the replica.
    pub taken: bool,
    keys_told: Vec<usize>,
    /// Progress as reported.
    prefill_tokens: u32,
    decode_tokens: u32,
}

/// A step in flight with what the executor made of it.
pub struct Flight {
    pub plan: Plan,
    pub done: Vec<RowDone>,
}

pub struct Driver {
    pub replica: Replica,
    pub executor: ContentExecutor,
    pub clients: BTreeMap<u64, Client>,
    pub flights: VecDeque<Flight>,
    pub now: Instant,
    pub policies: Box<dyn Policies>,
    /// Inputs that the driver owes: ends found in text, keys of filled blocks.
    pub owed: VecDeque<ReplicaInput>,
    /// Effects of the last step.
    pub effects: ReplicaEffects,
    /// One line an effect that a reader of a scenario cares about.
    pub trace: Vec<String>,
    pub preemptions: u32,
    pub hit_tokens: u32,
    pub evicted_blocks: u32,
    pub copies: u32,
    pub stale: u32,
    pub fallbacks: u32,
    pub dispatches: u64,
    /// Show a plan's operations in the trace.
    pub show_ops: bool,
    /// A frozen replica is what the test is about.
    pub may_break: bool,
    next_request: u64,
    block_size: u32,
    /// Steps between two comparisons with a copy read back from bytes; 0 is never.
    pub copy_every: u64,
    steps: u64,
    twin: Option<Replica>,
}

impl Driver {
    pub fn new(config: ReplicaConfig) -> Self {
        let executor = ContentExecutor::new(config.blocks, config.block_size_tokens, config.step_tokens);
        let block_size = config.block_size_tokens;
        let mut driver = Self {
            replica: Replica::new(config, Instant::ZERO),
            executor,
            clients: BTreeMap::new(),
            flights: VecDeque::new(),
            now: Instant::ZERO,
            policies: Box::new(NativePolicies::new(Generation(1), 1_024)),
            owed: VecDeque::new(),
            effects: Vec::new(),
            trace: Vec::new(),
            preemptions: 0,
            hit_tokens: 0,
            evicted_blocks: 0,
            copies: 0,
            stale: 0,
            fallbacks: 0,
            dispatches: 0,
            show_ops: false,
            may_break: false,
            next_request: 1,
            block_size,
            copy_every: 0,
            steps: 0,
            twin: None,
        };
        driver.step(ReplicaInput::GatewayUp(GATEWAY));
        driver
    }

    /// Dispatches a new request; its number.
    pub fn dispatch(&mut self, spec: Spec) -> u64 {
        let label = format!("r{}", self.next_request);
        self.dispatch_as(label, spec)
    }

    /// Dispatches a new request that the trace calls `label`.
    pub fn dispatch_as(&mut self, label: String, spec: Spec) -> u64 {
        let number = self.next_request;
        self.next_request += 1;
        let request = RequestId::new(GATEWAY, number).expect("few requests");
        let manifest = Arc::new(spec.manifest(request, self.block_size));
        let n = usize::from(spec.sequences);
        let client = Client {
            spec,
            manifest,
            outputs: vec![Vec::new(); n],
            ends: vec![None; n],
            end: None,
            label,
            cut: false,
            started: false,
            refused: None,
            taken: true,
            keys_told: vec![0; n],
            prefill_tokens: 0,
            decode_tokens: 0,
        };
        self.clients.insert(number, client);
        self.send_dispatch(number);
        number
    }

    /// Sends a refused request again.
    pub fn dispatch_again(&mut self, number: u64) {
        let client = self.clients.get_mut(&number).expect("a known request");
        assert!(client.refused.take().is_some() && client.end.is_none());
        client.taken = true;
        self.send_dispatch(number);
    }

    fn send_dispatch(&mut self, number: u64) {
        self.dispatches += 1;
        let client = &self.clients[&number];
        let dispatch = Dispatch {
            number: DispatchNumber(self.dispatches),
            manifest: client.manifest.clone(),
            attempt: 1,
            class: client.manifest.class,
            max_output_tokens: client.spec.max_output,
            reserve_output_tokens: client.spec.reserve_output,
            expected_output_tokens: client.spec.reserve_output,
        };
        self.message(ToReplica::Dispatch(dispatch));
    }

    pub fn message(&mut self, message: ToReplica) {
        self.step(ReplicaInput::Gateway { gateway: GATEWAY, message });
    }

    pub fn cancel(&mut self, number: u64, outcome: Outcome) {
        let request = self.clients[&number].manifest.request;
        self.message(ToReplica::Cancel { request, attempt: 1, outcome });
    }

    /// The oldest step in flight is done.
    pub fn complete(&mut self) {
        let flight = self.flights.pop_front().expect("a step is in flight");
        self.executor.finish(flight.plan.batch);
        let input = ReplicaInput::BatchDone {
            batch: flight.plan.batch,
            rows: flight.done,
            took: Duration::from_us(100 * flight.plan.query_tokens()),
        };
        self.step_and_recycle(input, flight.plan);
    }

    /// The oldest step in flight fails in these rows.
    pub fn fail_rows(&mut self, rows: Vec<u32>) {
        let flight = self.flights.pop_front().expect("a step is in flight");
        self.executor.finish(flight.plan.batch);
        let mut done = flight.done;
        for row in &rows {
            done[*row as usize].accepted = 0;
        }
        let input = ReplicaInput::BatchFailed { batch: flight.plan.batch, failure: BatchFailure::Rows, rows, done };
        self.step_and_recycle(input, flight.plan);
    }

    /// The oldest step in flight comes to nothing.
    pub fn fail_batch(&mut self) {
        let flight = self.flights.pop_front().expect("a step is in flight");
        self.executor.forget(&flight.plan);
        let (rows, done) = (Vec::new(), Vec::new());
        let input = ReplicaInput::BatchFailed { batch: flight.plan.batch, failure: BatchFailure::Batch, rows, done };
        self.step_and_recycle(input, flight.plan);
    }

    fn step_and_recycle(&mut self, input: ReplicaInput, plan: Plan) {
        if let Some(twin) = &mut self.twin {
            twin.recycle(Plan::default());
        }
        self.replica.recycle(plan);
        self.step(input);
    }

    /// One owed input, if there is one.
    pub fn pay(&mut self) -> bool {
        let Some(input) = self.owed.pop_front() else { return false };
        // Its sequence may have ended since: then it names nobody and is counted as stale, which is right.
        self.step(input);
        true
    }

    pub fn step(&mut self, input: ReplicaInput) {
        self.steps += 1;
        if self.copy_every > 0 && self.steps.is_multiple_of(self.copy_every) {
            self.twin = Some(self.read_back());
        }
        let mut effects = core::mem::take(&mut self.effects);
        effects.clear();
        if let Some(twin) = &mut self.twin {
            let mut same = Vec::new();
            twin.step(self.now, input.clone(), self.policies.as_mut(), &mut same);
            self.replica.step(self.now, input, self.policies.as_mut(), &mut effects);
            assert_eq!(same, effects, "a machine read back goes on as the original");
            assert_eq!(twin.decision_digest(), self.replica.decision_digest());
        } else {
            self.replica.step(self.now, input, self.policies.as_mut(), &mut effects);
        }
        self.carry_out(&effects);
        self.effects = effects;
        if self.replica.broken().is_none() {
            self.replica.check().expect("the invariants hold");
        }
    }

    fn read_back(&self) -> Replica {
        let mut out = Writer::new();
        self.replica.encode(&mut out);
        let mut from = Reader::new(out.bytes());
        let twin = Replica::decode(self.replica.config().clone(), &mut from).expect("its own bytes are read back");
        from.finish().expect("all of them");
        let mut again = Writer::new();
        twin.encode(&mut again);
        assert_eq!(again.bytes(), out.bytes(), "equal states give equal bytes");
        twin
    }

    fn client(&mut self, request: RequestId) -> &mut Client {
        self.clients.get_mut(&request.counter()).expect("a known request")
    }

    fn carry_out(&mut self, effects: &[ReplicaEffect]) {
        for effect in effects {
            match effect {
                ReplicaEffect::Submit(plan) => self.submit(plan),
                ReplicaEffect::Deliver { seq, batch, row, tokens, first } => {
                    self.deliver(*seq, (*batch, *row), *tokens, *first);
                }
                ReplicaEffect::SequenceEnded { seq, outcome, tokens } => self.ended(*seq, *outcome, *tokens),
                ReplicaEffect::Send { gateway, message } => {
                    assert_eq!(*gateway, GATEWAY);
                    self.receive(message);
                }
                ReplicaEffect::Event(event) => self.observe(*event),
                ReplicaEffect::Handoff(effect) => panic!("nothing is handed off here: {effect:?}"),
                ReplicaEffect::Cached(_) => {}
            }
        }
    }

    fn submit(&mut self, plan: &Plan) {
        let clients = &self.clients;
        let history = |seq: SeqId| {
            let client = &clients[&seq.request.counter()];
            let output = &client.outputs[usize::from(seq.index)];
            let history: Vec<u32> = client.spec.prompt.iter().chain(output).copied().collect();
            let seed = sequence_seed(client.spec.seed, seq.index);
            Opening { history, prompt: client.spec.prompt.len(), seed }
        };
        let known = |seq: SeqId| history(seq).history.len();
        for row in &plan.rows {
            let client = &clients[&row.seq.request.counter()];
            assert!(client.ends[usize::from(row.seq.index)].is_none(), "{} has ended and is planned", row.seq);
        }
        let done = self.executor.submit(plan, history, known);
        self.copies += plan.ops.iter().filter(|op| matches!(op, PlanOp::CopyBlock { .. })).count() as u32;
        let line = self.show(plan);
        self.trace.push(line);
        self.flights.push_back(Flight { plan: plan.clone(), done });
        assert!(self.flights.len() <= self.replica.config().inflight_max);
    }

    fn deliver(&mut self, seq: SeqId, (batch, row): (BatchId, u32), tokens: u16, first: u32) {
        assert_eq!(tokens, 1);
        let token = self.executor.token(batch, row);
        let block_size = self.block_size as usize;
        let client = self.clients.get_mut(&seq.request.counter()).expect("a known request");
        let index = usize::from(seq.index);
        assert!(client.ends[index].is_none(), "{seq} has ended");
        let output = &mut client.outputs[index];
        assert_eq!(output.len(), first as usize, "tokens come in order, each once");
        output.push(token);
        self.trace.push(format!("deliver {}.{index} #{first}", client.label));
        let spec = &client.spec;
        if spec.stop_string && token == STOP_STRING && !output[..output.len() - 1].contains(&STOP_STRING) {
            let end = FinishedTokens { seq, tokens: first, outcome: Outcome::Stop };
            self.owed.push_back(ReplicaInput::Finish(end));
        }
        let whole: Vec<u32> = spec.prompt.iter().chain(output.iter()).copied().collect();
        let keys = block_keys(spec.trust, &whole, block_size);
        let known = client.manifest.keys.len() + client.keys_told[index];
        if keys.len() > known {
            client.keys_told[index] += keys.len() - known;
            let keys = keys[known..].to_vec();
            self.owed.push_back(ReplicaInput::BlockKeys { seq, first: known as u32, keys });
        }
    }

    fn ended(&mut self, seq: SeqId, outcome: Outcome, tokens: u32) {
        let name = self.name(seq);
        self.trace.push(format!("end {name} {outcome:?} {tokens}"));
        let client = self.client(seq.request);
        assert!(client.taken);
        let index = usize::from(seq.index);
        let output = &mut client.outputs[index];
        assert!(tokens as usize <= output.len());
        output.truncate(tokens as usize);
        assert!(client.ends[index].replace(outcome).is_none(), "{seq} ends twice");
    }

    fn name(&self, seq: SeqId) -> String {
        format!("{}.{}", self.clients[&seq.request.counter()].label, seq.index)
    }

    fn receive(&mut self, message: &FromReplica) {
        let label = |request: &RequestId| self.clients[&request.counter()].label.clone();
        match message {
            FromReplica::Refuse { request, reason, .. } => {
                self.trace.push(format!("refuse {} {reason:?}", label(request)));
                let client = self.client(*request);
                assert!(client.ends.iter().all(Option::is_none) && client.end.is_none());
                client.taken = false;
                client.refused = Some(*reason);
            }
            FromReplica::Started { request, cached_tokens, .. } => {
                self.trace.push(format!("start {} cached {cached_tokens}", label(request)));
                let client = self.client(*request);
                assert!(!core::mem::replace(&mut client.started, true), "started twice");
                assert!(*cached_tokens < client.manifest.input_tokens);
                self.hit_tokens += cached_tokens;
            }
            FromReplica::Ended { request, outcome, usage, .. } => {
                let unused = if *usage == Usage::default() { ", nothing used" } else { "" };
                self.trace.push(format!("ended {} {outcome:?}{unused}", label(request)));
                let client = self.client(*request);
                assert!(client.taken && client.ends.iter().all(Option::is_some), "it ends after its sequences");
                assert!(client.end.replace((*outcome, *usage)).is_none(), "it ends twice");
                let prompt = if client.started { client.manifest.input_tokens } else { 0 };
                assert_eq!(usage.prompt_tokens, prompt, "a prompt counts from the first row that is planned");
                let tokens: usize = client.outputs.iter().map(Vec::len).sum();
                assert_eq!(usage.output_tokens as usize, tokens, "what counts is billed");
                assert!(client.decode_tokens >= usage.output_tokens);
                assert!(client.prefill_tokens + usage.cached_tokens <= usage.prompt_tokens, "each prompt token once");
            }
            FromReplica::Progress(progress) => {
                let client = self.client(progress.request);
                assert!(client.end.is_none(), "progress after the end");
                assert_eq!(progress.first_token, client.decode_tokens == 0 && progress.decode_tokens > 0);
                client.prefill_tokens += progress.prefill_tokens;
                client.decode_tokens += progress.decode_tokens;
            }
            FromReplica::Report(report) => {
                let load = &report.load;
                let held = load.active_blocks + load.reclaimable_blocks + load.transfer_blocks;
                assert_eq!(held + load.cached_blocks + load.free_blocks, load.total_blocks);
                assert_eq!(report.covers.0, self.dispatches);
                assert!(report.credit.blocks <= u64::from(load.total_blocks));
            }
            FromReplica::Preempted { request, computed_tokens, freed_blocks, cause_code, .. } => {
                let name = label(request);
                self.trace
                    .push(format!("preempt {name} computed {computed_tokens} freed {freed_blocks} cause {cause_code}"));
            }
            FromReplica::Resumed { request, recomputed_tokens, .. } => {
                self.trace.push(format!("resume {} recompute {recomputed_tokens}", label(request)));
            }
            FromReplica::Party { .. } => panic!("nothing is handed off here"),
            FromReplica::Cache { .. } => {}
        }
    }

    fn observe(&mut self, event: ReplicaEvent) {
        match event {
            ReplicaEvent::Broken(what) if self.may_break => self.trace.push(format!("broken {what}")),
            ReplicaEvent::Broken(what) => panic!("broken: {what}"),
            ReplicaEvent::Stale => {
                self.stale += 1;
                self.trace.push("stale".to_string());
            }
            ReplicaEvent::Preempted { .. } => self.preemptions += 1,
            ReplicaEvent::Fallback { reason, .. } => {
                assert_ne!(reason, 0, "no opinion is no strike");
                self.fallbacks += 1;
            }
            ReplicaEvent::Evicted { blocks } => self.evicted_blocks += blocks,
            _ => {}
        }
    }

    /// Lets everything that is here end, and asserts that it does.
    pub fn run_dry(&mut self) {
        for _ in 0..100_000 {
            if self.pay() {
                continue;
            }
            if !self.flights.is_empty() {
                self.complete();
                continue;
            }
            if self.replica.is_idle() {
                return self.assert_dry();
            }
            let wake = self.replica.next_wake();
            assert_ne!(wake, Instant::NEVER, "something is here, nothing is in flight and nobody will look again");
            self.now = self.now.max(wake);
            self.step(ReplicaInput::Tick);
        }
        panic!("no end in sight: {:?}", self.replica.gauges());
    }

    fn assert_dry(&mut self) {
        let counts = self.replica.kv().counts();
        assert_eq!((counts.active, counts.reclaimable, counts.in_transfer()), (0, 0, 0), "all blocks came back");
        assert_eq!(self.replica.kv().reservations().total(), 0);
        for (number, client) in &self.clients {
            assert_eq!(client.taken, client.end.is_some(), "request {number} was taken and must end");
        }
    }

    /// Compares what came out with what must come out.
    pub fn assert_outputs(&self) {
        for (number, client) in &self.clients {
            for (index, output) in client.outputs.iter().enumerate() {
                let spec = &client.spec;
                let seed = sequence_seed(spec.seed, index as u16);
                let expected = expected_output(&spec.prompt, seed, spec.max_output, spec.stop_string);
                // The last token may have ended the answer by its cap before its text was looked at.
                let cut = output.iter().position(|token| spec.stop_string && *token == STOP_STRING);
                let output = &output[..cut.unwrap_or(output.len())];
                match client.ends[index] {
                    Some(Outcome::Stop | Outcome::Length) if !client.cut => {
                        assert_eq!(output, expected, "request {number}, sequence {index}");
                    }
                    _ => assert!(expected.starts_with(output), "request {number}, sequence {index}"),
                }
            }
        }
    }

    /// A plan in one line: each row as sequence, first position and number of tokens; `*` samples, `<` takes a token still in flight.
    /// With operations: a line each before it.
    fn show(&self, plan: &Plan) -> String {
        let mut line = String::new();
        let slots: BTreeMap<u32, String> = plan.rows.iter().map(|row| (row.slot.0, self.name(row.seq))).collect();
        for op in plan.ops.iter().filter(|_| self.show_ops) {
            line += &match op {
                PlanOp::OpenSlot { slot, seq } => format!("open {} in slot {slot}", self.name(*seq)),
                PlanOp::SetBlock { slot, index, block, .. } => format!("{}[{index}] = {}", slots[&slot.0], block.index),
                PlanOp::CopyBlock { from, to, tokens } => format!("copy {tokens} of {} to {}", from.index, to.index),
                PlanOp::DropSlot { slot } => format!("drop slot {slot}"),
            };
            line += "\n";
        }
        line += &format!("step {}", plan.batch);
        for row in &plan.rows {
            let sample = if row.sample { "*" } else { "" };
            let source = if row.input == TokenSource::Known { "" } else { "<" };
            line += &format!(" {}@{}+{}{source}{sample}", self.name(row.seq), row.start, row.tokens);
        }
        line
    }
}
