//! What can be asked, and of whom.

/// The five decisions: one policy component each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Decision {
    /// May this request enter the queue now?
    Admission,
    /// Which replica runs it?
    Routing,
    /// Whose request is placed next, and who gives KV back?
    Fairness,
    /// What is each cached run worth?
    Eviction,
    /// What gives way at this saturation?
    Overload,
}

/// The six questions: fairness is asked two, of separate instances.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Question {
    /// Of the admission policy, at the gateway.
    Admission,
    /// Of the routing policy, at the gateway.
    Routing,
    /// Of the fairness policy, at the gateway.
    Order,
    /// Of the fairness policy, at a replica.
    Victims,
    /// Of the eviction policy, at a replica.
    Eviction,
    /// Of the overload policy, at the gateway.
    Overload,
}

impl Decision {
    /// All five.
    pub const ALL: [Self; 5] = [Self::Admission, Self::Routing, Self::Fairness, Self::Eviction, Self::Overload];

    /// The name in manifests, metrics and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admission => "admission",
            Self::Routing => "routing",
            Self::Fairness => "fairness",
            Self::Eviction => "eviction",
            Self::Overload => "overload",
        }
    }
}

impl Question {
    /// All six.
    pub const ALL: [Self; 6] =
        [Self::Admission, Self::Routing, Self::Order, Self::Victims, Self::Eviction, Self::Overload];

    /// The name in metrics and journals.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admission => "admission",
            Self::Routing => "routing",
            Self::Order => "order",
            Self::Victims => "victims",
            Self::Eviction => "eviction",
            Self::Overload => "overload",
        }
    }

    /// Stable number, for journals and seeds.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The value of [`Self::code`].
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Whose question it is.
    pub const fn decision(self) -> Decision {
        match self {
            Self::Admission => Decision::Admission,
            Self::Routing => Decision::Routing,
            Self::Order | Self::Victims => Decision::Fairness,
            Self::Eviction => Decision::Eviction,
            Self::Overload => Decision::Overload,
        }
    }
}
