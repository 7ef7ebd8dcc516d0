//! Does it answer whatever a machine may ask, legally and within its fuel?

use penstock_policy_api::{FactKind, Question as Which};

use super::{Tested, is_legal, questions};
use crate::course::{Seats, run};
use crate::edges::{self, Values};
use crate::moment::Moment;

/// Nobody, one, two and the most candidates; nothing known, all zero, all of the largest number, rising, falling and drawn; and the
/// largest batch of each kind of fact before them. To a fresh instance each, and all of them to one.
pub fn answers_at_the_edges(tested: Tested<'_>) -> Result<usize, String> {
    let mut all = Vec::new();
    for question in questions(tested.component.decision()) {
        for values in Values::ALL {
            for rows in windows(question, tested) {
                all.push((
                    format!("{} with {rows} rows, {values:?}", question.name()),
                    edges::moment(question, values, rows),
                ));
            }
        }
    }
    let wanted = tested.component.terms().facts;
    for kind in FactKind::ALL.iter().copied().filter(|kind| wanted.has(*kind)) {
        for values in [Values::Unknown, Values::Zero, Values::Most, Values::Drawn] {
            let (name, mut moment) = all[0].clone();
            moment.facts = edges::facts(kind, values, 1);
            all.push((format!("{name}, after a batch of {}, {values:?}", kind.name()), moment));
        }
    }
    for (name, moment) in &all {
        alone(tested, moment).map_err(|problem| format!("{name}: {problem}"))?;
    }
    let mut policy = tested.seat()?;
    let mut seats = Seats::new(1);
    for (name, moment) in &all {
        one(&mut policy, &mut seats, moment).map_err(|problem| format!("{name}, after others: {problem}"))?;
    }
    Ok(2 * all.len())
}

/// Random moments, all to one instance.
pub fn answers_legally(tested: Tested<'_>, moments: &[Moment]) -> Result<usize, String> {
    let mut policy = tested.seat()?;
    let course = run(&mut policy, &mut Seats::new(2), moments, usize::MAX)?;
    for (at, step) in course.iter().enumerate() {
        is_legal(step).map_err(|problem| format!("moment {at}: {problem}"))?;
    }
    Ok(course.len())
}

fn alone(tested: Tested<'_>, moment: &Moment) -> Result<(), String> {
    one(&mut tested.seat()?, &mut Seats::new(1), moment)
}

fn one(policy: &mut crate::guest::Seated, seats: &mut Seats, moment: &Moment) -> Result<(), String> {
    let course = run(policy, seats, std::slice::from_ref(moment), 1)?;
    course.iter().try_for_each(is_legal)
}

/// Candidates to try: a policy may ask for fewer than the host has.
pub(super) fn windows(question: Which, tested: Tested<'_>) -> Vec<usize> {
    let most = tested.component.terms().window(edges::rows_max(question));
    let mut windows: Vec<usize> = [0, 1, 2, most].into_iter().filter(|rows| *rows <= most).collect();
    windows.dedup();
    windows
}
