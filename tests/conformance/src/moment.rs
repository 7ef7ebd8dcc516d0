//! What is a policy asked? A question with everything it is asked over, by signal, and the facts told before it.

use penstock_base::{ClassRank, Priority, RequestId, Traits};
use penstock_policy_api::validate::Standing;
use penstock_policy_api::{
    AdmissionSignal, ClassSignal, CommonSignal, ContextSource, EvictionSignal, Fact, OrderSignal, OverloadSignal,
    ReplicaSignal, RequestRecord, RoutingPhase, RoutingSignal, RowSource, RunSignal, RunningSignal, Signal,
    VictimsSignal, WaitingSignal,
};

/// What a host knows of a question's context. Positions are those of the registry; none is unknown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Context<S> {
    /// Of table `common`.
    pub common: Vec<Option<u64>>,
    /// Of the question's own table.
    pub own: Vec<Option<u64>>,
    of: std::marker::PhantomData<S>,
}

/// What a host knows of a question's candidates, in host order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rows<S> {
    /// One list of values a candidate.
    pub rows: Vec<Vec<Option<u64>>>,
    of: std::marker::PhantomData<S>,
}

impl<S: Signal> Context<S> {
    /// Asks `value` for each signal; of table `common` by its own enum.
    pub fn of(mut common: impl FnMut(CommonSignal) -> Option<u64>, mut value: impl FnMut(S) -> Option<u64>) -> Self {
        Self {
            common: CommonSignal::ALL.iter().map(|signal| common(*signal)).collect(),
            own: S::ALL.iter().map(|signal| value(*signal)).collect(),
            of: std::marker::PhantomData,
        }
    }
}

impl<S: Signal> Rows<S> {
    /// Asks `value` for each signal of each of `rows` candidates.
    pub fn of(rows: usize, mut value: impl FnMut(S, usize) -> Option<u64>) -> Self {
        let row = |row| S::ALL.iter().map(|signal| value(*signal, row)).collect();
        Self { rows: (0..rows).map(row).collect(), of: std::marker::PhantomData }
    }

    /// Changes one value.
    pub fn set(&mut self, row: usize, which: S, value: Option<u64>) {
        self.rows[row][which.index()] = value;
    }
}

impl<S: Signal> ContextSource<S> for Context<S> {
    fn common(&self, which: CommonSignal) -> Option<u64> {
        self.common[which.index()]
    }
    fn value(&self, which: S) -> Option<u64> {
        self.own[which.index()]
    }
}

impl<S: Signal> RowSource<S> for Rows<S> {
    fn rows(&self) -> usize {
        self.rows.len()
    }
    fn cell(&self, which: S, row: usize) -> Option<u64> {
        self.rows[row][which.index()]
    }
}

/// One question, as a machine would put it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "each is the question it is spelt as, over the tables of the contract")]
pub enum Question {
    Admission {
        request: RequestRecord,
        deferrals: u32,
        context: Context<AdmissionSignal>,
    },
    Routing {
        request: RequestRecord,
        phase: RoutingPhase,
        context: Context<RoutingSignal>,
        replicas: Rows<ReplicaSignal>,
    },
    Order {
        context: Context<OrderSignal>,
        waiting: Rows<WaitingSignal>,
    },
    Victims {
        context: Context<VictimsSignal>,
        running: Rows<RunningSignal>,
    },
    Eviction {
        context: Context<EvictionSignal>,
        runs: Rows<RunSignal>,
    },
    Overload {
        context: Context<OverloadSignal>,
        classes: Rows<ClassSignal>,
        replicas: Rows<ReplicaSignal>,
        standing: Standing,
    },
}

/// One question, when it is asked, and what is told before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Moment {
    /// The machine's time.
    pub now_us: u64,
    /// In the order they happened. A policy is told those that it asked for.
    pub facts: Vec<Fact>,
    /// What is asked.
    pub question: Question,
}

impl Question {
    /// Which of the contract's questions.
    pub fn which(&self) -> penstock_policy_api::Question {
        match self {
            Self::Admission { .. } => penstock_policy_api::Question::Admission,
            Self::Routing { .. } => penstock_policy_api::Question::Routing,
            Self::Order { .. } => penstock_policy_api::Question::Order,
            Self::Victims { .. } => penstock_policy_api::Question::Victims,
            Self::Eviction { .. } => penstock_policy_api::Question::Eviction,
            Self::Overload { .. } => penstock_policy_api::Question::Overload,
        }
    }

    /// Candidates, in all matrices together.
    pub fn rows(&self) -> usize {
        match self {
            Self::Admission { .. } => 0,
            Self::Routing { replicas, .. } => replicas.rows.len(),
            Self::Order { waiting, .. } => waiting.rows.len(),
            Self::Victims { running, .. } => running.rows.len(),
            Self::Eviction { runs, .. } => runs.rows.len(),
            Self::Overload { classes, replicas, .. } => classes.rows.len() + replicas.rows.len(),
        }
    }
}

/// A request of middling everything.
pub(crate) fn plain_request() -> RequestRecord {
    RequestRecord {
        request_id: RequestId(1),
        tenant_id: 1,
        flow_id: 1,
        session_id: 0,
        class_rank: ClassRank::default(),
        attempt: 1,
        sequences: 1,
        priority: Priority(0),
        input_tokens: 64,
        max_output_tokens: 64,
        deadline_us: u64::MAX,
        traits: Traits::default(),
    }
}
