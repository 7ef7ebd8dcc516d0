//! One document, one digest; everything that is wrong with it at once.

use penstock_policy_api::Decision;
use penstock_policy_wasm::{Digest, PolicyRef, PolicySet, limits, native_names};

fn digest_of(bytes: &[u8]) -> Digest {
    Digest::of(bytes)
}

#[test]
fn an_empty_document_is_the_native_defaults() {
    let set = PolicySet::parse("{}").expect("well-formed");
    assert_eq!(set, PolicySet::native());
    for decision in Decision::ALL {
        let seat = set.seat(decision);
        assert_eq!(seat.policy, PolicyRef::Native(native_names(decision)[0]));
        assert_eq!((seat.fuel_base, seat.max_rows, &*seat.parameters), (limits::FUEL_BASE_DEFAULT, 0, ""));
    }
    assert!(set.components().is_empty());
}

#[test]
fn the_digest_is_of_the_meaning_and_not_of_the_spelling() {
    let component = digest_of(b"a component");
    let one = format!(
        r#"{{"routing":{{"policy":"sha256:{component}","parameters":{{"b":[1,{{"y":1,"x":"ä\n"}}],"a":true}},"max-rows":64}}}}"#
    );
    let other = format!(
        r#" {{ "eviction": {{ "policy": "native:lru", "parameters": {{}} }},
               "routing": {{ "max-rows": 64, "fuel-base": 20000,
                 "parameters": {{ "a": true, "b": [ 1, {{ "x": "ä\n", "y": 1 }} ] }},
                 "policy": "sha256:{component}" }} }} "#
    );
    let (one, other) = (PolicySet::parse(&one).expect("well-formed"), PolicySet::parse(&other).expect("well-formed"));
    assert_eq!(one.canonical(), other.canonical());
    assert_eq!(one.digest(), other.digest());
    assert_eq!(&*one.seat(Decision::Routing).parameters, r#"{"a":true,"b":[1,{"x":"ä\n","y":1}]}"#);
    assert_eq!(one.components(), [component]);
    // The canonical form, spelt out once by hand.
    let native =
        |name: &str| format!(r#"{{"fuel-base":20000,"max-rows":0,"parameters":{{}},"policy":"native:{name}"}}"#);
    let expected = format!(
        r#"{{"admission":{},"eviction":{},"fairness":{},"overload":{},"routing":{{"fuel-base":20000,"max-rows":64,"parameters":{{"a":true,"b":[1,{{"x":"ä\n","y":1}}]}},"policy":"sha256:{component}"}}}}"#,
        native("bounded"),
        native("lru"),
        native("class-first"),
        native("ladder"),
    );
    assert_eq!(one.canonical(), expected);
    assert_eq!(PolicySet::parse(one.canonical()).expect("well-formed"), one);
    assert_eq!(one.digest(), Digest::of_pieces(&[b"penstock policy set 1", expected.as_bytes()]));
}

#[test]
fn whatever_differs_in_meaning_differs_in_digest() {
    let component = digest_of(b"a component");
    let seat = |more: &str| format!(r#"{{"routing":{{"policy":"sha256:{component}"{more}}}}}"#);
    let documents = [
        "{}".to_owned(),
        r#"{"routing":{"policy":"native:best-credit"}}"#.to_owned(),
        seat(""),
        seat(r#","fuel-base":20001"#),
        seat(r#","max-rows":8"#),
        seat(r#","parameters":{"a":1}"#),
        seat(r#","parameters":{"a":"1"}"#),
        format!(r#"{{"eviction":{{"policy":"sha256:{component}"}}}}"#),
    ];
    let mut digests: Vec<_> =
        documents.iter().map(|text| PolicySet::parse(text).expect("well-formed").digest()).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), documents.len());
}

#[test]
fn everything_that_is_wrong_is_said_at_once() {
    let text = r#"{
        "admission": { "policy": "native:open-door" },
        "routing": { "policy": "sha256:12", "fuel-base": 0, "max-rows": 2000, "colour": "red" },
        "fairness": { "policy": "vtc.wasm", "parameters": 3 },
        "eviction": { "policy": "native:lru", "parameters": { "a": 1 } },
        "overload": "ladder",
        "billing": {}
    }"#;
    let faults = PolicySet::parse(text).expect_err("it is full of faults").0;
    let mut paths: Vec<_> = faults.iter().map(|fault| fault.path.as_str()).collect();
    paths.sort_unstable();
    let expected = [
        "admission.policy",
        "billing",
        "eviction.parameters",
        "fairness.parameters",
        "fairness.policy",
        "overload",
        "routing.colour",
        "routing.fuel-base",
        "routing.max-rows",
        "routing.policy",
    ];
    assert_eq!(paths, expected);
    let said = faults.iter().find(|fault| fault.path == "admission.policy").expect("it is there");
    assert!(said.problem.contains("bounded"), "it lists what there is: {}", said.problem);
}

#[test]
fn documents_and_parameters_are_bounded() {
    let long = format!(r#"{{"a":"{}"}}"#, "x".repeat(limits::SET_BYTES_MAX));
    assert!(PolicySet::parse(&long).expect_err("too long").to_string().contains("at most"));
    let component = digest_of(b"a component");
    let text = format!(
        r#"{{"routing":{{"policy":"sha256:{component}","parameters":{{"a":"{}"}}}}}}"#,
        "x".repeat(limits::PARAMETERS_BYTES_MAX)
    );
    assert!(PolicySet::parse(&text).expect_err("too long").to_string().starts_with("routing.parameters"));
    for bad in ["", "[]", "3", "{", "nul", r#"{"routing":{}}"#] {
        assert!(PolicySet::parse(bad).is_err(), "{bad}");
    }
    let deep = format!(
        r#"{{"routing":{{"policy":"sha256:{component}","parameters":{{"a":{}{}}}}}}}"#,
        "[".repeat(10_000),
        "]".repeat(10_000)
    );
    assert!(PolicySet::parse(&deep).is_err(), "nesting is bounded by the parser");
}
