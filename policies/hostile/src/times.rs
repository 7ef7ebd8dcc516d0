//! Those that are seated, or would be: what they do when they are asked, told, saved and restored.

use anyhow::Result;

use crate::component::{self, Guest};
use crate::{Caught, Hostile, answers};

const LOOP: &str = "(loop $on (br $on)) (unreachable)";
const TRAP: &str = "(unreachable)";
/// Well-behaved decisions of a late one. More than a trial asks, fewer than a quarantine takes.
pub const GOOD_CALLS: u64 = 7;

/// Makes guests of one decision that misbehave from one call on.
struct Maker {
    decision: &'static str,
    good_calls: u64,
    quiet: String,
}

impl Maker {
    fn guest(&self) -> Guest {
        Guest::new(self.decision)
    }

    /// `body`, after so many calls that are answered well and counted.
    fn once_due(&self, body: &str) -> String {
        if self.good_calls == 0 {
            return body.to_owned();
        }
        format!(
            "(if (i64.lt_u (i64.load (i32.const 64)) (i64.const {}))
               (then (i64.store (i32.const 64) (i64.add (i64.load (i32.const 64)) (i64.const 1))) {} (return)))
             {body}",
            self.good_calls, self.quiet
        )
    }

    fn of(&self, name: &'static str, caught: Caught, says: &'static [&'static str], guest: &Guest) -> Result<Hostile> {
        Ok(Hostile { name, caught, says, good_calls: self.good_calls, bytes: guest.component()? })
    }

    fn decides(&self, name: &'static str, says: &'static [&'static str], body: &str) -> Result<Hostile> {
        self.of(name, Caught::Decide, says, &self.guest().deciding(&self.once_due(body)))
    }

    /// Fails when room is asked for, once the calls that are counted are over.
    fn gives_room(&self, name: &'static str, says: &'static [&'static str], body: &str) -> Result<Hostile> {
        // Only once it has been configured: loading asks for room as well.
        let due = format!(
            "(i32.and (i32.load (i32.const 80)) (i64.ge_u (i64.load (i32.const 64)) (i64.const {})))",
            self.good_calls
        );
        let counted = self.once_due(&format!("{} {TRAP}", self.quiet));
        let body = format!("(if {due} (then {body}))");
        self.of(name, Caught::Decide, says, &self.guest().deciding(&counted).body("realloc", &body))
    }

    fn bounded(&self, name: &'static str, body: &str) -> Result<Hostile> {
        let guest = self.guest().deciding(&format!("{body} {}", self.quiet));
        self.of(name, Caught::Nowhere, &[], &guest)
    }
}

/// What they do when they are asked, after so many good calls.
pub fn when_asked(decision: &'static str, good_calls: u64) -> Result<Vec<Hostile>> {
    let make = Maker { decision, good_calls, quiet: answers::no_opinion(decision) };
    let mut all = failing(&make)?;
    all.extend(talking(&make)?);
    for (name, says, body) in answers::malformed(decision) {
        all.push(Hostile { caught: Caught::Malformed, ..make.decides(name, says, &body)? });
    }
    if let Some(body) = answers::unknown_case(decision) {
        all.push(make.decides("answers-a-case-that-is-not", &["trap in"], &body)?);
    }
    Ok(all)
}

fn failing(make: &Maker) -> Result<Vec<Hostile>> {
    let decision = make.decision;
    let deep =
        "(func $down (param i64) (call $down (i64.add (local.get 0) (i64.const 1))) (drop (i64.load (i32.const 0))))";
    let table = "(table $wide 1 funcref)";
    let cleanup = format!("(if (i64.gt_u (i64.load (i32.const 64)) (i64.const {})) (then {TRAP}))", make.good_calls);
    Ok(vec![
        make.decides("traps", &["trap in", "unreachable"], TRAP)?,
        make.decides("loops", &["fuel in"], LOOP)?,
        make.decides(
            "divides-by-nothing",
            &["trap in", "divide by zero"],
            "(i64.div_u (i64.const 1) (i64.load (i32.const 72))) (unreachable)",
        )?,
        make.decides("reads-outside", &["trap in", "out of bounds"], "(i32.load (i32.const -8))")?,
        make.decides("answers-from-outside", &["trap in"], "(i32.const -8)")?,
        make.decides("answers-misaligned", &["trap in"], "(i32.const 1025)")?,
        make.decides(
            "grows-for-ever",
            &["memory in", "bytes of memory"],
            "(loop $on (drop (memory.grow (i32.const 16))) (br $on)) (unreachable)",
        )?,
        make.decides(
            "asks-for-all-memory-there-is",
            &["memory in", "bytes of memory"],
            "(drop (memory.grow (i32.const 65000))) (unreachable)",
        )?,
        make.decides(
            "fills-its-memory-for-ever",
            &["fuel in"],
            "(loop $on (memory.fill (i32.const 65536) (i32.const 7) (i32.const 131072)) (br $on)) (unreachable)",
        )?,
        make.of(
            "grows-a-table-beyond-all-need",
            Caught::Decide,
            // Each element costs fuel, and a decision has less of it than a table may have elements.
            &["fuel in"],
            &make
                .guest()
                .also(table)
                .deciding(&make.once_due("(drop (table.grow $wide (ref.null func) (i32.const 100000))) (unreachable)")),
        )?,
        make.decides("lists-from-outside", &["trap in"], &answers::list_at(decision, 0x7fff_fff0, 4))?,
        make.decides("lists-a-billion", &["trap in"], &answers::list_at(decision, 4_096, 0x3fff_ffff))?,
        make.of(
            "recurses-for-ever",
            Caught::Decide,
            // Whichever comes first: the stack or the fuel.
            &[" in "],
            &make.guest().also(deep).deciding(&make.once_due("(call $down (i64.const 0)) (unreachable)")),
        )?,
        make.of(
            "traps-after-answering",
            Caught::Decide,
            &["trap in", "unreachable"],
            &make.guest().body("cleanup", &cleanup),
        )?,
        make.gives_room("traps-when-given-room", &["trap in", "unreachable"], TRAP)?,
        make.gives_room("gives-room-outside", &["trap in"], "(return (i32.const -16))")?,
        make.gives_room("gives-room-misaligned", &["trap in"], "(return (i32.const 65537))")?,
        make.gives_room(
            "calls-out-when-given-room",
            &["trap in", "leave"],
            "(call $count (i32.const 0) (i32.const 0) (i64.const 1))",
        )?,
    ])
}

/// What they do with the host's two functions.
fn talking(make: &Maker) -> Result<Vec<Hostile>> {
    let log = |at: u32, bytes: u32| format!("(call $log (i32.const 0) (i32.const {at}) (i32.const {bytes}))");
    Ok(vec![
        make.decides(
            "logs-what-is-no-text",
            &["trap in", "utf-8"],
            &format!("(i32.store (i32.const 4096) (i32.const -1)) {} (unreachable)", log(4_096, 4)),
        )?,
        make.decides("logs-from-outside", &["trap in"], &format!("{} (unreachable)", log(0x7fff_0000, 64)))?,
        make.decides(
            "logs-a-hundred-and-thirty-kilobytes",
            &["trap in"],
            &format!("{} (unreachable)", log(65_536, 131_072)),
        )?,
        make.decides(
            "calls-the-host-a-thousand-times",
            &["trap in", "host calls"],
            &format!("{} (unreachable)", repeat(&log(4_096, 1), 1_000)),
        )?,
        make.bounded("floods-the-log", &repeat(&log(4_096, 4_000), 100))?,
        make.bounded(
            "counts-a-thousand-names",
            &repeat("(call $count (local.get $i) (i32.const 4) (i64.const -1))", 100),
        )?,
    ])
}

/// What they do with facts and state, from the first time on.
pub fn with_state(decision: &'static str) -> Result<Vec<Hostile>> {
    let one = |name, caught, says, function: &'static str, body: &str| -> Result<Hostile> {
        let mut guest = Guest::new(decision).body(function, body);
        if caught == Caught::Observe {
            guest.manifest.facts.push("finished".into());
        }
        Ok(Hostile { name, caught, says, good_calls: 0, bytes: guest.component()? })
    };
    let saves = |at: &str, length: &str| component::state_of(at, length);
    let large = format!("(drop (memory.grow (i32.const 256))) {}", saves("(i32.const 0)", "(i32.const 16777216)"));
    Ok(vec![
        one("traps-in-observe", Caught::Observe, &["trap in observe", "unreachable"], "observe", TRAP)?,
        one("loops-in-observe", Caught::Observe, &["fuel in observe"], "observe", "(loop $on (br $on))")?,
        one("traps-in-save", Caught::Save, &["trap in save", "unreachable"], "save", TRAP)?,
        one("loops-in-save", Caught::Save, &["fuel in save"], "save", LOOP)?,
        one(
            "saves-from-outside",
            Caught::Save,
            &["trap in save"],
            "save",
            &saves("(i32.const -64)", "(i32.const 32)"),
        )?,
        one("saves-sixteen-mebibytes", Caught::Save, &["in save"], "save", &large)?,
        one("traps-in-restore", Caught::Restore, &["trap in restore", "unreachable"], "restore", TRAP)?,
        one("loops-in-restore", Caught::Restore, &["fuel in restore"], "restore", LOOP)?,
        one("finds-its-state-damaged", Caught::Restore, &["damaged"], "restore", &component::restored(1, 1))?,
        one(
            "restores-to-a-case-that-is-not",
            Caught::Restore,
            &["trap in restore"],
            "restore",
            &component::restored(0, 9),
        )?,
    ])
}

/// Good until there is state: `save` fails once a decision has been counted, `restore` when it is given one.
pub fn late_state(decision: &'static str) -> Result<Vec<Hostile>> {
    let one = |name, caught, says, function: &'static str, body: &str| -> Result<Hostile> {
        let guest = Guest::new(decision).body(function, body);
        Ok(Hostile { name, caught, says, good_calls: 1, bytes: guest.component()? })
    };
    let saves = component::state_of("(i32.const 64)", "(i32.const 8)");
    // The trial asks once, so that what it saves is at least one.
    let when = |body: &str| format!("(if (i64.gt_u (i64.load (i32.const 64)) (i64.const 1)) (then {body})) {saves}");
    let given = |body: &str| {
        format!("(if (i64.gt_u (i64.load (local.get 5)) (i64.const 1)) (then {body})) {}", component::restored(0, 0))
    };
    let too_much = format!(
        "(drop (memory.grow (i32.const 8))) {} (return)",
        component::state_of("(i32.const 0)", "(i32.const 300000)")
    );
    Ok(vec![
        one("traps-in-save", Caught::Save, &["trap in save", "unreachable"], "save", &when(TRAP))?,
        one("loops-in-save", Caught::Save, &["fuel in save"], "save", &when("(loop $on (br $on))"))?,
        one("saves-too-much", Caught::Save, &["memory in save", "saved 300000 bytes"], "save", &when(&too_much))?,
        one("traps-in-restore", Caught::Restore, &["trap in restore", "unreachable"], "restore", &given(TRAP))?,
        one("loops-in-restore", Caught::Restore, &["fuel in restore"], "restore", &given("(loop $on (br $on))"))?,
    ])
}

/// `body` so many times, with `$i` counting down.
fn repeat(body: &str, times: u32) -> String {
    format!(
        "(local.set $i (i32.const {times})) (loop $on {body} (local.set $i (i32.sub (local.get $i) (i32.const 1))) (br_if $on (local.get $i)))"
    )
}
