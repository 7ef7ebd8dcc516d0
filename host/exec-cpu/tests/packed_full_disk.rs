//! A disk that takes no more while packed weights are written. Alone in its process, whose limit on the size of files stands for the disk.

mod support;

use std::sync::Arc;

use penstock_exec_cpu::{CpuModel, MemoryBudget, Numerics, PackedCache, PackedMode, ThreadPool};
use penstock_model::{Digest, RopeLayout};
use support::TinyModel;

#[test]
fn weights_are_packed_and_nothing_is_left_behind() {
    // SAFETY: a signal without a handler of ours is ignored from here on, so that writing fails instead.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let limit = libc::rlimit { rlim_cur: 64 << 10, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the limit is read from a valid place.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    let dir = tempfile::tempdir().unwrap();
    let places = vec![dir.path().join("tiny.packed")];
    let cache = PackedCache { mode: PackedMode::Copy, source: Digest::of(b"tiny"), places };
    let tiny = TinyModel::new(RopeLayout::Interleaved, true);
    let threads = Arc::new(ThreadPool::new(1).expect("threads start"));
    let budget = MemoryBudget::new(1 << 30);
    let view = |role| tiny.view(role);
    let (model, outcome) =
        CpuModel::from_tensors_cached(&tiny.config, view, &cache, threads, &budget, Numerics::default())
            .expect("loads");
    assert!(model.weight_bytes() > 64 << 10);
    assert_eq!((outcome.read, outcome.written, outcome.unwritable.len()), (None, None, 1));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
