//! Where does this process's memory go? Settled before any of it is taken, and shown.

mod limit;

use std::fmt;

use penstock_engine::metrics::MemoryBytes;
use penstock_exec_cpu::{Blocks, Claims, Demand, Ledger, Shortage};
use penstock_sched::replica::Books;

pub use limit::{Limit, find};

use crate::config::{Config, KvDtype, PackedCacheMode};

/// What the process holds whatever the model: the program, its threads and their stacks, compiled policies and what they remember, metrics,
/// tables of requests. 60 to 80 MiB were measured with the shipped policies under 64 streams; sets that are being changed want as much again.
const BASE_BYTES: u64 = 128 << 20;

/// Bytes that the tokenizer holds for a token of its vocabulary. Some 800 were measured for Gemma's 262,144 tokens, half of that for SmolLM2's.
const VOCABULARY_TOKEN_BYTES: u64 = 1 << 10;

/// Bytes of a token that waits in the queue: its id, and its part of a block's key.
const QUEUED_TOKEN_BYTES: u64 = 5;

/// Share of what is left that a pool takes by itself where nobody gave the memory to this process alone, in percent.
const SHARED_PERCENT: u32 = 50;

/// The settled ledger, and what it was settled from.
#[derive(Clone, Debug)]
pub struct Memory {
    /// Where the memory goes.
    pub ledger: Ledger,
    /// How much there is, and who says so.
    pub limit: Limit,
    /// Weights are mapped from their file: the system may take their pages back, and reads them again.
    is_mapped: bool,
    /// The number of blocks was not asked for.
    is_sized_here: bool,
    replicas: u32,
    block_size_tokens: u32,
}

/// What a model asks for.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Of the executors.
    pub demand: Demand,
    /// Of the machines.
    pub books: Books,
    /// Tokens that the tokenizer knows.
    pub vocabulary: usize,
}

/// It does not fit.
#[derive(Debug)]
pub struct TooLittle {
    /// What does not.
    shortage: Shortage,
    /// How much there is.
    limit: Limit,
    /// What helps, the least change first.
    remedies: Vec<String>,
}

impl fmt::Display for TooLittle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (the limit is {}); ", self.shortage, self.limit.source)?;
        f.write_str(&self.remedies.join(", or "))
    }
}

impl std::error::Error for TooLittle {}

impl Memory {
    /// Fits the model, the replicas and everything else into `limit`.
    ///
    /// # Errors
    /// [`TooLittle`], with figures and remedies.
    pub fn settle(config: &Config, limit: Limit, needs: &Needs) -> Result<Self, TooLittle> {
        let Needs { demand, books, vocabulary } = needs;
        let replicas = &config.replicas;
        let is_sized_here = replicas.kv_blocks == 0;
        let useful = demand.context_blocks.saturating_mul(replicas.slots);
        let claims = Claims {
            limit_bytes: limit.bytes,
            weights_bytes: demand.weights_bytes,
            shared_bytes: demand.threads_bytes,
            workspace_bytes: demand.workspace_bytes().saturating_add(books.fixed_bytes),
            reserve_bytes: reserve(config, *vocabulary),
            replicas: replicas.total(),
            block_bytes: demand.block_bytes.saturating_add(books.block_bytes),
            context_blocks: demand.context_blocks,
            blocks: match replicas.kv_blocks {
                0 => Blocks::WhatFits { percent: if limit.is_own() { 100 } else { SHARED_PERCENT }, useful },
                wanted => Blocks::Exactly(wanted),
            },
        };
        let ledger = Ledger::settle(&claims).map_err(|shortage| TooLittle {
            remedies: remedies(config, &shortage),
            shortage,
            limit,
        })?;
        Ok(Self {
            ledger,
            limit,
            is_mapped: config.model.packed_cache == PackedCacheMode::Map,
            is_sized_here,
            replicas: replicas.total(),
            block_size_tokens: replicas.block_size_tokens,
        })
    }

