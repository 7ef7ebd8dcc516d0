//! What fits into how much memory, and what is it for?
//!
//! ```text
//! limit = weights + KV + workspace + reserve + left
//! ```
//! Arithmetic alone, and total: whatever the numbers, the answer is a ledger that adds up or a [`Shortage`] that says what is missing.

use penstock_base::limits::POOL_BLOCKS_MAX;

/// How many blocks a replica's pool is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// So many.
    Exactly(u32),
    /// As many as fit into a share of what is left for KV, never more than could be used, and at least those of one sequence at context length:
    /// for them the whole of what is left may serve.
    WhatFits {
        /// The share; 100 is all.
        percent: u32,
        /// More than this no sequences could ever use at once.
        useful: u32,
    },
}

/// What is to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claims {
    /// Memory that the process may use.
    pub limit_bytes: u64,
    /// Weights, once for all replicas.
    pub weights_bytes: u64,
    /// Workspace that all replicas share.
    pub shared_bytes: u64,
    /// Workspace of each replica.
    pub workspace_bytes: u64,
    /// Everything else that the process holds.
    pub reserve_bytes: u64,
    /// Replicas; none counts as one.
    pub replicas: u32,
    /// Each block's keys, values and books.
    pub block_bytes: u64,
    /// Blocks of a sequence as long as the context.
    pub context_blocks: u32,
    /// Blocks wanted for each replica.
    pub blocks: Blocks,
}

/// Where the memory goes. The parts and what is left add up to the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ledger {
    /// Memory that the process may use.
    pub limit_bytes: u64,
    /// Weights.
    pub weights_bytes: u64,
    /// KV of all replicas.
    pub kv_bytes: u64,
    /// Workspace of all replicas.
    pub workspace_bytes: u64,
    /// Everything else.
    pub reserve_bytes: u64,
    /// Nobody's.
    pub left_bytes: u64,
    /// Blocks of each replica.
    pub blocks: u32,
}

/// What does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Shortage {
    /// There is no room for KV at all.
    #[error(
        "{} MiB of memory are too few: weights take {}, workspace {} and the reserve {}, which leaves {} for keys and values",
        whole_mib(*.limit_bytes), mib(*.weights_bytes), mib(*.workspace_bytes), mib(*.reserve_bytes), whole_mib(*.kv_bytes)
    )]
    Base {
        /// The limit.
        limit_bytes: u64,
        /// Weights.
        weights_bytes: u64,
        /// Workspace of all replicas.
        workspace_bytes: u64,
        /// The reserve.
        reserve_bytes: u64,
        /// What is left, which may be nothing.
        kv_bytes: u64,
    },
    /// One sequence at context length does not fit.
    #[error(
        "one sequence as long as the context takes {context_blocks} blocks or {} MiB in each of {replicas} replicas, and {fitting_blocks} blocks fit: of {} MiB, {} are left for keys and values",
        mib(*.context_bytes), whole_mib(*.limit_bytes), whole_mib(*.kv_bytes)
    )]
    Context {
        /// Blocks of that sequence.
        context_blocks: u32,
        /// Their bytes.
        context_bytes: u64,
        /// Replicas.
        replicas: u32,
        /// Blocks that fit in each.
        fitting_blocks: u32,
        /// What is left for KV, of all replicas.
        kv_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The number of blocks that is asked for does not fit.
    #[error(
        "{wanted_blocks} blocks take {} MiB in each of {replicas} replicas, and {fitting_blocks} blocks fit: of {} MiB, {} are left for keys and values",
        mib(*.wanted_bytes), whole_mib(*.limit_bytes), whole_mib(*.kv_bytes)
    )]
    Blocks {
        /// Blocks asked for.
        wanted_blocks: u32,
        /// Their bytes.
        wanted_bytes: u64,
        /// Replicas.
        replicas: u32,
        /// Blocks that fit in each.
        fitting_blocks: u32,
        /// What is left for KV, of all replicas.
        kv_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
}

/// Fewest blocks of a pool that anything runs in.
const BLOCKS_MIN: u32 = 2;

/// What is taken, in mebibytes rounded up: nothing that takes memory is shown as nothing.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// What there is, in whole mebibytes.
fn whole_mib(bytes: u64) -> u64 {
    bytes >> 20
}

