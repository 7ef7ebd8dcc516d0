//! An idle pool uses no CPU. Alone in its process, since it reads the process's CPU time.

use penstock_kernels_cpu::ThreadPool;

fn cpu_nanoseconds() -> i64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    assert_eq!(code, 0);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

#[test]
fn workers_park_when_there_is_nothing_to_do() {
    let pool = ThreadPool::new(4).expect("starts");
    let mut session = pool.enter();
    session.run(100, |_| {}).expect("no task panics");
    std::thread::sleep(std::time::Duration::from_millis(200));
    let before = cpu_nanoseconds();
    std::thread::sleep(std::time::Duration::from_millis(300));
    let used = cpu_nanoseconds() - before;
    // Three spinning workers would use up to 900 ms; a parked pool uses next to nothing.
    assert!(used < 30_000_000, "an idle pool, its session still open, used {used} ns of CPU");
    session.run(100, |_| {}).expect("a parked pool wakes");
}
