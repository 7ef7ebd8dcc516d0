//! The thread pool.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use penstock_kernels_cpu::{PoolError, ThreadPool};

#[test]
fn every_index_runs_once() {
    for threads in [1, 2, 5] {
        let pool = ThreadPool::new(threads).expect("starts");
        assert_eq!(pool.threads(), threads);
        let mut session = pool.enter();
        for tasks in [0, 1, 2, 3, 17, 1000] {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            session
                .run(tasks, |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                })
                .expect("no task panics");
            assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} threads, {tasks} tasks");
        }
    }
}

#[test]
fn rows_are_handed_out_whole() {
    let pool = ThreadPool::new(3).expect("starts");
    let mut data = vec![0usize; 4000 * 7];
    pool.enter().rows(&mut data, 7, |row, values| values.fill(row + 1)).expect("no task panics");
    assert!(data.iter().enumerate().all(|(i, &v)| v == i / 7 + 1));
}

#[test]
fn items_are_handed_out_one_by_one() {
    let pool = ThreadPool::new(3).expect("starts");
    let mut items: Vec<String> = (0..20).map(|i| i.to_string()).collect();
    pool.enter().each(&mut items, |i, item| item.push_str(&format!("/{i}"))).expect("no task panics");
    assert!(items.iter().enumerate().all(|(i, item)| *item == format!("{i}/{i}")));
}

#[test]
fn a_panic_comes_back_as_an_error_and_the_pool_lives_on() {
    for threads in [1, 3] {
        let pool = ThreadPool::new(threads).expect("starts");
        let ran = AtomicUsize::new(0);
        let error = pool
            .enter()
            .run(50, |i| {
                ran.fetch_add(1, Ordering::Relaxed);
                assert!(i != 31, "index thirty-one");
            })
            .expect_err("a task panicked");
        assert!(error.message.contains("index thirty-one"), "{error}");
        assert_eq!(ran.load(Ordering::Relaxed), 50);
        pool.enter().run(50, |_| {}).expect("the pool lives on");
    }
}

#[test]
fn many_jobs_from_many_replicas_never_mix() {
    let pool = Arc::new(ThreadPool::new(3).expect("starts"));
    let inside = Arc::new(AtomicUsize::new(0));
    let replicas: Vec<_> = (0..4)
        .map(|replica: usize| {
            let (pool, inside) = (Arc::clone(&pool), Arc::clone(&inside));
            std::thread::spawn(move || {
                for round in 0..200 {
                    let mut session = pool.enter();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "one replica at a time");
                    let sum = AtomicUsize::new(0);
                    let tasks = 1 + (replica * 31 + round) % 40;
                    session
                        .run(tasks, |i| {
                            sum.fetch_add(i + 1, Ordering::Relaxed);
                        })
                        .expect("no task panics");
                    assert_eq!(sum.load(Ordering::Relaxed), tasks * (tasks + 1) / 2);
                    inside.fetch_sub(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    for replica in replicas {
        replica.join().expect("no replica panics");
    }
}

#[test]
fn turns_come_in_order_of_arrival() {
    let pool = Arc::new(ThreadPool::new(1).expect("starts"));
    let order = Arc::new(Mutex::new(Vec::new()));
    let first = pool.enter();
    let mut waiting = Vec::new();
    for number in 0..5 {
        let (arriving, arrived) = std::sync::mpsc::channel();
        let (pool, order) = (Arc::clone(&pool), Arc::clone(&order));
        waiting.push(std::thread::spawn(move || {
            arriving.send(()).expect("the test listens");
            let _session = pool.enter();
            order.lock().expect("not poisoned").push(number);
        }));
        arrived.recv().expect("the thread runs");
        // The thread is about to draw its number; give it ample time before the next one starts.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(first);
    for thread in waiting {
        thread.join().expect("no thread panics");
    }
    assert_eq!(*order.lock().expect("not poisoned"), [0, 1, 2, 3, 4]);
}

#[test]
fn absurd_thread_counts_are_refused() {
    assert!(matches!(ThreadPool::new(0), Err(PoolError::ThreadCount { wanted: 0 })));
    assert!(matches!(ThreadPool::new(513), Err(PoolError::ThreadCount { wanted: 513 })));
}
