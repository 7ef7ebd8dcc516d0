//! The replica machine. Questions answered: what does the next step compute, who holds which blocks, who gives them back?

mod io;

pub use io::{
    FinishedTokens, ReplicaConfig, ReplicaEffect, ReplicaEffects, ReplicaEvent, ReplicaInput, StepCost, Watermarks,
};
