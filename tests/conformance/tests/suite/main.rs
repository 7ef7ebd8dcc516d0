//! Every shipped component, beside its native twin where it has one. Without components most of it is SKIPPED, aloud.

mod cases;
mod frozen;
mod fuel;
mod inputs;
mod next_host;
mod next_minor;
mod repeats;
mod shelf;
mod state;
