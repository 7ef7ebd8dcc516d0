//! What does a policy answer to a case?

use std::fmt::Write as _;
use std::path::Path;

use penstock_base::codec::Writer;
use penstock_policy_api::{
    ActionKind, AdmissionPolicy, Answer, Call, ClassSignal, Context, Decision, EvictionPolicy, Fact, FairnessPolicy,
    FaultKind, Matrix, OverloadPolicy, OverloadQuestion, Placement, Policy, ReplicaSignal, RequestRecord, Rest,
    RestoreCause, RestoreInfo, RoutingPhase, RoutingPolicy, RoutingQuestion, RunSignal, RunningSignal, Verdict,
    WaitingSignal,
};

use crate::case::{Case, CaseFile, Step, Values, change_request, plain_request};
use crate::supply;

/// A policy to be put through cases: anything that implements the host's traits.
#[allow(missing_docs, reason = "each is the decision it is spelt as")]
pub enum Subject {
    Admission(Box<dyn AdmissionPolicy>),
    Routing(Box<dyn RoutingPolicy>),
    Fairness(Box<dyn FairnessPolicy>),
    Eviction(Box<dyn EvictionPolicy>),
    Overload(Box<dyn OverloadPolicy>),
}

impl Subject {
    fn policy(&mut self) -> &mut dyn Policy {
        match self {
            Self::Admission(policy) => policy.as_mut(),
            Self::Routing(policy) => policy.as_mut(),
            Self::Fairness(policy) => policy.as_mut(),
            Self::Eviction(policy) => policy.as_mut(),
            Self::Overload(policy) => policy.as_mut(),
        }
    }

    fn decision(&self) -> Decision {
        match self {
            Self::Admission(_) => Decision::Admission,
            Self::Routing(_) => Decision::Routing,
            Self::Fairness(_) => Decision::Fairness,
            Self::Eviction(_) => Decision::Eviction,
            Self::Overload(_) => Decision::Overload,
        }
    }
}

/// One answer to a case file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answered {
    /// Name of its case.
    pub case: String,
    /// The line that expects it, from 1.
    pub line: usize,
    /// What stands there, blanks as one.
    pub expected: String,
    /// What was answered.
    pub given: String,
}

/// Puts fresh subjects through every case of `text` and hands every answer over, for whoever reads what is expected in another way than
/// word by word. `make` gets a case's parameters.
pub fn answers(text: &str, make: &dyn Fn(&str) -> Result<Subject, String>) -> Result<Vec<Answered>, String> {
    Ok(tell(text, make)?.into_iter().flat_map(|told| told.answers).collect())
}

/// Puts fresh subjects through every case of `text` and says where an answer is not the expected one. `make` gets a case's parameters.
pub fn check(text: &str, make: &dyn Fn(&str) -> Result<Subject, String>) -> Result<(), String> {
    let mut faults = String::new();
    for told in tell(text, make)? {
        for answer in told.answers.iter().filter(|answer| answer.expected != answer.given) {
            let _ = writeln!(
                faults,
                "case {}, line {}:\n  expected {}\n  answered {}",
                told.name, answer.line, answer.expected, answer.given
            );
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(faults) }
}

/// [`check`] over every `*.case` file of a folder. A folder without one is an error, since a policy without cases shows nothing.
pub fn check_folder(folder: &Path, make: &dyn Fn(&str) -> Result<Subject, String>) -> Result<(), String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files: Vec<_> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    files.retain(|file| file.extension().is_some_and(|ending| ending == "case"));
    files.sort();
    if files.is_empty() {
        return Err(format!("{} holds no *.case file", folder.display()));
    }
    for file in files {
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        check(&text, make).map_err(|faults| format!("{}\n{faults}", file.display()))?;
    }
    Ok(())
}

/// Every answer and every saved state of a subject, as text: equal for two implementations of one rule, and for one run twice.
pub fn transcript(text: &str, make: &dyn Fn(&str) -> Result<Subject, String>) -> Result<String, String> {
    let mut out = String::new();
    for told in tell(text, make)? {
        let _ = writeln!(out, "case {}", told.name);
        for answer in told.answers {
            let _ = writeln!(out, "  {}", answer.given);
        }
        let _ = writeln!(out, "  state {}", told.state);
    }
    Ok(out)
}

struct Told {
    name: String,
    answers: Vec<Answered>,
    /// Saved at the end, in hexadecimal digits.
    state: String,
}