    /// What weights and KV may take together.
    pub fn budget_bytes(&self) -> usize {
        let Ledger { limit_bytes, workspace_bytes, reserve_bytes, .. } = self.ledger;
        // What the ledger puts aside for the ends of huge pages is theirs.
        let pages = u64::from(self.replicas) * penstock_exec_cpu::HUGE_PAGE_BYTES as u64;
        let bytes = limit_bytes.saturating_sub(workspace_bytes).saturating_sub(reserve_bytes).saturating_add(pages);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// For the metrics.
    pub fn uses(&self) -> MemoryBytes {
        let Ledger { weights_bytes, kv_bytes, workspace_bytes, reserve_bytes, limit_bytes, .. } = self.ledger;
        MemoryBytes {
            weights: weights_bytes,
            kv: kv_bytes,
            workspace: workspace_bytes,
            reserve: reserve_bytes,
            limit: limit_bytes,
        }
    }

    /// One line for the log, before anything is loaded.
    pub fn log(&self) {
        let ledger = &self.ledger;
        tracing::info!(
            limit_mib = ledger.limit_bytes >> 20,
            limit = %self.limit.source,
            weights_mib = mib(ledger.weights_bytes),
            mapped = self.is_mapped,
            kv_mib = mib(ledger.kv_bytes),
            kv_blocks = ledger.blocks,
            workspace_mib = mib(ledger.workspace_bytes),
            reserve_mib = mib(ledger.reserve_bytes),
            "memory"
        );
    }
}

/// The table of the server's first lines.
impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ledger = &self.ledger;
        let tokens = u64::from(ledger.blocks) * u64::from(self.block_size_tokens);
        let replicas = if self.replicas == 1 { "1 replica".to_owned() } else { format!("{} replicas", self.replicas) };
        let kept = if self.is_sized_here { "taken as they are used" } else { "taken at the start" };
        let weights = if self.is_mapped { "packed, mapped from their file" } else { "packed, once for all replicas" };
        let rows = [
            ("weights", ledger.weights_bytes, weights.to_owned()),
            ("KV", ledger.kv_bytes, format!("{replicas} of {} blocks, {tokens} tokens; {kept}", ledger.blocks)),
            ("workspace", ledger.workspace_bytes, "passes, logits, sampling, books".to_owned()),
            ("reserve", ledger.reserve_bytes, "program, tokenizer, policies, prompts, streams".to_owned()),
        ];
        for (name, bytes, what) in rows {
            writeln!(f, "    {name:<9} {:>8} MiB  {what}", mib(bytes))?;
        }
        let limit = ledger.limit_bytes >> 20;
        write!(f, "    {:<9} {:>8} MiB  of {limit} MiB: {}", "together", mib(ledger.used_bytes()), self.limit.source)
    }
}

/// Mebibytes, rounded up.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// What is kept for everything that is neither model nor KV: the program, and what the configuration lets wait.
fn reserve(config: &Config, vocabulary: usize) -> u64 {
    let (http, replicas) = (&config.http, &config.replicas);
    // Those of running sequences; others have been read, or are about to be cut off.
    let streams = u64::from(replicas.slots) * u64::from(replicas.total());
    let stream_bytes = http.stream_buffer_bytes.saturating_add(http.send_buffer_bytes) as u64;
    let machines = 1 + u64::from(replicas.total());
    let journal_bytes = if config.journal.dir.is_some() { config.journal.queue_bytes as u64 } else { 0 };
    let parts = [
        BASE_BYTES,
        (vocabulary as u64).saturating_mul(VOCABULARY_TOKEN_BYTES),
        http.pending_bytes_max as u64,
        config.limits.queue_tokens_max.saturating_mul(QUEUED_TOKEN_BYTES),
        streams.saturating_mul(stream_bytes),
        machines.saturating_mul(config.decisions.inputs_bytes as u64),
        journal_bytes,
    ];
    parts.into_iter().fold(0, u64::saturating_add)
}

/// What the operator can do about it.
fn remedies(config: &Config, shortage: &Shortage) -> Vec<String> {
    let replicas = &config.replicas;
    let mut remedies = Vec::new();
    match *shortage {
        Shortage::Blocks { fitting_blocks, .. } => {
            remedies.push(format!("ask for fewer blocks (--kv-blocks {fitting_blocks}, or 0 for what fits)"));
        }
        Shortage::Context { fitting_blocks, .. } => {
            let tokens = u64::from(fitting_blocks) * u64::from(replicas.block_size_tokens);
            remedies.push(format!("serve shorter sequences (--context-tokens {tokens})"));
        }
        _ => {}
    }
    if !matches!(shortage, Shortage::Base { .. }) && replicas.kv_dtype != KvDtype::Int8 {
        remedies.push("hold keys and values in int8 (--kv-dtype int8)".to_owned());
    }
    if replicas.total() > 1 {
        remedies.push("use fewer replicas (--replicas)".to_owned());
    }
    remedies.push("serve a smaller model (--model)".to_owned());
    remedies.push("allow more memory (--memory-bytes, or the limit named)".to_owned());
    remedies
}

