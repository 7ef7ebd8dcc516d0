//! The gateway machine. Questions answered: who enters, who is next, where does it run, what gives way?

mod io;

pub use io::{
    DeliveryEvent, GatewayConfig, GatewayEffect, GatewayEffects, GatewayEvent, GatewayInput, ReplicaFacts, Reserves,
};
