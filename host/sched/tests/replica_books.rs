//! What a replica's books take is foretold before there is a replica. Alone in its process, whose allocator counts bytes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use penstock_base::Instant;
use penstock_sched::replica::{Replica, ReplicaConfig};

struct Counting;

static HELD: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system allocator unchanged; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_replica_holds_no_more_than_foretold() {
    for (blocks, slots, context_tokens_max) in
        [(2, 8, 512), (2_048, 64, 8_192), (32_768, 64, 8_192), (32_768, 8, 131_072), (9_999, 1_024, 2_048)]
    {
        let config =
            ReplicaConfig { blocks, slots, context_tokens_max, step_tokens: 4_096, ..ReplicaConfig::default() };
        let books = config.books();
        assert_eq!(books, ReplicaConfig { blocks: 7, ..config.clone() }.books(), "blocks play no part");
        let before = HELD.load(Ordering::Relaxed);
        let replica = Replica::new(config, Instant::ZERO);
        let held = HELD.load(Ordering::Relaxed) - before;
        drop(replica);
        let foretold = books.fixed_bytes + u64::from(blocks) * books.block_bytes;
        assert!(held <= foretold, "{blocks} blocks, {slots} slots: {held} held, {foretold} foretold");
        // What is foretold for all blocks is most of it where there are many.
        assert!(
            blocks < 32_768 || foretold < 4 * held,
            "{blocks} blocks, {slots} slots: {held} held, {foretold} foretold"
        );
    }
}