impl Ledger {
    /// Fits the claims together.
    ///
    /// # Errors
    /// [`Shortage`] with the figures.
    pub fn settle(claims: &Claims) -> Result<Self, Shortage> {
        let replicas = claims.replicas.max(1);
        let block_bytes = claims.block_bytes.max(1);
        let workspace_bytes =
            claims.workspace_bytes.saturating_mul(u64::from(replicas)).saturating_add(claims.shared_bytes);
        let taken = claims.weights_bytes.saturating_add(workspace_bytes).saturating_add(claims.reserve_bytes);
        let kv_bytes = claims.limit_bytes.saturating_sub(taken);
        let fitting = (kv_bytes / u64::from(replicas) / block_bytes).min(u64::from(POOL_BLOCKS_MAX)) as u32;
        let of_blocks = |blocks: u32| u64::from(blocks).saturating_mul(block_bytes);
        if fitting < BLOCKS_MIN {
            return Err(Shortage::Base {
                limit_bytes: claims.limit_bytes,
                weights_bytes: claims.weights_bytes,
                workspace_bytes,
                reserve_bytes: claims.reserve_bytes,
                kv_bytes,
            });
        }
        let blocks = match claims.blocks {
            Blocks::Exactly(wanted) if wanted > fitting => {
                return Err(Shortage::Blocks {
                    wanted_blocks: wanted,
                    wanted_bytes: of_blocks(wanted),
                    replicas,
                    fitting_blocks: fitting,
                    kv_bytes,
                    limit_bytes: claims.limit_bytes,
                });
            }
            Blocks::Exactly(wanted) => wanted,
            Blocks::WhatFits { percent, useful } => {
                let least = claims.context_blocks.clamp(BLOCKS_MIN, POOL_BLOCKS_MAX);
                if least > fitting {
                    return Err(Shortage::Context {
                        context_blocks: least,
                        context_bytes: of_blocks(least),
                        replicas,
                        fitting_blocks: fitting,
                        kv_bytes,
                        limit_bytes: claims.limit_bytes,
                    });
                }
                let share = (u64::from(fitting) * u64::from(percent.min(100)) / 100) as u32;
                share.min(useful).max(least)
            }
        };
        // It fits: no more than `fitting` blocks were taken, whose bytes were divided from these.
        let kv = of_blocks(blocks).saturating_mul(u64::from(replicas));
        Ok(Self {
            limit_bytes: claims.limit_bytes,
            weights_bytes: claims.weights_bytes,
            kv_bytes: kv,
            workspace_bytes,
            reserve_bytes: claims.reserve_bytes,
            left_bytes: kv_bytes - kv,
            blocks,
        })
    }

