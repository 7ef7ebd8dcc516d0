//! For unit tests: the wiring without any loop behind it. What is sent lies in the mailboxes until a test looks.

use std::sync::Arc;

use penstock_base::{
    ClassRank, DispatchNumber, Duration, FlowId, GatewayEpoch, Instant, Priority, ReplicaId, RequestId, SessionId,
    TenantId, TenantTerms, Traits, TrustGroup,
};
use penstock_exec::SamplingParams;
use penstock_model::Namespace;
use penstock_sched::message::{Credit, Load, Report};

use crate::clock::Clock;
use crate::config::EngineLimits;
use crate::context::{ContextRules, RequestContext};
use crate::gateway_loop;
use crate::mailbox::Mailbox;
use crate::metrics::Metrics;
use crate::outputs;
use crate::permit::Permits;
use crate::policies::log::DecisionsConfig;
use crate::policies::machine::PolicyPlane;
use crate::policies::seats::PolicySource;
use crate::remote::Replicas;
use crate::request::Submission;
use crate::status::{QueueStatus, Status};
use crate::stream::{ClientSide, EventStream, StreamWriter, stream};
use crate::wiring::{Board, Wiring};

/// Wiring for `requests_max` requests and one replica, native policies.
pub(crate) fn wiring(requests_max: usize) -> Arc<Wiring> {
    let source = PolicySource::native();
    Arc::new(Wiring {
        clock: Clock::starting_now(),
        metrics: Arc::new(Metrics::new("demo")),
        board: Board::new(Permits::new(requests_max, 1 << 20), Vec::new(), true),
        limits: EngineLimits::default(),
        policies: PolicyPlane::new(source, 1, DecisionsConfig::default()).expect("a thread"),
        journal: None,
        keeps_output: true,
        context_tokens_max: 1_024,
        gateway: Mailbox::new(&gateway_loop::lanes(requests_max, 1)),
        replicas: Replicas::new([(ReplicaId(0), Mailbox::new(&[64; 11]))]),
        links: None,
        joins: None,
        movers: crate::handoff::Movers::default(),
        outputs: Mailbox::new(&outputs::lanes(requests_max, 1)),
    })
}

/// A greedy request of ten tokens for at most twenty.
pub(crate) fn request(wiring: &Arc<Wiring>, number: u64) -> (Arc<RequestContext>, StreamWriter, EventStream) {
    let submission = Submission {
        tenant: TenantId(1),
        terms: TenantTerms::default(),
        flow: FlowId(1),
        session: SessionId(0),
        trust: TrustGroup(1),
        class: ClassRank::default(),
        priority: Priority(0),
        prompt: vec![1; 10].into(),
        sequences: 1,
        max_output_tokens: 20,
        sampling: Arc::new(SamplingParams::default()),
        stop_strings: Vec::new().into(),
        arrived: Instant::ZERO,
        deadline: Instant::NEVER,
        slo_ttft: Duration::MAX,
        slo_tpot: Duration::MAX,
        traits: Traits::STREAMING,
        retention: 50,
        retry: false,
    };
    let namespace = Namespace([0; 32]);
    let rules = ContextRules { namespace: &namespace, block_size_tokens: 16, vocabulary: 64, prefix_cache: false };
    let mut context = RequestContext::new(&submission, rules).expect("a sound submission");
    let id = RequestId::new(GatewayEpoch(1), number).expect("a small number");
    context.name(id);
    let permit = wiring.board.permits.take(1).expect("room");
    let client = Arc::clone(wiring) as Arc<dyn ClientSide>;
    let total = Arc::clone(&wiring.board.send_buffer_bytes);
    let (writer, reader) = stream(id, permit, &wiring.limits, wiring.clock, total, client);
    (Arc::new(context), writer, reader)
}

/// The value of the metric line that begins with `name`.
pub(crate) fn metric(wiring: &Wiring, name: &str) -> f64 {
    let page = wiring.metrics.render(&wiring.board.status(wiring.clock.now()));
    let line = page.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
    line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
}

/// Of an engine with nothing in it.
pub(crate) fn quiet_status() -> Status {
    Status {
        ready: true,
        live: true,
        draining: false,
        stuck: false,
        replicas: Vec::new(),
        queue: QueueStatus::default(),
    }
}

/// A report of an idle replica that has told so many events of its cache.
pub(crate) fn report(cache_sequence: u64) -> Report {
    Report {
        number: 1,
        as_of: Instant::ZERO,
        covers: DispatchNumber(0),
        credit: Credit::default(),
        load: Load::default(),
        cache_sequence,
    }
}
