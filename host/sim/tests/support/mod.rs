//! What the simulator's tests share: policies by name, natively and as components, and runs over many seeds.
#![allow(dead_code, reason = "each test file uses its part")]

pub mod compiled;
pub mod contest;
pub mod lineup;
pub mod many;
pub mod replay;
pub mod stingy;
pub mod wasm;
