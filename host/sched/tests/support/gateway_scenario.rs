//! Text in, effects out: a scenario drives one gateway and writes down everything that it does.
//!
//! ```text
//! config queue_requests_max=2 starve=1s     before anything else
//! 0ms up A slots=4 blocks=100               a time, then an input
//! 0ms report A credit=4,512,100             slots, prefill tokens, blocks; number and `covers` count by themselves
//! 1ms arrive r1 in=32 out=16 class=5
//! 2ms routing place B,A wait=50ms           what a policy answers from here on
//! run 100ms                                 ticks whenever the gateway asks for it, until then
//! show queue                                a look at the observers
//! ```
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use penstock_base::{
    BlockKey, CancelCause, ClassRank, DispatchNumber, Duration, FlowId, Generation, Instant, Manifest, Outcome,
    Priority, RefuseReason, ReplicaEpoch, ReplicaId, RequestId, SessionId, TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_policy_api::{Action, ActionKind, Answer, Decision, FactSet, Rest, Stance, Verdict};
use penstock_sched::gateway::{
    DeliveryEvent, Gateway, GatewayConfig, GatewayEffect, GatewayEffects, GatewayEvent, GatewayInput, ReplicaFacts,
};
use penstock_sched::message::{CacheEvent, Credit, FromReplica, Load, Progress, Report, ToReplica, Usage};
use penstock_sched::quota::{QuotaShare, QuotaSlots};

use crate::policies::{Admit, Give, Order, Route, Scripted};

/// Runs a scenario and returns its trace.
pub fn run(text: &str) -> String {
    let mut world = World::new(config_of(text));
    for line in text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()) {
        if !line.is_empty() && !line.starts_with("config ") {
            world.line(line);
        }
    }
    world.trace
}

fn config_of(text: &str) -> GatewayConfig {
    let mut config = GatewayConfig::default();
    let words = text.lines().filter_map(|line| line.trim().strip_prefix("config "));
    for (key, value) in words.flat_map(str::split_whitespace).filter_map(|word| word.split_once('=')) {
        match key {
            "queue_requests_max" => config.queue_requests_max = number(value) as u32,
            "queue_tokens_max" => config.queue_tokens_max = number(value),
            "running_requests_max" => config.running_requests_max = number(value) as u32,
            "deferred_requests_max" => config.deferred_requests_max = number(value) as u32,
            "flows_max" => config.flows_max = number(value) as usize,
            "tenants_max" => config.tenants_max = number(value) as usize,
            "replicas_max" => config.replicas_max = number(value) as usize,
            "directory_keys_max" => config.directory_keys_max = number(value) as usize,
            "context_tokens_max" => config.context_tokens_max = number(value) as u32,
            "order_rows" => config.order_rows = number(value) as usize,
            "routing_rows" => config.routing_rows = number(value) as usize,
            "attempts_max" => config.attempts_max = number(value) as u16,
            "queue_wait_max" => config.queue_wait_max = duration(value),
            "starve" => config.starve = duration(value),
            "no_progress" => config.no_progress = duration(value),
            "quota_window" => config.quota_window = duration(value),
            "gateways" => config.gateways = number(value) as u32,
            "quota_floor_ppm" => config.quota_floor_ppm = number(value) as u32,
            "stale_load" => config.stale_load = duration(value),
            "overload_tick" => config.overload_tick = duration(value),
            "class_slo_ttft" => config.class_slo_ttft = [duration(value); ClassRank::COUNT],
            other => panic!("no such key: {other}"),
        }
    }
    config
}

fn number(word: &str) -> u64 {
    word.parse().unwrap_or_else(|_| panic!("a number: {word}"))
}

fn duration(word: &str) -> Duration {
    let digits = word.trim_end_matches(|c: char| c.is_alphabetic());
    match &word[digits.len()..] {
        "us" => Duration::from_us(number(digits)),
        "ms" => Duration::from_ms(number(digits)),
        "s" => Duration::from_s(number(digits)),
        _ => panic!("a duration with unit: {word}"),
    }
}

/// `A` is replica 1, `B` is 2 ...
fn replica(name: &str) -> ReplicaId {
    ReplicaId(u32::from(name.as_bytes()[0] - b'A') + 1)
}

