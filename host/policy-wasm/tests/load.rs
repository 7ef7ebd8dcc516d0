//! What is refused at load, and in which words.

mod support;

use penstock_policy_api::{Decision, FaultKind};
use penstock_policy_wasm::{Component, GuestCall, LoadError, Origin, limits};
use support::{Guest, runtime};

fn refused(guest: &Guest) -> LoadError {
    Component::load(&runtime(), &guest.component()).expect_err("it is refused")
}

#[test]
fn a_policy_of_each_decision_loads_and_says_what_it_is() {
    let runtime = runtime();
    for decision in Decision::ALL {
        let guest = Guest::new(decision).name("plain").max_rows(5).schema(7).wants_fact("finished");
        let component = Component::load(&runtime, &guest.component()).expect("it loads");
        assert_eq!(component.decision(), decision);
        assert_eq!(component.contract(), "0.1.0");
        assert_eq!(component.origin(), Origin::Compiled);
        let terms = component.terms();
        assert_eq!((terms.name.as_str(), terms.max_rows, terms.state_schema), ("plain", 5, 7));
        assert!(!terms.facts.is_empty());
    }
    assert_eq!(runtime.instances_alive(), 0);
}

#[test]
fn an_import_beyond_the_host_interface_is_refused_by_name() {
    for (package, interface, full) in [
        ("wasi:clocks@0.2.0", "monotonic-clock", "wasi:clocks/monotonic-clock@0.2.0"),
        ("penstock:types@0.9.0", "escape", "penstock:types/escape@0.9.0"),
    ] {
        let component = Guest::new(Decision::Routing).imports_as(package, interface, full).component();
        match Component::load(&runtime(), &component).expect_err("it is refused") {
            LoadError::Import { names } => assert_eq!(names, [full]),
            other => panic!("refused otherwise: {other}"),
        }
    }
}

#[test]
fn what_is_no_policy_is_refused() {
    let runtime = runtime();
    let load = |bytes: &[u8]| Component::load(&runtime, bytes).expect_err("it is refused");
    assert!(matches!(load(b""), LoadError::Invalid(_)));
    assert!(matches!(load(b"\0asm\x01\0\0\0"), LoadError::Invalid(_)), "a core module is not a component");
    let empty = wat::parse_str("(component)").expect("well-formed");
    assert!(matches!(load(&empty), LoadError::Exports { found } if found == "nothing"));
    let whole = Guest::new(Decision::Eviction).component();
    assert!(matches!(load(&whole[..whole.len() / 2]), LoadError::Invalid(_)));
    let large = vec![0; limits::COMPONENT_BYTES_MAX + 1];
    assert!(matches!(load(&large), LoadError::TooLarge { .. }));
    assert_eq!(runtime.instances_alive(), 0);
}

#[test]
fn an_export_of_another_shape_or_version_is_refused() {
    let runtime = runtime();
    let with = |version: &str| {
        let text = format!(
            r#"(component
                (core module $m (func (export "f")))
                (core instance $i (instantiate $m))
                (func $f (canon lift (core func $i "f")))
                (instance $life (export "describe" (func $f)))
                (instance $own (export "decide" (func $f)))
                (export "penstock:types/policy@{version}" (instance $life))
                (export "penstock:routing/routing@{version}" (instance $own)))"#
        );
        Component::load(&runtime, &wat::parse_str(text).expect("well-formed")).expect_err("it is refused")
    };
    assert!(matches!(with("0.1.0"), LoadError::Shape(_)));
    assert!(matches!(with("0.2.0"), LoadError::Version { name } if name == "penstock:types/policy@0.2.0"));
    assert!(matches!(with("1.0.0"), LoadError::Version { .. }));
}

#[test]
fn an_unknown_required_name_is_refused_with_the_names_there_are() {
    let error = refused(&Guest::new(Decision::Routing).wants("replica", &["overlap-blocks", "gpu-mood"]));
    let said = error.to_string();
    assert!(said.contains("replica has no gpu-mood") && said.contains("overlap-blocks"), "{said}");
    let said = refused(&Guest::new(Decision::Overload).wants("replica", &["overlap-blocks"])).to_string();
    assert!(said.contains("replica has no overlap-blocks"), "only routing is offered it: {said}");
    let said = refused(&Guest::new(Decision::Eviction).wants_fact("served")).to_string();
    assert!(said.contains("facts has no served") && said.contains("stored"), "{said}");
    let optional = Guest::new(Decision::Routing).wants_optional("replica", "gpu-mood");
    assert!(Component::load(&runtime(), &optional.component()).is_ok());
}

#[test]
fn a_component_that_fails_to_describe_itself_is_refused() {
    for (body, kind) in [
        ("unreachable", FaultKind::Trap),
        ("(loop $on (br $on)) unreachable", FaultKind::Fuel),
        ("(loop $on (drop (memory.grow (i32.const 16))) (br $on)) unreachable", FaultKind::Memory),
        ("(i32.const -4)", FaultKind::Trap),
    ] {
        match refused(&Guest::new(Decision::Overload).body("describe", body)) {
            LoadError::Describe(failure) => assert_eq!((failure.during, failure.kind), (GuestCall::Describe, kind)),
            other => panic!("refused otherwise: {other}"),
        }
    }
}

#[test]
fn a_manifest_that_would_swamp_the_host_is_refused() {
    // A million names, each the same four megabytes: what the host would copy is bounded before it copies.
    let body = "(memory.fill (i32.const 4096) (i32.const 97) (i32.const 4096))
        (i32.store (i32.const 1024) (i32.const 4096)) (i32.store (i32.const 1028) (i32.const 100000))
        (i64.store (i32.const 1032) (i64.const 0)) (i64.store (i32.const 1040) (i64.const 0)) (i64.store (i32.const 1048) (i64.const 0))
        (i64.store (i32.const 1056) (i64.const 0))
        (i32.store (i32.const 1064) (i32.const 0)) (i32.store (i32.const 1068) (i32.const 16000))
        (i64.store (i32.const 1072) (i64.const 0))
        (i32.const 1024)";
    let error = refused(&Guest::new(Decision::Routing).body("describe", body));
    assert!(matches!(error, LoadError::Describe(_)), "{error}");
    let error = refused(&Guest::new(Decision::Routing).name(""));
    assert!(matches!(error, LoadError::Manifest(_)), "{error}");
    let error = refused(&Guest::new(Decision::Routing).name(&"n".repeat(limits::NAME_BYTES_MAX + 1)));
    assert!(matches!(error, LoadError::Manifest(_)), "{error}");
}

#[test]
fn memory_beyond_the_cap_is_refused_at_the_start() {
    let error = refused(&Guest::new(Decision::Routing).with("(table 100000 funcref)"));
    assert!(matches!(error, LoadError::Describe(_) | LoadError::Invalid(_)), "{error}");
}
