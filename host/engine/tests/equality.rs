//! The same requests give the same tokens, bit for bit, however they are served: the demo model on the CPU through the whole driver.

mod support;

use std::path::PathBuf;
use std::sync::Arc;

use penstock_engine::{Engine, EngineConfig, HandoffSetup, PolicySource, ServedModel, Vocabulary};
use penstock_exec::{Executor, SamplingParams};
use penstock_exec_cpu::{CpuExecutor, CpuModel, CpuOptions, MemoryBudget, Numerics, ThreadPool};
use penstock_model::{Model, OpenOptions, Specials, Tokenizer, cache_dir};
use penstock_sched::gateway::HandoffConfig;
use penstock_sched::replica::ReplicaConfig;
use support::{Got, OptimisticPolicies, read};

const REQUESTS: usize = 40;
const OUTPUT_TOKENS: u32 = 16;

/// One way to serve.
#[derive(Clone, Copy, Debug)]
struct Way {
    name: &'static str,
    together: bool,
    threads: usize,
    replicas: u32,
    /// So many of them compute prompts for the others.
    prefill: u32,
    overlap: usize,
    chunk_tokens: u32,
    step_tokens: u32,
    prefix_cache: bool,
    kv_blocks: u32,
    optimistic: bool,
    /// Serve everything twice and keep the second, warm answers.
    warm: bool,
}

const ALONE: Way = Way {
    name: "alone",
    together: false,
    threads: 1,
    replicas: 1,
    prefill: 0,
    overlap: 1,
    chunk_tokens: 512,
    step_tokens: 512,
    prefix_cache: false,
    kv_blocks: 512,
    optimistic: false,
    warm: false,
};

const WAYS: &[Way] = &[
    Way { name: "in one batch", together: true, ..ALONE },
    Way { name: "two steps in flight", together: true, overlap: 2, ..ALONE },
    Way { name: "chunks of 16, two threads", together: true, chunk_tokens: 16, step_tokens: 48, threads: 2, ..ALONE },
    Way { name: "cached", together: true, overlap: 2, prefix_cache: true, warm: true, ..ALONE },
    Way { name: "preempted", together: true, overlap: 1, kv_blocks: 36, optimistic: true, ..ALONE },
    Way {
        name: "preempted, cached, two in flight",
        together: true,
        overlap: 2,
        kv_blocks: 36,
        optimistic: true,
        prefix_cache: true,
        ..ALONE
    },
    Way {
        name: "three replicas, two threads, cached",
        together: true,
        replicas: 3,
        threads: 2,
        overlap: 2,
        prefix_cache: true,
        warm: true,
        ..ALONE
    },
    Way { name: "handed off, cold", together: true, replicas: 2, prefill: 1, ..ALONE },
    Way {
        name: "handed off in chunks of 16, two threads, two steps in flight",
        together: true,
        replicas: 3,
        prefill: 2,
        threads: 2,
        overlap: 2,
        chunk_tokens: 16,
        step_tokens: 48,
        ..ALONE
    },
    Way {
        name: "handed off, cached",
        together: true,
        replicas: 4,
        prefill: 2,
        overlap: 2,
        prefix_cache: true,
        warm: true,
        ..ALONE
    },
];

struct Bytes(Arc<Tokenizer>);

impl Vocabulary for Bytes {
    fn token_bytes(&self, id: u32) -> std::borrow::Cow<'_, [u8]> {
        std::borrow::Cow::Borrowed(self.0.delivered_bytes(id))
    }
}

fn demo_model() -> Option<Model> {
    let path = std::env::var_os("PENSTOCK_DEMO_MODEL").map(PathBuf::from).or_else(cache_dir::demo_path)?;
    if !path.exists() {
        return None;
    }
    Some(Model::open(&path, &OpenOptions::default(), &mut |_, _| {}).expect("the demo model opens"))
}

/// Texts that share beginnings, of many lengths.
fn prompts(tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
    let stem = "A reservoir feeds the turbines of a small town. Its keeper writes down the level each morning, the weather, \
                and what the valley asked for on the day before. Some days the valley asks for more than the river brings. ";
    let tails = ["Today he wrote:", "The list of 1893 begins", "def level(day):", "Als der Regen kam,", "水位は"];
    let prompts = (0..REQUESTS).map(|i| {
        let stem: String = stem.repeat(1 + i % 3).chars().take(40 + (i * 97) % 560).collect();
        let text = format!("{stem}{} {i}", tails[i % tails.len()]);
        tokenizer.encode(&text, Specials::AsText).expect("plain text")
    });
    prompts.collect()
}

/// Greedy and seeded in turn, with everything that looks at history.
fn params(i: usize) -> SamplingParams {
    let seed = i as u64;
    match i % 4 {
        0 | 1 => SamplingParams::default(),
        2 => SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() },
        _ => SamplingParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.9,
            repetition_penalty: 1.1,
            frequency_penalty: 0.2,
            seed,
            ..SamplingParams::default()
        },
    }
}