fn name(replica: ReplicaId) -> char {
    char::from(b'A' + (replica.0 - 1) as u8)
}

fn request(name: &str) -> RequestId {
    RequestId(number(name.trim_start_matches('r')))
}

fn key(n: u64) -> BlockKey {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    BlockKey(bytes)
}

/// Words of one line: flags and key=value pairs.
struct Words<'a>(Vec<&'a str>);

impl<'a> Words<'a> {
    fn get(&self, key: &str) -> Option<&'a str> {
        self.0.iter().filter_map(|word| word.split_once('=')).find(|(other, _)| *other == key).map(|(_, value)| value)
    }
    fn number(&self, key: &str, default: u64) -> u64 {
        self.get(key).map_or(default, number)
    }
    fn has(&self, flag: &str) -> bool {
        self.0.contains(&flag)
    }
    fn at(&self, index: usize) -> &'a str {
        self.0.get(index).copied().unwrap_or_else(|| panic!("word {index} is missing in {:?}", self.0))
    }
}

/// What the harness remembers of one replica.
#[derive(Clone, Copy, Default)]
struct Peer {
    epoch: u64,
    reports: u64,
    dispatches: u64,
    cache_sequence: u64,
    total_blocks: u32,
}

/// A gateway, its policies, and what the harness counts for it.
pub struct World {
    pub gateway: Gateway,
    pub policies: Scripted,
    pub now: Instant,
    pub trace: String,
    pub show_stances: bool,
    peers: BTreeMap<ReplicaId, Peer>,
    attempts: BTreeMap<RequestId, u16>,
    numbers: BTreeMap<RequestId, DispatchNumber>,
    pub effects: GatewayEffects,
}

impl World {
    pub fn new(config: GatewayConfig) -> Self {
        Self {
            gateway: Gateway::new(config, Instant::ZERO),
            policies: Scripted::native(),
            now: Instant::ZERO,
            trace: String::new(),
            show_stances: false,
            peers: BTreeMap::new(),
            attempts: BTreeMap::new(),
            numbers: BTreeMap::new(),
            effects: Vec::new(),
        }
    }

    /// Steps once, checks everything, and writes the effects down.
    pub fn step(&mut self, input: GatewayInput) {
        self.effects.clear();
        self.gateway.step(self.now, input, &mut self.policies, &mut self.effects);
        if let Err(broken) = self.gateway.check() {
            panic!("{broken}\n{}", self.trace);
        }
        for effect in std::mem::take(&mut self.effects) {
            if let Some(line) = self.describe(&effect) {
                writeln!(self.trace, "    {line}").expect("writes to a string");
            }
            self.effects.push(effect);
        }
    }

    /// Ticks whenever the gateway wants to be woken, up to `until`.
    pub fn run_until(&mut self, until: Instant) {
        let mut idle = 0;
        while self.gateway.next_wake() <= until {
            let wake = self.gateway.next_wake();
            idle = if wake > self.now { 0 } else { idle + 1 };
            assert!(idle < 8, "it wants to be woken for nothing at {}\n{}", self.now_text(), self.trace);
            self.now = self.now.max(wake);
            let before = self.trace.len();
            let at = format!("  {} wakes\n", self.now_text());
            self.trace.push_str(&at);
            self.step(GatewayInput::Tick);
            if self.trace.len() == before + at.len() {
                self.trace.truncate(before);
            }
        }
        self.now = self.now.max(until);
    }

    fn now_text(&self) -> String {
        let us = self.now.as_us();
        if us.is_multiple_of(1_000) { format!("{}ms", us / 1_000) } else { format!("{us}us") }
    }

    /// One line of a scenario.
    pub fn line(&mut self, line: &str) {
        let mut words: Vec<&str> = line.split_whitespace().collect();
        if words[0].starts_with(|c: char| c.is_ascii_digit()) {
            let at = Instant::ZERO + duration(words.remove(0));
            assert!(at >= self.now, "time runs forward: {line}");
            self.run_until(Instant(at.0.saturating_sub(1)));
            self.now = at;
        }
        writeln!(self.trace, "{} {}", self.now_text(), words.join(" ")).expect("writes to a string");
        let verb = words.remove(0);
        let words = Words(words);
        match verb {
            "run" => {
                let until = self.now + duration(words.at(0));
                self.run_until(until);
            }
            "admission" | "routing" | "order" | "overload" | "facts" | "stances" => self.script(verb, &words),
            "show" => self.show(&words),
            _ => {
                let input = self.input(verb, &words);
                self.step(input);
            }
        }
    }

