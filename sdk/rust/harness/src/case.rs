//! What does a case file say?

use std::collections::BTreeMap;
use std::fmt;

use penstock_base::{ClassRank, Priority, RequestId, Traits};
use penstock_policy_api::{Decision, FactKind, RequestRecord, RoutingPhase};

/// Values by name; none is an unknown one.
pub(crate) type Values = BTreeMap<String, Option<u64>>;

/// A file of cases for one decision.
#[derive(Clone, Debug)]
pub struct CaseFile {
    /// Whose question it asks.
    pub decision: Decision,
    /// In the order of the file.
    pub cases: Vec<Case>,
}

/// One story: a fresh policy, then steps.
#[derive(Clone, Debug)]
pub struct Case {
    /// What it shows.
    pub name: String,
    /// Parameters, a JSON document or nothing.
    pub parameters: String,
    pub(crate) steps: Vec<(usize, Step)>,
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Call(Values),
    Request(Vec<(String, String)>),
    Phase(RoutingPhase),
    Context(Values),
    Rows { table: String, rows: Vec<Values> },
    Fact { kind: FactKind, at_us: Option<u64>, slots: [u64; 6] },
    Restart(Values),
    Expect(String),
}

/// Where a file makes no sense, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaseError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong.
    pub problem: String,
}

impl fmt::Display for CaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.problem)
    }
}

impl std::error::Error for CaseError {}

type Parsed<T> = Result<T, String>;

impl CaseFile {
    /// Reads a file's text.
    pub fn parse(text: &str) -> Result<Self, CaseError> {
        let mut reader = Reader { decision: None, cases: Vec::new(), columns: None };
        for (at, line) in text.lines().enumerate() {
            let said = line.split('#').next().unwrap_or_default().trim();
            if !said.is_empty() {
                reader.line(at + 1, said).map_err(|problem| CaseError { line: at + 1, problem })?;
            }
        }
        let decision =
            reader.decision.ok_or_else(|| CaseError { line: 1, problem: "no line says `decision NAME`".into() })?;
        Ok(Self { decision, cases: reader.cases })
    }
}

struct Reader {
    decision: Option<Decision>,
    cases: Vec<Case>,
    /// Names of the columns while rows are read.
    columns: Option<Vec<String>>,
}

impl Reader {
    fn line(&mut self, at: usize, said: &str) -> Parsed<()> {
        if said.starts_with(|first: char| first.is_ascii_digit() || first == '?') || said.starts_with("max ") {
            return self.row(said);
        }
        self.columns = None;
        let (word, rest) = said.split_once(char::is_whitespace).map_or((said, ""), |(word, rest)| (word, rest.trim()));
        match word {
            "decision" => {
                let known = Decision::ALL.into_iter().find(|decision| decision.name() == rest);
                self.decision = Some(known.ok_or_else(|| format!("there is no decision {rest}"))?);
                return Ok(());
            }
            "case" => {
                self.cases.push(Case { name: rest.into(), parameters: String::new(), steps: Vec::new() });
                return Ok(());
            }
            _ => {}
        }
        let case = self.cases.last_mut().ok_or("a line `case NAME` comes first")?;
        let step = match word {
            "parameters" => {
                case.parameters = rest.into();
                return Ok(());
            }
            "call" => Step::Call(values(rest)?),
            "request" => Step::Request(pairs(rest)?),
            "phase" => Step::Phase(phase(rest)?),
            "context" => Step::Context(values(rest)?),
            "rows" => {
                let (table, names) = rest.split_once(':').unwrap_or((rest, ""));
                self.columns = Some(names.split_whitespace().map(Into::into).collect());
                Step::Rows { table: table.trim().into(), rows: Vec::new() }
            }
            "fact" => fact(rest)?,
            "restart" => Step::Restart(values(rest)?),
            "expect" => Step::Expect(rest.split_whitespace().collect::<Vec<_>>().join(" ")),
            other => return Err(format!("no line begins with {other}")),
        };
        case.steps.push((at, step));
        Ok(())
    }

    fn row(&mut self, said: &str) -> Parsed<()> {
        let columns = self.columns.as_ref().ok_or("a row needs a line `rows TABLE: NAMES` above it")?;
        let cells = said.split_whitespace().map(number).collect::<Parsed<Vec<_>>>()?;
        if cells.len() != columns.len() {
            return Err(format!("{} values under {} names", cells.len(), columns.len()));
        }
        let row = columns.iter().cloned().zip(cells).collect();
        let steps = self.cases.last_mut().map(|case| &mut case.steps);
        match steps.and_then(|steps| steps.last_mut()) {
            Some((_, Step::Rows { rows, .. })) => rows.push(row),
            _ => return Err("a row needs a line `rows TABLE: NAMES` above it".into()),
        }
        Ok(())
    }
}

fn pairs(text: &str) -> Parsed<Vec<(String, String)>> {
    let pair = |word: &str| {
        let (name, value) = word.split_once('=').ok_or_else(|| format!("{word} is not NAME=VALUE"))?;
        Ok((name.to_owned(), value.to_owned()))
    };
    text.split_whitespace().map(pair).collect()
}

fn values(text: &str) -> Parsed<Values> {
    pairs(text)?.into_iter().map(|(name, value)| Ok((name, number(&value)?))).collect()
}

