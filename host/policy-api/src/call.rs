//! The envelope of every call.

/// What every call carries beside its facts. Nothing else that a policy sees is ambient.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Call {
    /// Counts the calls of one question at one machine, from 1.
    pub number: u64,
    /// The machine's time in microseconds since its process's origin.
    pub now_us: u64,
    /// For ties and samples; see [`crate::seed`].
    pub seed: u64,
}