    fn input(&mut self, verb: &str, words: &Words<'_>) -> GatewayInput {
        match verb {
            "arrive" => GatewayInput::Arrive(Arc::new(self.manifest(words))),
            "cancel" => GatewayInput::Cancel { request: request(words.at(0)), cause: CancelCause::Client },
            "delivery" => {
                let event = match words.at(1) {
                    "streaming" => DeliveryEvent::Streaming,
                    "disconnected" => DeliveryEvent::Disconnected,
                    "acknowledged" => DeliveryEvent::Acknowledged,
                    other => panic!("no such event: {other}"),
                };
                GatewayInput::Delivery { request: request(words.at(0)), event }
            }
            "drain" if !words.0.is_empty() => {
                let (replica, epoch) = self.peer(words.at(0));
                GatewayInput::ReplicaDrain { replica, epoch }
            }
            "drain" => GatewayInput::Drain,
            "down" => {
                let (replica, epoch) = self.peer(words.at(0));
                GatewayInput::ReplicaDown { replica, epoch }
            }
            "policies" => {
                self.policies.generation = Generation(number(words.at(0)));
                GatewayInput::Policies(self.policies.generation)
            }
            "tick" => GatewayInput::Tick,
            "share" => {
                let mut slots = QuotaSlots::NONE;
                (0..words.number("slots", 0) as u32).for_each(|slot| slots.insert(slot));
                let lease = words.get("for").map_or(Duration::ZERO, duration);
                let as_of = words.get("as_of").map_or(self.now, |at| Instant::ZERO + duration(at));
                let members = words.number("members", 2) as u32;
                GatewayInput::QuotaShare(QuotaShare { slots, members, as_of, until: as_of + lease })
            }
            "up" => self.up(words),
            _ => {
                let (replica, epoch) = self.peer(words.at(0));
                let epoch = ReplicaEpoch(words.number("epoch", epoch.0));
                GatewayInput::Replica { replica, epoch, message: self.message(verb, words) }
            }
        }
    }

    fn peer(&self, name: &str) -> (ReplicaId, ReplicaEpoch) {
        let id = replica(name);
        (id, ReplicaEpoch(self.peers.get(&id).map_or(1, |peer| peer.epoch)))
    }

    fn up(&mut self, words: &Words<'_>) -> GatewayInput {
        let id = replica(words.at(0));
        let epoch = words.number("epoch", self.peers.get(&id).map_or(1, |peer| peer.epoch + 1));
        let total_blocks = words.number("blocks", 1_000) as u32;
        self.peers.insert(id, Peer { epoch, total_blocks, ..Peer::default() });
        GatewayInput::ReplicaUp(ReplicaFacts {
            replica: id,
            epoch: ReplicaEpoch(epoch),
            role_code: words.number("role", 3) as u8,
            total_blocks,
            slots: words.number("slots", 16) as u32,
            round_tokens: words.number("round", 512) as u32,
            context_tokens_max: words.number("context", 4_096) as u32,
            speed_ppm: 1_000_000,
            zone_rank: 0,
            domain: 0,
        })
    }

