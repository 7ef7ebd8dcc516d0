//! The same inputs give the same bytes out: twice, in a fresh instance, in another engine, and natively.

use penstock_conformance::random::moments;
use penstock_conformance::{Bench, Seats, checks, run};

use crate::shelf::{bench, components, twin};

/// Random moments a component.
const MOMENTS: usize = 400;

#[test]
fn a_course_repeats() {
    let (bench, elsewhere) = (bench(), Bench::new().expect("a second engine starts"));
    for shipped in components(&bench) {
        let moments = moments(shipped.component.decision(), 30, MOMENTS);
        let course = checks::repeats(shipped.tested(&bench), &elsewhere, &shipped.bytes, &moments);
        let course = course.unwrap_or_else(|problem| panic!("{}: {problem}", shipped.name));
        let fuel: u64 = course.iter().map(|step| step.fuel.0 + step.fuel.1).sum();
        println!("figure: {} burns {fuel} over {MOMENTS} random calls, every time", shipped.name);
        assert!(course.iter().all(|step| step.fuel.1 > 0), "{}: every call is metered", shipped.name);
    }
}

#[test]
fn a_component_answers_as_its_native_twin() {
    let bench = bench();
    let mut alone = Vec::new();
    for shipped in components(&bench) {
        let Some(mut native) = twin(shipped.rule()) else {
            alone.push(shipped.name);
            continue;
        };
        let moments = moments(shipped.component.decision(), 40, MOMENTS);
        let mut policy = shipped.tested(&bench).seat().expect("it can be seated");
        let by_component = run(&mut policy, &mut Seats::new(6), &moments, 10).expect("it answers");
        let by_native = run(&mut native, &mut Seats::new(6), &moments, 10).expect("it answers");
        for (at, (component, native)) in by_component.iter().zip(&by_native).enumerate() {
            let name = &shipped.name;
            assert_eq!(component.proposal, native.proposal, "{name}, moment {at}: {:?}", moments[at]);
            assert_eq!(component.fallback, native.fallback, "{name}, moment {at}");
            assert_eq!(component.state, native.state, "{name}, moment {at}: saved state");
        }
    }
    assert_eq!(alone, Vec::<String>::new(), "every shipped policy has a native twin: enter it in the shelf");
}
