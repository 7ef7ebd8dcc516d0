//! How do the host's native defaults become components? Their own code behind the export macros: nothing is written twice, so that a
//! component and its native twin differ by the wall alone.

pub use penstock_policy_api::native::{BestCredit, Bounded, ClassFirst, Ladder, Lru, OverlapLoad};

use penstock_policy_api::{AdmissionPolicy, EvictionPolicy, FairnessPolicy, Manifest, OverloadPolicy, RoutingPolicy};

use crate::document::{Document, ParameterError};
use crate::life::Parameters;
use crate::load::{Load, manifest};

impl Load for Bounded {
    fn manifest() -> Manifest {
        manifest::of_admission(Self::new().describe())
    }
    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        <()>::parse(parameters).map(|()| Self::new())
    }
}

impl Load for OverlapLoad {
    fn manifest() -> Manifest {
        manifest::of_routing(Self::new().describe())
    }
    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        <()>::parse(parameters).map(|()| Self::new())
    }
}

impl Load for BestCredit {
    fn manifest() -> Manifest {
        manifest::of_routing(Self::new().describe())
    }
    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        <()>::parse(parameters).map(|()| Self::new())
    }
}

impl Load for ClassFirst {
    fn manifest() -> Manifest {
        manifest::of_fairness(Self::new().describe())
    }
    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        <()>::parse(parameters).map(|()| Self::new())
    }
}

impl Load for Lru {
    fn manifest() -> Manifest {
        manifest::of_eviction(Self::new().describe())
    }
    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        <()>::parse(parameters).map(|()| Self::new())
    }
}

/// Parameters of [`Ladder`].
#[derive(Clone, Copy, Debug)]
struct LadderParameters {
    /// A long input is a part of it.
    context_window_tokens: u32,
}

impl Parameters for LadderParameters {
    fn read(document: &mut Document) -> Result<Self, ParameterError> {
        Ok(Self { context_window_tokens: document.u32("context-window-tokens", 8_192, 1..=u32::MAX)? })
    }
}

impl Load for Ladder {
    fn manifest() -> Manifest {
        manifest::of_overload(Self::new(0).describe())
    }
    fn configure(parameters: &str) -> Result<Self, ParameterError> {
        LadderParameters::parse(parameters).map(|parameters| Self::new(parameters.context_window_tokens))
    }
}
