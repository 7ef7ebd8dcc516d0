//! Every limit of this crate, each with its reason.

/// Most workers that a watcher knows: as many replicas as a gateway knows.
pub const WORKERS_MAX: usize = 1_024;
/// Longest encoded record. A full one with every list at its limit has about 10 KiB.
pub const RECORD_BYTES_MAX: usize = 16 << 10;
/// Changes that wait for a watcher. One that falls further behind gets a new snapshot instead, which is never larger than the set.
pub const QUEUE_MAX: usize = 256;
/// Longest worker id: a file name with its ending, and most pod names.
pub const ID_BYTES_MAX: usize = 200;
/// Longest address: a DNS name has at most 253 characters; a scheme and a port come with it.
pub const ADDRESS_BYTES_MAX: usize = 300;
/// Ways to reach a worker's KV: one for each kind of transport and network.
pub const TRANSFER_ADDRESSES_MAX: usize = 8;
/// Longest name of a model, namespace and revision included.
pub const MODEL_BYTES_MAX: usize = 256;
/// Longest compatibility hash: SHA-512 in hexadecimal.
pub const COMPATIBILITY_BYTES_MAX: usize = 128;
/// Labels that say where a worker stands.
pub const LABELS_MAX: usize = 16;
/// Longest name of a label, and longest value: as in Kubernetes.
pub const LABEL_BYTES_MAX: usize = 63;
/// Entries that could not be used and are remembered by name; of further ones only the count is kept.
pub const FAULTS_MAX: usize = 32;
/// Longest text kept of a fault, and of a foreign entry's name.
pub const FAULT_CHARS_MAX: usize = 200;

const _: () = assert!(FAULTS_MAX < WORKERS_MAX);
const _: () = assert!(ID_BYTES_MAX + ".json".len() <= 255);
const _: () = assert!(
    ID_BYTES_MAX
        + MODEL_BYTES_MAX
        + COMPATIBILITY_BYTES_MAX
        + (TRANSFER_ADDRESSES_MAX + 4) * (ADDRESS_BYTES_MAX + 32)
        + LABELS_MAX * (2 * LABEL_BYTES_MAX + 6)
        + 1_024
        < RECORD_BYTES_MAX
);
