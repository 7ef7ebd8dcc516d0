//! How much does it burn where there is most to do?

use penstock_base::limits::FACTS_BATCH_MAX;
use penstock_policy_api::{FactKind, Question as Which};
use penstock_policy_wasm::limits::{FUEL_MAX, FUEL_PER_FACT, fuel_per_row};

use super::inputs::windows;
use super::{Tested, questions};
use crate::bench::Seating;
use crate::course::{Seats, run};
use crate::edges::{self, Values};

/// Flows, replicas and the like that a policy has been told of before it is measured: more than any keeps.
const TOLD_BEFORE: u64 = 8_192;

/// Fuel of one function at the most that it may have to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spent {
    /// A question's name, or `observe`, `save`, `restore`.
    pub call: &'static str,
    /// Candidates, facts, or bytes of state.
    pub size: usize,
    /// The most that any input of that size cost.
    pub fuel: u64,
    /// Which one that was.
    pub input: String,
    /// What it may burn: base and rows; the whole cap for the life cycle.
    pub budget: u64,
}

impl Spent {
    /// Fuel for each candidate or fact.
    pub fn each(&self) -> u64 {
        self.fuel / (self.size as u64).max(1)
    }
}

/// Measures with fuel to spare, so that what goes beyond the budget shows by how much.
pub fn measure(tested: Tested<'_>) -> Result<Vec<Spent>, String> {
    let base = tested.how.fuel_base;
    let tested = Tested { how: Seating { fuel_base: FUEL_MAX, ..tested.how }, ..tested };
    let mut all = vec![];
    for question in questions(tested.component.decision()) {
        let rows = windows(question, tested).pop().unwrap_or(0);
        all.push(asked(tested, question, rows, base)?);
    }
    if !tested.component.terms().facts.is_empty() {
        all.extend(told(tested, base)?);
    }
    Ok(all)
}

/// Is all of it within its budget?
pub fn spent_within(all: &[Spent]) -> Result<(), String> {
    match all.iter().find(|spent| spent.fuel > spent.budget) {
        None => Ok(()),
        Some(over) => {
            Err(format!("{} over {} burns {} of {} ({})", over.call, over.size, over.fuel, over.budget, over.input))
        }
    }
}

fn asked(tested: Tested<'_>, question: Which, rows: usize, base: u64) -> Result<Spent, String> {
    let mut most = (0, String::new());
    let mut candidates = rows;
    for values in Values::ALL {
        let moment = edges::moment(question, values, rows);
        candidates = moment.question.rows();
        let mut policy = tested.seat()?;
        let mut seats = Seats::new(1);
        // The second call has room from the first; neither may exceed.
        let course = run(&mut policy, &mut seats, &[moment.clone(), moment], usize::MAX)?;
        for step in course {
            most = most.max((step.fuel.1, format!("{values:?}")));
        }
    }
    let budget = base + fuel_per_row(question) * candidates as u64;
    Ok(Spent { call: question.name(), size: candidates, fuel: most.0, input: most.1, budget })
}

/// Facts in the largest batches, to an instance that has already been told of more things than it can keep.
fn told(tested: Tested<'_>, base: u64) -> Result<Vec<Spent>, String> {
    let wanted = tested.component.terms().facts;
    let kinds: Vec<FactKind> = FactKind::ALL.iter().copied().filter(|kind| wanted.has(*kind)).collect();
    let mut most = (0, String::new());
    let mut saved = (0, 0, 0);
    for filler in kinds.iter().copied() {
        let mut policy = tested.seat()?;
        let mut told = |policy: &mut crate::guest::Seated, kind: FactKind, values: Values, from: u64| {
            let taken = policy.policy().observe(&edges::facts(kind, values, from));
            let name = || format!("{} {values:?} after many of {}", kind.name(), filler.name());
            taken.map_err(|fault| format!("observe fails ({}): {}", fault.name(), name()))?;
            if policy.last_fuel() > most.0 {
                most = (policy.last_fuel(), name());
            }
            Ok::<(), String>(())
        };
        for from in (1..TOLD_BEFORE).step_by(FACTS_BATCH_MAX) {
            told(&mut policy, filler, Values::Unknown, from)?;
        }
        for kind in kinds.iter().copied() {
            for values in Values::ALL {
                // Of things it knows, and of things it does not.
                told(&mut policy, kind, values, 1)?;
                told(&mut policy, kind, values, 1 << 32)?;
            }
        }
        let state = policy.save()?;
        let save = policy.last_fuel();
        let schema = policy.policy().terms().state_schema;
        let info = penstock_policy_api::RestoreInfo {
            schema,
            cause: penstock_policy_api::RestoreCause::Swap,
            saved_now_us: 1 << 40,
            now_us: 1 << 40,
            elapsed_us: 0,
        };
        policy.policy().restore(&info, &state).map_err(|error| format!("its own state: {error}"))?;
        saved = saved.max((state.len(), save, policy.last_fuel()));
    }
    let (bytes, save, restore) = saved;
    let budget = base + FUEL_PER_FACT * FACTS_BATCH_MAX as u64;
    let life = |call, fuel| Spent { call, size: bytes, fuel, input: "many facts".to_owned(), budget: FUEL_MAX };
    Ok(vec![
        Spent { call: "observe", size: FACTS_BATCH_MAX, fuel: most.0, input: most.1, budget },
        life("save", save),
        life("restore", restore),
    ])
}
