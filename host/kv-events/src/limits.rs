//! Every limit of this crate, each with its reason.

use std::time::Duration;

/// Longest payload. vLLM's largest batches, thousands of blocks with their tokens, have some hundred KiB.
pub const PAYLOAD_BYTES_MAX: usize = 8 << 20;
/// Longest topic: `kv@ADDRESS@MODEL` has the length of a model's name and a bit.
pub const TOPIC_BYTES_MAX: usize = 512;
/// Frames of one message: the longest has four, and libzmq may add none.
pub const FRAMES_MAX: usize = 8;
/// Longest command of the wire protocol; the usual ones have some 30 bytes.
pub const COMMAND_BYTES_MAX: usize = 1 << 10;
/// Events of one batch.
pub const EVENTS_MAX: usize = 1 << 16;
/// Blocks named in one batch: what 100 MiB of KV in small blocks come to, ten times over.
pub const HASHES_MAX: usize = 1 << 18;
/// Longest text of an event: names of media, adapters and the like.
pub const TEXT_BYTES_MAX: usize = 512;
/// Longest block hash: SHA-256.
pub const HASH_BYTES_MAX: usize = 32;
/// Subscribers of one publisher: every gateway, and some that only look.
pub const SUBSCRIBERS_MAX: usize = 64;
/// Connections that ask for a replay or a snapshot at one time.
pub const REPLAYS_MAX: usize = 16;
/// Topics that one subscriber may name.
pub const TOPICS_MAX: usize = 16;
/// Batches kept for replay, as vLLM does.
pub const BUFFER_BATCHES_MAX: usize = 10_000;
/// Bytes kept for replay: a batch of one block without tokens has about 150.
pub const BUFFER_BYTES_MAX: usize = 64 << 20;
/// Batches that wait for one subscriber; more are dropped, and it asks for them again.
pub const QUEUE_BATCHES_MAX: usize = 4_096;
/// Bytes that wait for one subscriber.
pub const QUEUE_BYTES_MAX: usize = 16 << 20;
/// Blocks that a consumer's index, and a publisher's own, hold: about 100 bytes each, twice that while a snapshot is read.
pub const INDEX_BLOCKS_MAX: usize = 1 << 20;
/// Changes of an index that wait for whoever keeps a copy; more, and the copy is made anew.
pub const CHANGES_MAX: usize = 1 << 16;
/// Blocks in one message of a snapshot.
pub const SNAPSHOT_BLOCKS: usize = 16_384;
/// Longest wait for a handshake, and for a peer that must answer or read.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time for a whole replay or snapshot: all that is kept, over a slow link.
pub const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Batches that a publisher's own index may be behind: those of the moment in which it is copied for a snapshot.
pub const UNSEEN_BATCHES_MAX: usize = 1_024;
/// A peer that has not taken a byte for so long is gone.
pub const STALL_MAX: Duration = Duration::from_secs(30);

const _: () = assert!(SNAPSHOT_BLOCKS * (HASH_BYTES_MAX + 2) + 4_096 < PAYLOAD_BYTES_MAX);
const _: () = assert!(QUEUE_BYTES_MAX > PAYLOAD_BYTES_MAX && BUFFER_BYTES_MAX > PAYLOAD_BYTES_MAX);
