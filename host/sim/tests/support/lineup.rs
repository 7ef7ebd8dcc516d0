//! Which policies sit where? By name, so that the same line-up can be seated natively and as components.

/// One seat.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seat {
    /// Folder of the policy below its decision.
    pub name: &'static str,
    /// JSON; empty is every default.
    pub parameters: String,
    /// Two line-ups that differ in this alone have two instances of one policy: a switch hands the state over.
    pub instance: u64,
}

impl Seat {
    fn of(name: &'static str) -> Self {
        Self { name, parameters: String::new(), instance: 0 }
    }
}

/// Five seats, in the order of `Decision::ALL`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lineup(pub [Seat; 5]);

/// Places in a [`Lineup`].
pub const ADMISSION: usize = 0;
pub const ROUTING: usize = 1;
pub const FAIRNESS: usize = 2;
pub const EVICTION: usize = 3;
pub const OVERLOAD: usize = 4;

impl Lineup {
    /// The host's native defaults, or the components that hold the same code.
    pub fn twins(context_tokens_max: u32) -> Self {
        let mut lineup = Self(["bounded", "overlap-load", "class-first", "lru", "ladder"].map(Seat::of));
        lineup.0[OVERLOAD].parameters = format!(r#"{{"context-window-tokens":{context_tokens_max}}}"#);
        lineup
    }

    /// What is shipped as the default.
    pub fn shipped() -> Self {
        Self(["queue-quota", "load-overlap", "vtc", "gdsf", "degrade-ladder"].map(Seat::of))
    }

    /// With another policy in one seat.
    pub fn with(mut self, place: usize, name: &'static str, parameters: &str) -> Self {
        self.0[place] = Seat { name, parameters: parameters.to_owned(), instance: self.0[place].instance };
        self
    }

    /// The same policies in other instances.
    pub fn instance(mut self, instance: u64) -> Self {
        self.0.iter_mut().for_each(|seat| seat.instance = instance);
        self
    }
}