fn tell(text: &str, make: &dyn Fn(&str) -> Result<Subject, String>) -> Result<Vec<Told>, String> {
    let file = CaseFile::parse(text).map_err(|error| error.to_string())?;
    let mut all = Vec::new();
    for case in &file.cases {
        let subject = make(&case.parameters).map_err(|error| format!("case {}: {error}", case.name))?;
        if subject.decision() != file.decision {
            return Err(format!("a file for {} is put to a policy of another decision", file.decision.name()));
        }
        let mut stage = Stage::new(subject);
        let mut answers = Vec::new();
        for (line, step) in &case.steps {
            let fault = |problem: String| format!("case {}, line {line}: {problem}", case.name);
            match step {
                Step::Expect(expected) => {
                    let given = stage.ask(expected).map_err(fault)?;
                    let case = case.name.clone();
                    answers.push(Answered { case, line: *line, expected: expected.clone(), given });
                }
                other => stage.act(other, case, make).map_err(fault)?,
            }
        }
        all.push(Told { name: case.name.clone(), answers, state: hex(&stage.save()?) });
    }
    Ok(all)
}

/// What stands when a question is asked.
struct Stage {
    subject: Subject,
    call: Call,
    request: RequestRecord,
    phase: RoutingPhase,
    context: Values,
    /// Rows by table.
    rows: Vec<(String, Vec<Values>)>,
}

impl Stage {
    fn new(subject: Subject) -> Self {
        let call = Call { number: 0, now_us: 1_000_000, seed: 0 };
        let phase = RoutingPhase::Whole;
        Self { subject, call, request: plain_request(), phase, context: Values::new(), rows: Vec::new() }
    }

    fn act(&mut self, step: &Step, case: &Case, make: &dyn Fn(&str) -> Result<Subject, String>) -> Result<(), String> {
        match step {
            Step::Call(values) => {
                for (name, value) in values {
                    let value = value.ok_or("a call's fields are never unknown")?;
                    match name.as_str() {
                        "number" => self.call.number = value.saturating_sub(1),
                        "now-us" => self.call.now_us = value,
                        "seed" => self.call.seed = value,
                        other => return Err(format!("a call has no {other}")),
                    }
                }
            }
            Step::Request(pairs) => change_request(&mut self.request, pairs)?,
            Step::Phase(phase) => self.phase = *phase,
            Step::Context(values) => self.context.extend(values.clone()),
            Step::Rows { table, rows } => {
                self.rows.retain(|(name, _)| name != table);
                self.rows.push((table.clone(), rows.clone()));
            }
            Step::Fact { kind, at_us, slots } => {
                let fact = Fact { kind: *kind, at_us: at_us.unwrap_or(self.call.now_us), slots: *slots };
                let policy = self.subject.policy();
                if policy.terms().facts.has(*kind) {
                    policy.observe(&[fact]).map_err(|kind| format!("observe failed: {}", kind.name()))?;
                }
            }
            Step::Restart(values) => self.restart(values, case, make)?,
            Step::Expect(_) => {}
        }
        Ok(())
    }

