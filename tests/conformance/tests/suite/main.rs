//! Every shipped component, beside its native twin where it has one. Without components most of it is SKIPPED, aloud.

mod cases;
mod fuel;
mod inputs;
mod repeats;
mod shelf;
mod state;
