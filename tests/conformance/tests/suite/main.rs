//! Every shipped component, beside its native twin where it has one. Without components most of it is SKIPPED, aloud.

mod broken;
mod cases;
mod frozen;
mod fuel;
mod inputs;
mod next_host;
mod next_minor;
mod repeats;
mod shelf;
mod state;

#[path = "../../../../host/policy-wasm/tests/support/mod.rs"]
mod wat_guest;