    fn message(&mut self, verb: &str, words: &Words<'_>) -> FromReplica {
        let peer = self.peers.entry(replica(words.at(0))).or_default();
        if verb == "report" {
            peer.reports += 1;
            let credit: Vec<u64> = words.get("credit").unwrap_or("0,0,0").split(',').map(number).collect();
            let total = words.number("total", u64::from(peer.total_blocks)) as u32;
            let active = words.number("active", 0) as u32;
            return FromReplica::Report(Report {
                number: words.number("number", peer.reports),
                as_of: self.now - words.get("age").map_or(Duration::ZERO, duration),
                covers: DispatchNumber(words.number("covers", peer.dispatches)),
                credit: Credit { requests: credit[0] as u32, prefill_tokens: credit[1], blocks: credit[2] },
                load: Load {
                    total_blocks: total,
                    active_blocks: active,
                    free_blocks: total - active,
                    running_requests: words.number("running", 0) as u32,
                    ready_requests: words.number("ready", 0) as u32,
                    prefill_tokens: words.number("prefill", 0),
                    prefill_tokens_per_sec: words.number("prefill_rate", 0),
                    prefill_token_ns: words.number("token_ns", 0),
                    step: words.get("step").map_or(Duration::ZERO, duration),
                    ..Load::default()
                },
                cache_sequence: words.number("cache", peer.cache_sequence),
            });
        }
        if verb == "cache" {
            peer.cache_sequence = words.number("seq", peer.cache_sequence + 1);
            let n = |at| number(words.at(at).trim_start_matches('k'));
            let event = match words.at(1) {
                "stored" => CacheEvent::Stored { key: key(n(2)), depth: 0 },
                "removed" => CacheEvent::Removed { key: key(n(2)) },
                "cleared" => CacheEvent::Cleared,
                other => panic!("no such event: {other}"),
            };
            return FromReplica::Cache { sequence: peer.cache_sequence, event };
        }
        let request = request(words.at(1));
        let known = self.attempts.get(&request).copied().unwrap_or(1);
        let attempt = words.number("attempt", u64::from(known)) as u16;
        let number = self.numbers.get(&request).copied().unwrap_or_default();
        match verb {
            "started" => FromReplica::Started { request, attempt, cached_tokens: words.number("cached", 0) as u32 },
            "progress" => FromReplica::Progress(Progress {
                request,
                attempt,
                prefill_tokens: words.number("prefill", 0) as u32,
                decode_tokens: words.number("decode", 0) as u32,
                first_token: words.has("first"),
                device_us: words.number("device_us", 0) as u32,
            }),
            "refuse" => FromReplica::Refuse { request, attempt, number, reason: RefuseReason::NoBlocks },
            "ended" => FromReplica::Ended {
                request,
                attempt,
                outcome: if words.has("stop") { Outcome::Stop } else { Outcome::Length },
                usage: Usage {
                    prompt_tokens: words.number("in", 0) as u32,
                    output_tokens: words.number("out", 0) as u32,
                    ..Usage::default()
                },
            },
            other => panic!("no such verb: {other}"),
        }
    }

    /// A manifest from words; every request has its own flow unless told otherwise.
    fn manifest(&self, words: &Words<'_>) -> Manifest {
        let id = request(words.at(0));
        let mut traits = Traits::default();
        for (flag, bit) in
            [("may_defer", Traits::MAY_DEFER), ("may_degrade", Traits::MAY_DEGRADE), ("sheddable", Traits::SHEDDABLE)]
        {
            if words.has(flag) {
                traits = traits.with(bit);
            }
        }
        let keys: Vec<BlockKey> =
            words.get("keys").map(|keys| keys.split(',').map(|k| key(number(k))).collect()).unwrap_or_default();
        let relative = |key: &str| words.get(key).map(duration);
        Manifest {
            request: id,
            tenant: TenantId(words.number("tenant", 0)),
            flow: FlowId(words.number("flow", id.0)),
            session: SessionId(words.number("session", 0)),
            trust: TrustGroup(0),
            class: ClassRank::clamped(words.number("class", 3) as u8),
            priority: Priority(words.get("prio").map_or(0, |prio| prio.parse().expect("a priority"))),
            sequences: words.number("n", 1) as u16,
            input_tokens: words.number("in", 16) as u32,
            max_output_tokens: words.number("out", 16) as u32,
            arrived: self.now,
            deadline: relative("deadline").map_or(Instant::NEVER, |left| self.now + left),
            slo_ttft: relative("ttft").unwrap_or(Duration::MAX),
            slo_tpot: relative("tpot").unwrap_or(Duration::MAX),
            traits,
            prefix_key: keys.get(3).map_or(0, |key| key.short()),
            keys: keys.into_boxed_slice(),
            retention: 50,
            retry: words.has("retry"),
            terms: TenantTerms {
                requests_max: words.number("requests_max", u64::from(u32::MAX)) as u32,
                window_tokens_max: words.number("window_max", u64::MAX),
                guaranteed_tokens: words.number("guaranteed", 0),
                borrow_tokens_max: words.number("borrow", 0),
                ..TenantTerms::default()
            },
        }
    }