fn start(model: &Model, weights: &Arc<CpuModel>, way: &Way) -> Engine {
    let options = CpuOptions { kv_blocks: way.kv_blocks, slots: 64, step_tokens_max: 512, ..CpuOptions::default() };
    let budget = MemoryBudget::new(8 << 30);
    let executors = (0..way.replicas).map(|_| {
        Box::new(CpuExecutor::new(Arc::clone(weights), &options, &budget).expect("fits")) as Box<dyn Executor>
    });
    let mut config = EngineConfig {
        replica: ReplicaConfig {
            step_tokens: way.step_tokens,
            chunk_tokens: way.chunk_tokens,
            inflight_max: way.overlap,
            prefix_cache: way.prefix_cache,
            slots: 64,
            context_tokens_max: u32::MAX,
            check_every_step: true,
            ..ReplicaConfig::default()
        },
        ..EngineConfig::default()
    };
    // Streams are read one after the other here: however slow the machine, the last one is not a slow client.
    config.limits.send_timeout = penstock_base::Duration::from_s(3_600);
    if way.optimistic {
        config.policies = PolicySource::new(|_| Box::new(OptimisticPolicies::new()));
    }
    if way.prefill > 0 {
        let gateway = HandoffConfig { prefill_tokens_min: 16, ..HandoffConfig::default() };
        config.handoff = Some(HandoffSetup { prefill: way.prefill, gateway });
        config.gateway.check_every_step = true;
    }
    let namespace = model.manifest().namespace(None, "bf16", "test");
    let vocabulary = Arc::new(Bytes(Arc::clone(model.tokenizer())));
    Engine::start(config, ServedModel { name: "demo".into(), namespace, vocabulary }, executors.collect())
        .expect("the values can work")
}

fn serve(engine: &Engine, prompts: &[Vec<u32>], together: bool) -> Vec<Got> {
    let submit = |i: usize| {
        let mut submission = support::submission(engine, &prompts[i], OUTPUT_TOKENS);
        submission.sampling = Arc::new(params(i));
        submission.sequences = if i % 8 == 3 { 3 } else { 1 };
        engine.submit(submission).expect("there is room").1
    };
    if together {
        let mut streams: Vec<_> = (0..prompts.len()).map(submit).collect();
        streams.iter_mut().map(read).collect()
    } else {
        (0..prompts.len()).map(|i| read(&mut submit(i))).collect()
    }
}

fn metric(engine: &Engine, name: &str) -> f64 {
    let page = engine.metrics_text();
    page.lines()
        .filter(|line| line.starts_with(name))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

#[test]
fn forty_requests_give_equal_tokens_however_they_are_served() {
    let Some(model) = demo_model() else {
        println!("SKIPPED: demo model not found (run `cargo xtask model`)");
        return;
    };
    let prompts = prompts(model.tokenizer());
    let budget = MemoryBudget::new(8 << 30);
    let load = |threads| {
        let threads = Arc::new(ThreadPool::new(threads).expect("threads"));
        Arc::new(CpuModel::load(&model, threads, &budget, Numerics::default()).expect("the model packs"))
    };
    let weights = [load(1), load(2)];
    let run = |way: &Way| {
        let engine = start(&model, &weights[way.threads - 1], way);
        let mut got = serve(&engine, &prompts, way.together);
        if way.warm {
            got = serve(&engine, &prompts, way.together);
            assert!(metric(&engine, "vllm:prefix_cache_hits_total") > 0.0, "{}: nothing was cached", way.name);
        }
        if way.optimistic {
            assert!(metric(&engine, "vllm:num_preemptions_total") > 0.0, "{}: nothing was preempted", way.name);
        }
        if way.prefill > 0 {
            let of = |end: &str| metric(&engine, &format!("penstock_handoffs_total{{end=\"{end}\""));
            assert!(of("handed_off") > 15.0, "{}: hardly anything was handed off", way.name);
            assert_eq!(of("anew") + of("failed") + of("at_sender"), 0.0, "{}\n{}", way.name, engine.metrics_text());
            assert!(metric(&engine, "penstock_kv_transfer_bytes_total") > 0.0, "{}", way.name);
        }
        assert!(engine.shutdown(), "{}: threads are left", way.name);
        got
    };
    let expected = run(&ALONE);
    assert!(expected.iter().all(|got| got.outcome().is_success() && !got.tokens[0].is_empty()));
    // Answers of one request differ from each other where they are drawn: seeds are derived, not repeated.
    assert!(expected.iter().any(|got| got.tokens.len() == 3 && got.tokens[0] != got.tokens[1]));
    for way in WAYS {
        let found = run(way);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.tokens, expected.tokens, "request {i}, {}", way.name);
            assert_eq!(found.texts, expected.texts, "request {i}, {}", way.name);
        }
    }
}