/// `?` is unknown, `max` is 2^64 - 1; underscores part digits.
fn number(text: &str) -> Parsed<Option<u64>> {
    match text {
        "?" => Ok(None),
        "max" => Ok(Some(u64::MAX)),
        _ => text.replace('_', "").parse().map(Some).map_err(|_| format!("{text} is no number")),
    }
}

fn phase(text: &str) -> Parsed<RoutingPhase> {
    match text {
        "whole" => Ok(RoutingPhase::Whole),
        "decode" => Ok(RoutingPhase::Decode),
        "prefill" => Ok(RoutingPhase::Prefill),
        _ => Err(format!("there is no phase {text}")),
    }
}

fn fact(text: &str) -> Parsed<Step> {
    let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let kind = FactKind::from_name(name).ok_or_else(|| format!("there is no fact {name}"))?;
    let (mut at_us, mut slots) = (None, [0; 6]);
    for (name, value) in values(rest)? {
        if name == "at-us" {
            at_us = value;
            continue;
        }
        let slot = kind.slots().iter().position(|slot| *slot == name);
        let slot = slot.ok_or_else(|| format!("{} has no slot {name}", kind.name()))?;
        slots[slot] = value.ok_or_else(|| format!("a slot is never unknown: {name}"))?;
    }
    Ok(Step::Fact { kind, at_us, slots })
}

/// The request of a case before it says anything: one answer of 64 tokens to a prompt of 64, class 3.
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

/// Changes fields by name.
pub(crate) fn change_request(request: &mut RequestRecord, pairs: &[(String, String)]) -> Parsed<()> {
    for (name, value) in pairs {
        let whole = || number(value)?.ok_or_else(|| format!("a request's {name} is never unknown"));
        let small = || u32::try_from(whole()?).map_err(|_| format!("{value} does not fit {name}"));
        match name.as_str() {
            "request-id" => request.request_id = RequestId(whole()?),
            "tenant-id" => request.tenant_id = whole()?,
            "flow-id" => request.flow_id = whole()?,
            "session-id" => request.session_id = whole()?,
            "class-rank" => request.class_rank = ClassRank::clamped(small()? as u8),
            "attempt" => request.attempt = small()? as u8,
            "sequences" => request.sequences = small()? as u16,
            "priority" => request.priority = Priority(value.parse().map_err(|_| format!("{value} is no priority"))?),
            "input-tokens" => request.input_tokens = small()?,
            "max-output-tokens" => request.max_output_tokens = small()?,
            "deadline-us" => request.deadline_us = whole()?,
            "traits" => request.traits = traits(value)?,
            other => return Err(format!("a request has no {other}")),
        }
    }
    Ok(())
}

fn traits(text: &str) -> Parsed<Traits> {
    text.split(',').try_fold(Traits::default(), |all, name| {
        let one = match name {
            "none" => Traits::default(),
            "streaming" => Traits::STREAMING,
            "may-degrade" => Traits::MAY_DEGRADE,
            "may-defer" => Traits::MAY_DEFER,
            "sheddable" => Traits::SHEDDABLE,
            "no-store" => Traits::NO_STORE,
            "migratable" => Traits::MIGRATABLE,
            "batch" => Traits::BATCH,
            other => return Err(format!("there is no trait {other}")),
        };
        Ok(all.with(one))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        CaseFile::parse(text).map_or_else(|error| error.to_string(), |_| "none".into())
    }

    #[test]
    fn a_file_is_a_list_of_stories() {
        let text = "decision routing\n\ncase one  # why\n  context need-blocks=1_000 cache-age-us=?\n  rows replica: replica-id overlap-blocks\n    1 max\n    2 ?\n  expect  place 1   0\n";
        let file = CaseFile::parse(text).unwrap();
        assert_eq!((file.decision, file.cases.len(), file.cases[0].name.as_str()), (Decision::Routing, 1, "one"));
        let [(4, Step::Context(context)), (5, Step::Rows { table, rows }), (8, Step::Expect(answer))] =
            file.cases[0].steps.as_slice()
        else {
            panic!("{:?}", file.cases[0].steps)
        };
        assert_eq!((context["need-blocks"], context["cache-age-us"]), (Some(1_000), None));
        assert_eq!((table.as_str(), rows.len(), rows[0]["overlap-blocks"]), ("replica", 2, Some(u64::MAX)));
        assert_eq!(answer, "place 1 0");
    }

    #[test]
    fn a_fault_is_named_with_its_line() {
        assert_eq!(problem("case a"), "line 1: no line says `decision NAME`");
        assert_eq!(problem("decision x"), "line 1: there is no decision x");
        assert_eq!(problem("decision routing\nexpect"), "line 2: a line `case NAME` comes first");
        assert_eq!(problem("decision routing\ncase a\nguess"), "line 3: no line begins with guess");
        assert_eq!(problem("decision routing\ncase a\n1 2"), "line 3: a row needs a line `rows TABLE: NAMES` above it");
        assert_eq!(problem("decision routing\ncase a\nrows replica: a b\n1"), "line 4: 1 values under 2 names");
        assert_eq!(problem("decision fairness\ncase a\nfact taken x=1"), "line 3: taken has no slot x");
    }
}