    /// Weights, KV, workspace and reserve together.
    pub fn used_bytes(&self) -> u64 {
        self.limit_bytes - self.left_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const ALL: Blocks = Blocks::WhatFits { percent: 100, useful: u32::MAX };

    /// The worked example of an 8B model of 36 layers with 8 KV heads of 128 on a card of 24 GiB: 147,456 bytes a token in bfloat16, 2 GiB of
    /// workspace and 1 GiB of margin.
    fn qwen3_8b() -> Claims {
        Claims {
            limit_bytes: 24 * GIB,
            weights_bytes: 16_000_000_000,
            shared_bytes: 0,
            workspace_bytes: 2 * GIB,
            reserve_bytes: GIB,
            replicas: 1,
            block_bytes: 16 * 147_456,
            context_blocks: 8_192 / 16,
            blocks: ALL,
        }
    }

    #[test]
    fn five_sequences_of_8192_tokens_fit_the_worked_example() {
        let ledger = Ledger::settle(&qwen3_8b()).unwrap();
        // 25,769,803,776 - 16,000,000,000 - 2,147,483,648 - 1,073,741,824 = 6,548,578,304, which is 6.099 GiB; a block is 2,359,296.
        assert_eq!(ledger.blocks, 2_775);
        assert_eq!(ledger.kv_bytes, 6_547_046_400);
        assert_eq!(ledger.left_bytes, 1_531_904);
        assert_eq!(ledger.blocks / 512, 5);
        assert_eq!(Ledger::settle(&Claims { context_blocks: 1_024, ..qwen3_8b() }).unwrap().blocks / 1_024, 2);
    }

    #[test]
    fn replicas_share_weights_and_divide_the_rest() {
        let claims = Claims {
            limit_bytes: 1_000,
            weights_bytes: 300,
            shared_bytes: 10,
            workspace_bytes: 40,
            reserve_bytes: 100,
            replicas: 3,
            block_bytes: 7,
            context_blocks: 2,
            blocks: ALL,
        };
        // 1,000 - 300 - (10 + 3 * 40) - 100 = 470; a third is 156, which holds 22 blocks of 7.
        let ledger = Ledger::settle(&claims).unwrap();
        let expected = Ledger {
            limit_bytes: 1_000,
            weights_bytes: 300,
            kv_bytes: 3 * 154,
            workspace_bytes: 130,
            reserve_bytes: 100,
            left_bytes: 8,
            blocks: 22,
        };
        assert_eq!(ledger, expected);
        assert_eq!(ledger.used_bytes(), 992);
    }

    #[test]
    fn what_fits_is_a_share_that_one_context_may_exceed_and_use_bounds() {
        let of = |percent, useful, context_blocks| {
            let blocks = Blocks::WhatFits { percent, useful };
            Ledger::settle(&Claims { blocks, context_blocks, ..qwen3_8b() }).map(|ledger| ledger.blocks)
        };
        assert_eq!(of(50, u32::MAX, 512), Ok(1_387));
        assert_eq!(of(50, 1_000, 512), Ok(1_000));
        assert_eq!(of(50, u32::MAX, 2_775), Ok(2_775));
        assert_eq!(of(0, u32::MAX, 0), Ok(2));
        assert_eq!(of(200, u32::MAX, 512), Ok(2_775));
        let shortage = of(100, u32::MAX, 2_776).unwrap_err();
        assert!(matches!(shortage, Shortage::Context { context_blocks: 2_776, fitting_blocks: 2_775, .. }));
        let said = shortage.to_string();
        // 2,776 * 2.25 MiB.
        assert!(said.contains("2776 blocks or 6246 MiB") && said.contains("of 24576 MiB, 6245 are left"), "{said}");
    }

    #[test]
    fn a_number_is_taken_as_it_is_or_refused_with_what_would_fit() {
        let of = |wanted| Ledger::settle(&Claims { blocks: Blocks::Exactly(wanted), ..qwen3_8b() });
        // Less than a context is the caller's choice.
        assert_eq!(of(100).unwrap().kv_bytes, 235_929_600);
        assert_eq!(of(2_775).unwrap().left_bytes, 1_531_904);
        let said = of(2_776).unwrap_err().to_string();
        assert!(said.starts_with("2776 blocks take 6246 MiB in each of 1 replicas, and 2775 blocks fit"), "{said}");
    }

    #[test]
    fn weights_alone_may_be_too_much() {
        let shortage = Ledger::settle(&Claims { limit_bytes: 16 * GIB, ..qwen3_8b() }).unwrap_err();
        assert!(matches!(shortage, Shortage::Base { kv_bytes: 0, .. }));
        let said = shortage.to_string();
        // 16,000,000,000 bytes are 15,258.8 MiB.
        assert!(said.contains("16384 MiB of memory are too few: weights take 15259, workspace 2048"), "{said}");
    }

    #[test]
    fn no_number_breaks_it() {
        let extremes = [0, 1, u64::MAX];
        let counts = [0, 1, u32::MAX];
        for limit_bytes in extremes {
            for of_each in extremes {
                for count in counts {
                    for blocks in [Blocks::Exactly(count), Blocks::WhatFits { percent: count, useful: count }] {
                        let claims = Claims {
                            limit_bytes,
                            weights_bytes: of_each,
                            shared_bytes: of_each,
                            workspace_bytes: of_each,
                            reserve_bytes: of_each,
                            replicas: count,
                            block_bytes: of_each,
                            context_blocks: count,
                            blocks,
                        };
                        match Ledger::settle(&claims) {
                            Ok(ledger) => {
                                let Ledger { weights_bytes, kv_bytes, workspace_bytes, reserve_bytes, .. } = ledger;
                                let parts =
                                    [weights_bytes, kv_bytes, workspace_bytes, reserve_bytes, ledger.left_bytes];
                                assert_eq!(parts.into_iter().map(u128::from).sum::<u128>(), u128::from(limit_bytes));
                                assert!(ledger.blocks <= POOL_BLOCKS_MAX);
                            }
                            Err(shortage) => assert!(!shortage.to_string().is_empty()),
                        }
                    }
                }
            }
        }
    }
}