    /// Saves, makes a new instance, restores. `now-us` is the time of the new machine, `elapsed-us` what passed in between.
    fn restart(
        &mut self,
        values: &Values,
        case: &Case,
        make: &dyn Fn(&str) -> Result<Subject, String>,
    ) -> Result<(), String> {
        let state = self.save()?;
        let elapsed_us = values.get("elapsed-us").copied().flatten().unwrap_or(0);
        let saved_now_us = self.call.now_us;
        let now_us = values.get("now-us").copied().flatten().unwrap_or(saved_now_us.saturating_add(elapsed_us));
        let schema = self.subject.policy().terms().state_schema;
        let info = RestoreInfo { schema, cause: RestoreCause::Restart, saved_now_us, now_us, elapsed_us };
        self.subject = make(&case.parameters)?;
        self.subject.policy().restore(&info, &state).map_err(|error| error.to_string())?;
        self.call.now_us = now_us;
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, String> {
        let mut bytes = || {
            let mut out = Writer::new();
            let saved = self.subject.policy().save(&mut out);
            saved.map(|()| out.into_bytes()).map_err(|kind| format!("save failed: {}", kind.name()))
        };
        let (first, second) = (bytes()?, bytes()?);
        if first == second { Ok(first) } else { Err("equal state was saved as different bytes".into()) }
    }

    fn table(&self, name: &str) -> &[Values] {
        self.rows.iter().find(|(table, _)| table == name).map_or(&[], |(_, rows)| rows)
    }

    /// Asks the file's question; of fairness the one that the expected answer names.
    fn ask(&mut self, expected: &str) -> Result<String, String> {
        self.call.number += 1;
        let tables: &[&str] = match (&self.subject, expected.split(' ').next()) {
            (Subject::Admission(_), _) => &[],
            (Subject::Routing(_), _) => &["replica"],
            (Subject::Fairness(_), Some("victims")) => &["running"],
            (Subject::Fairness(_), _) => &["waiting"],
            (Subject::Eviction(_), _) => &["run"],
            (Subject::Overload(_), _) => &["class", "replica"],
        };
        let known = |name: &String| tables.contains(&name.as_str()) || matches!(self.subject, Subject::Fairness(_));
        if let Some((stranger, _)) = self.rows.iter().find(|(name, _)| !known(name)) {
            return Err(format!("this question has no rows {stranger}"));
        }
        self.spelling(expected)?;
        Ok(match (tables, expected.starts_with("victims")) {
            (["replica"], _) => self.ask_routing(),
            (["waiting"], _) => self.ask_order(),
            (["running"], _) => self.ask_victims(),
            (["run"], _) => self.ask_eviction(),
            (["class", "replica"], _) => self.ask_overload(),
            _ => self.ask_admission(),
        })
    }

    /// Is every name one of the registry?
    fn spelling(&self, expected: &str) -> Result<(), String> {
        use penstock_policy_api::{
            AdmissionSignal, EvictionSignal, OrderSignal, OverloadSignal, RoutingSignal, VictimsSignal,
        };
        let context = match (&self.subject, expected.starts_with("victims")) {
            (Subject::Admission(_), _) => supply::stranger::<AdmissionSignal>(&self.context, true),
            (Subject::Routing(_), _) => supply::stranger::<RoutingSignal>(&self.context, true),
            (Subject::Fairness(_), true) => supply::stranger::<VictimsSignal>(&self.context, true),
            (Subject::Fairness(_), false) => supply::stranger::<OrderSignal>(&self.context, true),
            (Subject::Eviction(_), _) => supply::stranger::<EvictionSignal>(&self.context, true),
            (Subject::Overload(_), _) => supply::stranger::<OverloadSignal>(&self.context, true),
        };
        let rows = self.rows.iter().flat_map(|(table, rows)| rows.iter().map(move |row| (table.as_str(), row)));
        let mut cells = rows.filter_map(|(table, row)| match table {
            "replica" => supply::stranger::<ReplicaSignal>(row, false),
            "waiting" => supply::stranger::<WaitingSignal>(row, false),
            "running" => supply::stranger::<RunningSignal>(row, false),
            "run" => supply::stranger::<RunSignal>(row, false),
            "class" => supply::stranger::<ClassSignal>(row, false),
            _ => None,
        });
        match context.or_else(|| cells.next()) {
            None => Ok(()),
            Some(name) => Err(format!("there is no signal {name} here")),
        }
    }

    fn ask_admission(&mut self) -> String {
        let (call, request) = (self.call, self.request);
        let Subject::Admission(policy) = &mut self.subject else { return String::new() };
        let values = supply::context(&policy.describe().context, &self.context, &request);
        told(policy.decide(&call, &request, Context { values: &values }), |verdict| match verdict {
            Verdict::Admit { reserve_output_tokens, class_rank } => {
                format!("admit reserve {reserve_output_tokens} class {class_rank}")
            }
            Verdict::Defer { for_us } => format!("defer {for_us}"),
            Verdict::Degrade { max_output_tokens, reserve_output_tokens, class_rank } => {
                format!("degrade cap {max_output_tokens} reserve {reserve_output_tokens} class {class_rank}")
            }
            Verdict::Reject { reason, retry_after_ms } => {
                format!("reject {} retry-ms {retry_after_ms}", reason_name(reason))
            }
        })
    }

    fn ask_routing(&mut self) -> String {
        let replicas = match &self.subject {
            Subject::Routing(policy) => supply::rows(&policy.describe().rows, self.table("replica")),
            _ => Matrix::default(),
        };
        let (call, request, phase) = (self.call, self.request, self.phase);
        let Subject::Routing(policy) = &mut self.subject else { return String::new() };
        let values = supply::context(&policy.describe().context, &self.context, &request);
        let context = Context { values: &values };
        let asked = RoutingQuestion { request: &request, phase, context, replicas: &replicas };
        let mut ranked = Vec::new();
        let answer = policy.decide(&call, &asked, &mut ranked);
        told(answer, |placement| match placement {
            // The contract reads an empty ranking as no opinion, and a component has no other way to say so here.
            Placement::Place { .. } if ranked.is_empty() => NO_OPINION.into(),
            Placement::Place { wait_us, colocate } => {
                let wait = if wait_us > 0 { format!(" wait {wait_us}") } else { String::new() };
                format!("place{}{wait}{}", listed(&ranked), if colocate { " colocate" } else { "" })
            }
            Placement::Hold { for_us } => format!("hold {for_us}"),
        })
    }

    fn ask_order(&mut self) -> String {
        let waiting = match &self.subject {
            Subject::Fairness(policy) => supply::rows(&policy.describe().waiting, self.table("waiting")),
            _ => Matrix::default(),
        };
        let (call, request) = (self.call, self.request);
        let Subject::Fairness(policy) = &mut self.subject else { return String::new() };
        let values = supply::context(&policy.describe().order, &self.context, &request);
        let mut ranked = Vec::new();
        let answer = policy.order(&call, Context { values: &values }, &waiting, &mut ranked);
        let ranking = told(answer, |ranking| {
            let is_silent = ranked.is_empty() && ranking.rest == Rest::Append && ranking.tpot_target_us == u32::MAX;
            if is_silent {
                return NO_OPINION.into();
            }
            let keep = if ranking.rest == Rest::Keep { " keep" } else { "" };
            let target = match ranking.tpot_target_us {
                u32::MAX => String::new(),
                target => format!(" tpot {target}"),
            };
            format!("{}{keep}{target}", listed(&ranked).trim_start())
        });
        format!("order {ranking}")
    }

    fn ask_victims(&mut self) -> String {
        let running = match &self.subject {
            Subject::Fairness(policy) => supply::rows(&policy.describe().running, self.table("running")),
            _ => Matrix::default(),
        };
        let (call, request) = (self.call, self.request);
        let Subject::Fairness(policy) = &mut self.subject else { return String::new() };
        let values = supply::context(&policy.describe().victims, &self.context, &request);
        let mut yielders = Vec::new();
        let answer = policy.victims(&call, Context { values: &values }, &running, &mut yielders);
        let named = told(answer, |()| {
            let one = |yielder: &penstock_policy_api::Yielder| match yielder.how {
                0 => yielder.row.to_string(),
                1 => format!("{}:offload", yielder.row),
                how => format!("{}:{how}", yielder.row),
            };
            yielders.iter().map(one).collect::<Vec<_>>().join(" ")
        });
        format!("victims {named}")
    }

    fn ask_eviction(&mut self) -> String {
        let runs = match &self.subject {
            Subject::Eviction(policy) => supply::rows(&policy.describe().rows, self.table("run")),
            _ => Matrix::default(),
        };
        let (call, request) = (self.call, self.request);
        let Subject::Eviction(policy) = &mut self.subject else { return String::new() };
        let values = supply::context(&policy.describe().context, &self.context, &request);
        let mut worths = Vec::new();
        let answer = policy.decide(&call, Context { values: &values }, &runs, &mut worths);
        // The contract reads an empty list as no opinion.
        let answer = if worths.is_empty() && answer == Answer::Proposal(()) { Answer::NoOpinion } else { answer };
        told(answer, |()| {
            let one = |worth: &penstock_policy_api::Worth| match worth.to {
                0 => worth.price.to_string(),
                1 => format!("{}:dram", worth.price),
                2 => format!("{}:ssd", worth.price),
                to => format!("{}:{to}", worth.price),
            };
            format!("worth {}", worths.iter().map(one).collect::<Vec<_>>().join(" "))
        })
    }

    fn ask_overload(&mut self) -> String {
        let Subject::Overload(policy) = &self.subject else { return String::new() };
        let rows = &policy.describe().rows;
        let classes = supply::rows(&rows.classes, self.table("class"));
        let replicas = supply::rows(&rows.replicas, self.table("replica"));
        let (call, request) = (self.call, self.request);
        let Subject::Overload(policy) = &mut self.subject else { return String::new() };
        let values = supply::context(&policy.describe().context, &self.context, &request);
        let context = Context { values: &values };
        let asked = OverloadQuestion { context, classes: &classes, replicas: &replicas };
        let mut actions = Vec::new();
        let answer = policy.decide(&call, &asked, &mut actions);
        told(answer, |stance| {
            let mut out = format!("stance {} hold {}", stance.level, stance.hold_us);
            for action in &actions {
                let name = ActionKind::from_code(action.what)
                    .map_or_else(|| action.what.to_string(), |kind| kind.name().into());
                let _ = write!(out, " {name}:{}:{}", action.class_rank, action.amount);
            }
            out
        })
    }
}

const NO_OPINION: &str = "no opinion";

fn told<T>(answer: Answer<T>, proposal: impl FnOnce(T) -> String) -> String {
    match answer {
        Answer::Proposal(given) => proposal(given),
        Answer::NoOpinion => NO_OPINION.into(),
        Answer::Fault(kind) => format!("fault {}", FaultKind::name(kind)),
    }
}

fn listed(rows: &[u32]) -> String {
    rows.iter().fold(String::new(), |mut out, row| {
        let _ = write!(out, " {row}");
        out
    })
}

fn reason_name(code: u16) -> String {
    match code {
        0 => "quota".into(),
        1 => "capacity".into(),
        2 => "deadline".into(),
        3 => "retry-storm".into(),
        4 => "too-long".into(),
        own => own.to_string(),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
