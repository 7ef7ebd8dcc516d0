//! How fast does an OpenAI-compatible server answer, as its clients see it?
//!
//! The generator knows nothing of the server but its API, so Penstock and any other server are measured by the same clocks. Closed loop
//! (so many streams at once) or open loop (Poisson arrivals at a rate, whatever the server does). Everything that is sent follows from the
//! plan and its seed. Definitions, keys and units are those of vLLM's serving benchmark.

mod arrivals;
mod client;
mod drive;
mod error;
mod limits;
mod plan;
mod prompts;
mod record;
mod save;
mod sse;
mod statistics;
mod summary;
mod table;
mod target;

pub use drive::{Progress, run};
pub use error::BenchError;
pub use plan::{Endpoint, Load, Objectives, Plan, Prompts, Synthetic};
pub use record::{Outcome, Record};
pub use save::save;
pub use summary::Summary;
pub use table::table;
