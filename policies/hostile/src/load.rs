//! Those that are never seated.

use anyhow::Result;

use crate::component::{Guest, Manifest, REFUSE, context_table};
use crate::{Caught, Hostile, harmless, shapes};

const LOOP: &str = "(loop $on (br $on)) (unreachable)";
const TRAP: &str = "(unreachable)";

/// All of them, for `decision`.
pub fn list(decision: &'static str) -> Result<Vec<Hostile>> {
    let mut all = broken(decision)?;
    all.extend(greedy(decision)?);
    for shape in shapes::list(decision) {
        all.push(load(shape.name, shape.says, shape.bytes()?));
    }
    Ok(all)
}

fn load(name: &'static str, says: &'static [&'static str], bytes: Vec<u8>) -> Hostile {
    Hostile { name, caught: Caught::Load, says, good_calls: 0, bytes }
}

/// Wrong bytes, wrong imports, failures on the way.
fn broken(decision: &'static str) -> Result<Vec<Hostile>> {
    let good = harmless(decision)?;
    let (other, decides): (_, &[&str]) =
        if decision == "eviction" { ("overload", &["decides overload"]) } else { ("eviction", &["decides eviction"]) };
    let fails = |function, body| Guest::new(decision).body(function, body).component();
    let starts = |body: &str| Guest::new(decision).also(&format!("(func $start {body}) (start $start)")).component();
    Ok(vec![
        load("is-no-wasm", &["not a component"], b"no wasm at all".to_vec()),
        load("is-empty", &["not a component"], Vec::new()),
        load("is-cut-short", &["not a component"], good[..good.len() - 3].to_vec()),
        load("is-a-core-module", &["not a component"], wat::parse_str("(module)")?),
        load(
            "imports-a-clock",
            &["imports what is not offered: wasi:clocks/monotonic-clock"],
            Guest::new(decision).importing("wasi:clocks", "monotonic-clock").component()?,
        ),
        load("answers-another-decision", decides, harmless(other)?),
        load("has-a-gibibyte", &["memory"], Guest::new(decision).pages(16_384).component()?),
        load("traps-at-start", &["trap in start", "unreachable"], starts("(unreachable)")?),
        load("loops-at-start", &["fuel in start"], starts("(loop $on (br $on))")?),
        load(
            "grows-at-start",
            &["memory in start", "bytes of memory"],
            starts("(loop $on (drop (memory.grow (i32.const 64))) (br $on))")?,
        ),
        load(
            "grows-a-table-at-start",
            &["memory in start", "elements of a table"],
            Guest::new(decision)
                .also("(table $wide 1 funcref)")
                .also("(func $start (loop $on (drop (table.grow $wide (ref.null func) (i32.const 4096))) (br $on)))")
                .also("(start $start)")
                .component()?,
        ),
        load("traps-in-describe", &["trap in describe", "unreachable"], fails("describe", TRAP)?),
        load("loops-in-describe", &["fuel in describe"], fails("describe", LOOP)?),
        load("traps-in-configure", &["trap in configure", "unreachable"], fails("configure", TRAP)?),
        load("loops-in-configure", &["fuel in configure"], fails("configure", LOOP)?),
        load("refuses-its-defaults", &["parameter ``"], fails("configure", REFUSE)?),
    ])
}

/// Manifests that ask for what there is not, or for too much.
fn greedy(decision: &'static str) -> Result<Vec<Hostile>> {
    let manifest = |change: &dyn Fn(&mut Manifest)| {
        let mut guest = Guest::new(decision).pages(64);
        change(&mut guest.manifest);
        guest.component()
    };
    let context = context_table(decision);
    let names = |count: usize, name: &str| vec![(name.to_owned(), true); count];
    Ok(vec![
        load(
            "wants-a-table-that-is-not",
            &["manifest", "weather"],
            manifest(&|m| m.tables.push(("weather".into(), names(1, "wind-us"))))?,
        ),
        load(
            "wants-a-signal-that-is-not",
            &["manifest", "wind-us"],
            manifest(&|m| m.tables.push((context.into(), names(1, "wind-us"))))?,
        ),
        load(
            "wants-a-signal-named-by-a-page",
            &["manifest", "name", "128"],
            manifest(&|m| m.tables.push((context.into(), names(1, &"wind-".repeat(1_000)))))?,
        ),
        load(
            "wants-too-many-signals",
            &["manifest", "48"],
            manifest(&|m| m.tables.push((context.into(), names(49, "stage-code"))))?,
        ),
        load(
            "wants-a-table-twice",
            &["manifest", "twice"],
            manifest(&|m| m.tables.extend(vec![(context.into(), names(1, "stage-code")); 2]))?,
        ),
        load(
            "wants-a-fact-that-is-not",
            &["manifest", "wind-turned"],
            manifest(&|m| m.facts.push("wind-turned".into()))?,
        ),
        load("wants-an-action-that-is-not", &["manifest", "reboot"], manifest(&|m| m.actions.push("reboot".into()))?),
        load("has-no-name", &["manifest", "name"], manifest(&|m| m.name.clear())?),
        load("has-a-name-of-a-page", &["manifest", "name", "128"], manifest(&|m| m.name = "n".repeat(4_096))?),
        load("has-a-name-that-clears-the-screen", &["manifest", "name"], manifest(&|m| m.name = "\u{1b}[2J".into())?),
        load("has-a-name-that-is-no-text", &["trap in describe", "utf-8"], manifest(&|m| m.is_garbled = true)?),
        load(
            "names-a-hundred-reasons",
            &["manifest", "100 reasons"],
            manifest(&|m| m.reasons = vec!["why".into(); 100])?,
        ),
        load(
            "names-a-hundred-thousand-reasons",
            &["trap in describe"],
            manifest(&|m| m.reasons = vec!["why".into(); 100_000])?,
        ),
        load("is-named-by-a-mebibyte", &["trap in describe"], manifest(&|m| m.version = "v".repeat(1 << 20))?),
    ])
}
