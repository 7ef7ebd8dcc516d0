//! Threads that are kept to cores. Alone in its process, whose threads it finds by their names. What is so is read from the system's own tables.
#![cfg(target_os = "linux")]

use penstock_kernels_cpu::{PoolError, ThreadPool, cores};

/// The cores that a `status` file lists, as in `0-2,5`.
fn cores_of(status: &str) -> Vec<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("listed");
    let parts = line.trim().split(',').map(|part| part.split_once('-').unwrap_or((part, part)));
    parts.flat_map(|(from, to)| from.parse().expect("a number")..=to.parse::<usize>().expect("a number")).collect()
}

/// Cores of each worker that is alive, once there are `count`: a thread takes its name as it starts, and leaves the table as it ends, each a
/// moment after the pool is made or dropped.
fn cores_of_workers(count: usize) -> Vec<Vec<usize>> {
    for _ in 0..2_000 {
        let tasks = std::fs::read_dir("/proc/self/task").expect("there").flatten().map(|task| task.path());
        let statuses = tasks.filter_map(|task| std::fs::read_to_string(task.join("status")).ok());
        let workers = statuses.filter(|status| status.starts_with("Name:\tpenstock-cpu"));
        let cores: Vec<Vec<usize>> = workers.map(|status| cores_of(&status)).collect();
        if cores.len() == count {
            return cores;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("there are never {count} workers");
}

#[test]
fn each_worker_has_a_core_of_its_own_among_those_allowed() {
    let own = cores_of(&std::fs::read_to_string("/proc/thread-self/status").expect("there"));
    assert_eq!(cores::allowed().expect("known"), own);
    let pool = ThreadPool::pinned(own.len()).expect("as many threads as cores");
    let mut workers = cores_of_workers(own.len() - 1);
    assert!(workers.iter().all(|cores| cores.len() == 1), "{workers:?}");
    workers.sort();
    // The first core is left to the caller.
    assert_eq!(workers.concat(), own[1..]);
    pool.enter().run(1000, |_| {}).expect("no task panics");
    drop(pool);
    let free = ThreadPool::new(own.len()).expect("starts");
    assert!(cores_of_workers(own.len() - 1).into_iter().all(|cores| cores == own), "nothing is pinned unless asked");
    drop(free);

    match ThreadPool::pinned(own.len() + 1) {
        Err(PoolError::Cores { wanted, allowed }) => assert_eq!((wanted, allowed), (own.len() + 1, own.len())),
        other => panic!("more threads than cores: {other:?}"),
    }
    assert!(cores_of_workers(0).is_empty(), "a refused pool leaves no thread");

    // The mask counts, not the machine: as taskset and control groups set it.
    // SAFETY: plain bits.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the core is one of the mask's.
    unsafe { libc::CPU_SET(own[own.len() - 1], &mut set) };
    // SAFETY: the set is valid and its size is given.
    assert_eq!(unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) }, 0);
    assert!(matches!(ThreadPool::pinned(2), Err(PoolError::Cores { wanted: 2, allowed: 1 })));
}
