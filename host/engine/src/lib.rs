//! The live driver: threads, channels and the wall clock around the two machines.

mod request;

pub use request::{DeliveredToken, RequestEvent, Submission, Ticket};