#[cfg(test)]
mod tests {
    use super::limit::Source;
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A model of 100 MiB whose blocks take a mebibyte, books included, and whose context is 100 blocks.
    fn settle(config: &Config, limit_mib: u64, source: Source) -> Result<Memory, TooLittle> {
        let demand = Demand {
            weights_bytes: 100 * MIB,
            threads_bytes: MIB,
            buffers_bytes: 20 * MIB,
            sequences_bytes: 5 * MIB,
            block_bytes: MIB - 300,
            context_blocks: 100,
        };
        let books = Books { block_bytes: 300, fixed_bytes: 3 * MIB };
        let limit = Limit { bytes: limit_mib * MIB, source };
        Memory::settle(config, limit, &Needs { demand, books, vocabulary: 65_536 })
    }

    fn config(change: impl FnOnce(&mut Config)) -> Config {
        let mut config = Config::default();
        config.replicas.slots = 8;
        change(&mut config);
        config
    }

    #[test]
    fn the_reserve_is_what_the_configuration_lets_wait() {
        // 128 for the program, 1 for 1,024 tokens, 64 of bodies, 5 of queued tokens, 8 streams of (256 + 128) KiB, two machines' inputs of 4.
        assert_eq!(reserve(&config(|_| ()), 1_024), (128 + 1 + 64 + 5 + 3 + 8) * MIB);
        let more = config(|config| {
            config.replicas.count = 3;
            config.journal.dir = Some("journal".into());
        });
        assert_eq!(reserve(&more, 65_536), (128 + 64 + 64 + 5 + 9 + 16 + 32) * MIB);
    }

    #[test]
    fn memory_of_ones_own_is_used_to_the_end_and_shared_memory_by_half() {
        // 1,000 - 100 - (1 + 20 + 5 + 2 + 3) - 272 = 597.
        let of = |limit_mib, source| settle(&config(|_| ()), limit_mib, source).map(|memory| memory.ledger);
        let own = of(1_000, Source::ControlGroup).unwrap();
        assert_eq!((own.blocks, own.workspace_bytes, own.left_bytes), (597, 31 * MIB, 0));
        assert_eq!(of(1_000, Source::Setting).unwrap(), own);
        assert_eq!(of(1_000, Source::Available).unwrap().blocks, 298);
        // A context may take more than half; eight sequences of a hundred blocks are the most that is of use.
        assert_eq!(of(553, Source::Available).unwrap().blocks, 100);
        assert_eq!(of(9_000, Source::Setting).unwrap().blocks, 800);
    }

    #[test]
    fn what_does_not_fit_is_told_with_what_helps() {
        let said =
            |config: &Config, limit_mib| settle(config, limit_mib, Source::ControlGroup).unwrap_err().to_string();
        let context = said(&config(|_| ()), 503 - 1);
        for part in
            ["100 blocks or 100 MiB", "99 blocks fit", "the control group's limit", "--context-tokens 1584", "int8"]
        {
            assert!(context.contains(part), "{part} is missing in: {context}");
        }
        let blocks = said(
            &config(|config| {
                config.replicas.kv_blocks = 400;
                config.replicas.count = 2;
                config.replicas.kv_dtype = KvDtype::Int8;
            }),
            1_000,
        );
        // 1,000 - 100 - (1 + 2 * 30) - (128 + 64 + 64 + 5 + 6 + 12) = 560 for two.
        for part in ["400 blocks take 400 MiB in each of 2 replicas", "280 blocks fit", "--kv-blocks 280", "--replicas"]
        {
            assert!(blocks.contains(part), "{part} is missing in: {blocks}");
        }
        assert!(!blocks.contains("--kv-dtype"), "they are held so already: {blocks}");
        let base = said(&config(|_| ()), 400);
        assert!(base.contains("400 MiB of memory are too few") && base.contains("--model"), "{base}");
    }

    #[test]
    fn the_table_adds_up() {
        let table = settle(&config(|_| ()), 1_000, Source::Available).unwrap().to_string();
        let expected = "    weights        100 MiB  packed, once for all replicas
    KV             298 MiB  1 replica of 298 blocks, 4768 tokens; taken as they are used
    workspace       31 MiB  passes, logits, sampling, books
    reserve        272 MiB  program, tokenizer, policies, prompts, streams
    together       701 MiB  of 1000 MiB: 80 % of what the machine has available";
        assert_eq!(table, expected);
    }
}
