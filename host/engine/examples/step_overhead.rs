//! What does the driver itself cost? Streams run on an executor whose steps take no time, so that all of it is the host's.
//!
//! `cargo run --release -p penstock-engine --example step_overhead -- [streams] [tokens]`

#[path = "../tests/support/mod.rs"]
mod support;

use penstock_engine::EngineConfig;
use penstock_sched::replica::ReplicaConfig;
use support::{Rig, Sizes, prompt, read};

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u32>().expect("a number"));
    let streams = arguments.next().unwrap_or(16);
    let tokens = arguments.next().unwrap_or(2_000);
    for inflight_max in [1, 2] {
        let replica = ReplicaConfig { inflight_max, check_every_step: false, ..ReplicaConfig::default() };
        let sizes = Sizes { blocks: 65_536, block_size_tokens: 16, slots: 64, step_tokens: 512 };
        let rig = Rig::new(1, sizes, EngineConfig { replica, ..EngineConfig::default() });
        let began = std::time::Instant::now();
        let open: Vec<_> = (0..streams).map(|which| rig.submit(rig.submission(&prompt(which, 40), tokens))).collect();
        std::thread::scope(|scope| {
            for mut stream in open {
                scope.spawn(move || read(&mut stream));
            }
        });
        let took = began.elapsed().as_secs_f64();
        let steps = rig.controls[0].steps() as f64;
        println!(
            "{streams} streams, {inflight_max} in flight: {:.0} tokens/s, {:.1} us a step, of which {:.1} us inside the fake executor and \
             {:.1} us between steps",
            f64::from(streams * tokens) / took,
            took * 1e6 / steps,
            rig.metric("penstock_step_executor_seconds_sum") * 1e6 / steps,
            rig.metric("penstock_step_outside_seconds_sum") * 1e6 / steps,
        );
        if let Some(before) = cpu_ticks() {
            std::thread::sleep(std::time::Duration::from_secs(3));
            println!("idle: {} ticks of CPU time (10 ms each) in 3 s", cpu_ticks().unwrap_or(before) - before);
        }
    }
}

/// User and system time of this process in ticks, where the system tells.
fn cpu_ticks() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<_> = stat.rsplit(')').next()?.split_whitespace().collect();
    Some(fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?)
}