    fn script(&mut self, verb: &str, words: &Words<'_>) {
        let us = |key: &str| words.get(key).map_or(0, |value| duration(value).as_us() as u32);
        match (verb, words.at(0)) {
            ("admission", "native") => self.policies.admission.script = Admit::Native,
            ("admission", what) => {
                let reserve_output_tokens = words.number("reserve", 0) as u32;
                let class_rank = words.number("class", 3) as u8;
                let verdict = match what {
                    "admit" => Verdict::Admit { reserve_output_tokens, class_rank },
                    "defer" => Verdict::Defer { for_us: us("for") },
                    "degrade" => {
                        let max_output_tokens = words.number("out", 16) as u32;
                        Verdict::Degrade { max_output_tokens, reserve_output_tokens, class_rank }
                    }
                    "reject" => Verdict::Reject {
                        reason: words.number("reason", 1) as u16,
                        retry_after_ms: words.number("retry_ms", 0) as u32,
                    },
                    other => panic!("no such verdict: {other}"),
                };
                self.policies.admission.script = Admit::Say(Answer::Proposal(verdict));
            }
            ("routing", "native") => self.policies.routing.script = Route::Native,
            ("routing", "hold") => self.policies.routing.script = Route::Hold(us("for")),
            ("routing", "place") => {
                let replicas = words.at(1).split(',').map(replica).collect();
                self.policies.routing.script = Route::Place(replicas, us("wait"));
            }
            ("routing", "rows") => {
                self.policies.routing.script =
                    Route::Rows(words.at(1).split(',').map(|row| number(row) as u32).collect());
            }
            ("order", "native") => self.policies.fairness.script = Order::Native,
            ("order", "rank") => {
                let requests = words.get("requests").unwrap_or_default();
                self.policies.fairness.script = Order::Rank {
                    requests: requests.split(',').filter(|r| !r.is_empty()).map(request).collect(),
                    rest: if words.has("keep") { Rest::Keep } else { Rest::Append },
                    tpot_target_us: words.get("tpot").map_or(u32::MAX, |tpot| duration(tpot).as_us() as u32),
                };
            }
            ("overload", "native") => self.policies.overload.script = Give::Native,
            ("overload", "none") => self.policies.overload.script = Give::NoOpinion,
            ("overload", level) => {
                let actions = words.0.iter().skip(1).filter(|word| word.contains(':')).map(|word| {
                    let parts: Vec<&str> = word.split(':').collect();
                    let kind = ActionKind::from_name(parts[0]).expect("an action");
                    Action { what: kind.code(), class_rank: number(parts[1]) as u8, amount: number(parts[2]) }
                });
                let hold_us = words.get("hold").map_or(60_000_000, |hold| duration(hold).as_us() as u32);
                self.policies.overload.script =
                    Give::Say(Stance { level: number(level) as u8, hold_us }, actions.collect());
            }
            ("facts", _) => {
                self.policies =
                    Scripted::with(FactSet::all_for(Decision::Fairness), FactSet::all_for(Decision::Admission));
            }
            ("stances", _) => self.show_stances = true,
            other => panic!("no such script: {other:?}"),
        }
    }

