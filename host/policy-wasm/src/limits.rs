//! What may a component use? Every limit of the wall in one place, each with its reason.

use penstock_policy_api::Question;

/// Largest component that is loaded: an interpreter with its library is 18 MiB, a compiled policy some 40 KiB.
pub const COMPONENT_BYTES_MAX: usize = 32 << 20;
/// Most components that a [`crate::Library`] keeps.
pub const LIBRARY_COMPONENTS_MAX: usize = 64;

/// Fuel of a call beside what its rows add, unless the policy set says otherwise.
pub const FUEL_BASE_DEFAULT: u64 = 20_000;
/// Most fuel that a policy set may give as a base, and what one call of the life cycle gets.
pub const FUEL_MAX: u64 = 20_000_000;
/// Fuel that each fact of an `observe` adds.
pub const FUEL_PER_FACT: u64 = 500;

/// Fuel that each row of a call adds.
pub const fn fuel_per_row(question: Question) -> u64 {
    match question {
        Question::Admission => 0,
        Question::Routing => 1_500,
        Question::Order | Question::Victims => 3_000,
        Question::Eviction => 2_000,
        Question::Overload => 1_000,
    }
}

/// Linear memory of one instance, unless configured.
pub const MEMORY_BYTES_DEFAULT: usize = 64 << 20;
/// Instances alive at once in one process, unless configured: six a machine and generation, two generations during a swap.
pub const INSTANCES_DEFAULT: u32 = 256;
/// Elements of one table: function pointers of an interpreter.
pub const TABLE_ELEMENTS_MAX: usize = 20_000;
/// Core instances inside one component; an interpreter's component has twenty-odd.
pub const CORE_INSTANCES_MAX: u32 = 64;
/// Instances that a component may make in all, those of components within it included: its core instances, and one small component for each
/// interface that it exports.
pub const COMPONENT_INSTANCES_MAX: u64 = 256;
/// How deep components may lie within one another; what the contract's tools make lies one deep.
pub const COMPONENT_DEPTH_MAX: usize = 16;
/// Memories and tables inside one component.
pub const MEMORIES_MAX: u32 = 8;
/// Stack of a guest: a quarter of a thread's.
pub const STACK_BYTES_MAX: usize = 512 << 10;

/// Saved state, unless configured.
pub const STATE_BYTES_DEFAULT: usize = 256 << 10;
/// Most saved state that configuration may allow.
pub const STATE_BYTES_MAX: usize = 1 << 20;
/// A snapshot is due after that many decisions,
pub const SNAPSHOT_DECISIONS: u32 = 1_000;
/// or after that time, whichever comes first.
pub const SNAPSHOT_AFTER_US: u64 = 1_000_000;

/// Bytes that the lists of one decision may hold: 16 for each of 1,024 rows, four times over.
pub const ANSWER_BYTES_MAX: usize = 64 << 10;
/// Bytes that a manifest may hold.
pub const MANIFEST_BYTES_MAX: usize = 256 << 10;
/// Bytes of a name, a version or a reason in a manifest.
pub const NAME_BYTES_MAX: usize = 128;
/// Refusal reasons that a policy may name.
pub const REASONS_MAX: usize = 64;

/// Host calls that one guest call may make; the next one traps. Fuel does not see the host's side of them.
pub const HOST_CALLS_MAX: u32 = 256;
/// Bytes of a log line; the rest is cut.
pub const LOG_TEXT_BYTES_MAX: usize = 1_024;
/// Lines that wait to be drained; further ones are dropped and counted.
pub const LOG_LINES_MAX: usize = 64;
/// Calls that earn one more line, once the first [`LOG_LINES_MAX`] are spent.
pub const LOG_CALLS_PER_LINE: u64 = 16;
/// Names that one seat may count under.
pub const COUNTERS_MAX: usize = 32;
/// Bytes of such a name.
pub const COUNTER_NAME_BYTES_MAX: usize = 64;

/// Strikes that put a policy into quarantine,
pub const STRIKES_MAX: usize = 3;
/// when they fall within so many calls.
pub const STRIKE_WINDOW_CALLS: u64 = 1_000;
/// Calls that the first quarantine lasts; each further one lasts twice as long,
pub const BACK_OFF_CALLS_MIN: u64 = 64;
/// up to this.
pub const BACK_OFF_CALLS_MAX: u64 = 65_536;
/// Calls without a strike after which the first quarantine is short again.
pub const FORGIVEN_AFTER_CALLS: u64 = 16 * STRIKE_WINDOW_CALLS;

/// Happenings that wait to be drained; older ones are dropped and counted.
pub const HAPPENINGS_MAX: usize = 32;
/// Bytes of a fault's text.
pub const FAULT_TEXT_BYTES_MAX: usize = 4_096;
/// Frames of a guest's stack in it.
pub const FAULT_FRAMES_MAX: usize = 24;

/// Bytes of a policy set's document.
pub const SET_BYTES_MAX: usize = 256 << 10;
/// Bytes of one seat's parameters, in canonical form.
pub const PARAMETERS_BYTES_MAX: usize = 64 << 10;

const _: () = {
    assert!(FUEL_BASE_DEFAULT <= FUEL_MAX);
    assert!(STATE_BYTES_DEFAULT <= STATE_BYTES_MAX);
    assert!(BACK_OFF_CALLS_MIN <= BACK_OFF_CALLS_MAX);
    assert!(ANSWER_BYTES_MAX >= 16 * penstock_base::limits::ORDER_ROWS_MAX);
};
