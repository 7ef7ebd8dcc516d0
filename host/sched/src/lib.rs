//! The pure core: two machines, joined by messages, that advance by `(now, input)` and answer with effects.
//!
//! - [`gateway`]: admission, flow queues, order, routing, ledger, overload stance. It sees replicas through age-stamped reports.
//! - [`handoff`]: three machines that move a prompt's KV from one replica to another. The coordinator sits in the gateway machine, sender and
//!   receiver in the replica machine; where their configurations say nothing of it, nothing is handed off.
//! - [`quota`]: which part of the tenants' quotas one of several gateways may give out. The gateway machine is told of it as an input.
//! - [`replica`]: the token plan of each step, block tables, prefix cache, preemption, eviction. It sees exact state.
//!
//! `step` is total and deterministic: equal state, `now` and input give equal effects everywhere. It never blocks and never fails: a bad
//! input is an effect. Layer 2: no clock, thread, file, socket, token or text.
#![no_std]
extern crate alloc;

pub mod gateway;
pub mod handoff;
pub mod message;
pub mod quota;
pub mod replica;