    fn show(&mut self, words: &Words<'_>) {
        let gateway = &self.gateway;
        let line = match words.at(0) {
            "queue" => format!(
                "queued={} tokens={} deferred={} running={} live={}",
                gateway.queued_requests(),
                gateway.queued_tokens(),
                gateway.deferred_requests(),
                gateway.running_requests(),
                gateway.live_requests()
            ),
            "credit" => {
                let credits = gateway.replicas().map(|view| {
                    let credit = view.credit;
                    format!("{}={},{},{}", name(view.replica), credit.requests, credit.prefill_tokens, credit.blocks)
                });
                credits.collect::<Vec<_>>().join(" ")
            }
            "ready" => format!("ready={} progressing={}", gateway.is_ready(), gateway.is_progressing()),
            "level" => format!("level={}", gateway.stance_level()),
            "tenant" => format!("used={:?}", gateway.tenant_used_tokens(TenantId(number(words.at(1))))),
            "state" => format!("{:?}", gateway.request_state(request(words.at(1)))),
            "cache" => {
                let known: Vec<String> =
                    gateway.replicas().map(|view| format!("{}={}", name(view.replica), view.cache_known)).collect();
                format!("keys={} known {}", gateway.directory_keys(), known.join(" "))
            }
            "calls" => format!(
                "admission={} order={} routing={} overload={}",
                self.policies.admission.calls,
                self.policies.fairness.calls,
                self.policies.routing.calls,
                self.policies.overload.calls
            ),
            "facts" => {
                let facts = match words.at(1) {
                    "admission" => std::mem::take(&mut self.policies.admission.facts),
                    "routing" => std::mem::take(&mut self.policies.routing.facts),
                    "overload" => std::mem::take(&mut self.policies.overload.facts),
                    _ => std::mem::take(&mut self.policies.fairness.facts),
                };
                let each =
                    facts.iter().map(|fact| format!("\n      {} {} {:?}", fact.at_us, fact.kind.name(), fact.slots));
                each.collect::<String>()
            }
            other => panic!("nothing to show: {other}"),
        };
        writeln!(self.trace, "    {line}").expect("writes to a string");
    }

    /// One effect as a line; routine ones are left out.
    fn describe(&mut self, effect: &GatewayEffect) -> Option<String> {
        Some(match effect {
            GatewayEffect::Send { replica, message, .. } => match message {
                ToReplica::Dispatch(dispatch) => {
                    let peer = self.peers.entry(*replica).or_default();
                    peer.dispatches = dispatch.number.0;
                    self.attempts.insert(dispatch.manifest.request, dispatch.attempt);
                    self.numbers.insert(dispatch.manifest.request, dispatch.number);
                    format!(
                        "dispatch r{} to {} number={} attempt={} class={} out={} reserve={}",
                        dispatch.manifest.request,
                        name(*replica),
                        dispatch.number,
                        dispatch.attempt,
                        dispatch.class.get(),
                        dispatch.max_output_tokens,
                        dispatch.reserve_output_tokens
                    )
                }
                ToReplica::Cancel { request, attempt, outcome } => {
                    format!("cancel r{request} at {} attempt={attempt} {outcome:?}", name(*replica))
                }
                ToReplica::Stance(stance) if self.show_stances => format!(
                    "stance to {} number={} level={} preempt={}:{} tpot={}",
                    name(*replica),
                    stance.number,
                    stance.level,
                    stance.preempt_class.get(),
                    stance.preempt_blocks,
                    if stance.tpot_target_us == u32::MAX { "-".into() } else { stance.tpot_target_us.to_string() }
                ),
                ToReplica::Stance(_) => return None,
                ToReplica::Prefill(_) | ToReplica::Decode(_) | ToReplica::PeerUp(_) => {
                    format!("{message:?} to {}", name(*replica))
                }
                ToReplica::Policies(generation) => format!("policies {generation} to {}", name(*replica)),
            },
            GatewayEffect::Queued { request, max_output_tokens, degraded } => {
                format!("queued r{request} out={max_output_tokens}{}", if *degraded { " degraded" } else { "" })
            }
            GatewayEffect::Dispatched { .. } => return None,
            GatewayEffect::Ended { request, outcome, usage, retry_after_ms } => {
                let retry = if *retry_after_ms > 0 { format!(" retry={retry_after_ms}ms") } else { String::new() };
                let used = format!("in={} out={}", usage.prompt_tokens, usage.output_tokens);
                format!("ended r{request} {outcome:?} {used}{retry}")
            }
            GatewayEffect::Event(GatewayEvent::Admission { verdict: 1, .. }) => "deferred".into(),
            GatewayEffect::Event(GatewayEvent::Admission { .. } | GatewayEvent::Routed { .. }) => return None,
            GatewayEffect::Event(event) => format!("event {event:?}"),
        })
    }
}
