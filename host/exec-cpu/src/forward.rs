//! One pass of the decoder over the rows of a batch.
//!
//! Rows of all sequences, prefill and decode alike, stand one under the other; every product sees them as one matrix, and only attention
//! tells sequences apart. Long batches are split into passes: by row-invariance that changes memory and cache use, and no bit of a result.

use std::sync::Arc;

use penstock_kernels_cpu::kv::KvShape;
use penstock_kernels_cpu::norm::rms_norm_heads;
use penstock_kernels_cpu::rope::rope;
use penstock_kernels_cpu::{
    Activations, AttentionLayer, AttentionPlan, AttentionRun, HeadRows, KvDtype, KvPool, KvRows, KvSlot, PackedMatrix,
    Part, PlanRoom, RopePairs, RopeRow, Session, Store, TaskPanicked, attend, multiply,
};
use penstock_model::ModelConfig;

use crate::model::{CpuModel, LayerWeights, Numerics};

/// Most rows of one pass: enough to reach the products' full rate, few enough that what one product leaves for the next stays in a
/// second-level cache of 2 MB.
const PASS_ROWS_MAX: usize = 160;

/// Passes have a multiple of this many rows, but for the last: what the products take at once.
const PASS_GRAIN: usize = 8;

/// Rows of hidden states to keep for the output projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// None: a chunk in the middle of a prompt.
    None,
    /// The last row.
    Last,
    /// All rows (teacher forcing).
    All,
}

/// Consecutive tokens of one sequence, to be computed.
#[derive(Clone, Copy, Debug)]
pub struct SequenceRows<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// Position of the first one; everything before it is in the KV pool already.
    pub context: usize,
    /// The sequence's blocks, in order of position, long enough for the last token.
    pub table: &'a [u32],
    /// Which hidden states are wanted.
    pub keep: Keep,
}

/// The pass and its buffers. One a replica.
#[derive(Debug)]
pub struct Forward {
    model: Arc<CpuModel>,
    activations: Activations,
    plan: AttentionPlan,
    /// Rotation of each row, and its rotation in layers with a window where those differ.
    ropes: Vec<RopeRow>,
    window_ropes: Vec<RopeRow>,
    slots: Vec<KvSlot>,
    /// Residual stream.
    x: Vec<f32>,
    /// Normalised rows on their way into a product.
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attention: Vec<f32>,
    gate_up: Vec<f32>,
    feed_forward: Vec<f32>,
    /// What a block adds to the residual stream, where it is normalised first.
    added: Vec<f32>,
    /// Residual stream of the kept rows of the last batch.
    kept: Vec<f32>,
}

/// The most that one replica's batches hold: what decides how much memory their passes need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardRoom {
    /// Query tokens of a batch.
    pub batch_rows: usize,
    /// Hidden states kept of a batch.
    pub kept_rows: usize,
    /// Rows of logits at once.
    pub logit_rows: usize,
    /// Entries of a block table.
    pub table_blocks: usize,
}

impl ForwardRoom {
    /// Most rows of a pass.
    fn pass_rows_max(&self) -> usize {
        self.batch_rows.min(PASS_ROWS_MAX)
    }

    /// Rows of the largest product: a pass, or the output projection.
    fn product_rows(&self) -> usize {
        self.pass_rows_max().max(self.logit_rows)
    }

    fn plan(&self, config: &ModelConfig) -> PlanRoom {
        let rows = self.pass_rows_max();
        PlanRoom { rows, table_blocks: rows * self.table_blocks, heads: config.heads, kv_heads: config.kv_heads }
    }

    /// Bytes of [`Forward::with_room`] for a model of this shape.
    pub fn bytes(&self, config: &ModelConfig, numerics: Numerics) -> usize {
        let rows = self.pass_rows_max();
        let added = if config.post_norms { config.hidden } else { 0 };
        // x, qkv and the attention over it, both halves of the gate, what comes out of it.
        let widths = config.hidden + 2 * config.q_rows() + 2 * config.kv_rows() + 3 * config.feed_forward + added;
        let values = rows * widths + (self.product_rows() + self.kept_rows) * config.hidden;
        let ropes = if config.window_rope_frequencies().is_some() { 2 * rows } else { rows };
        values * size_of::<f32>()
            + Activations::room_bytes(numerics.precision, numerics.tier, self.product_rows(), longest_input(config))
            + self.plan(config).bytes()
            + ropes * RopeRow::bytes(config.head_dim)
            + rows * size_of::<KvSlot>()
    }
}

/// Inputs of the widest matrix.
fn longest_input(config: &ModelConfig) -> usize {
    config.hidden.max(config.q_rows()).max(config.feed_forward)
}

/// Part of a batch that fits one pass: consecutive tokens of one sequence.
struct PassRun<'a> {
    tokens: &'a [u32],
    context: usize,
    table: &'a [u32],
    first_row: usize,
    /// Rows to keep, counted inside the run.
    keep_from: usize,
}

impl Forward {
    /// Buffers for a model; they grow with the largest pass.
    pub fn new(model: Arc<CpuModel>) -> Self {
        let activations = Activations::new(model.precision);
        Self {
            model,
            activations,
            plan: AttentionPlan::new(),
            ropes: Vec::new(),
            window_ropes: Vec::new(),
            slots: Vec::new(),
            x: Vec::new(),
            normed: Vec::new(),
            qkv: Vec::new(),
            attention: Vec::new(),
            gate_up: Vec::new(),
            feed_forward: Vec::new(),
            added: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// As [`Forward::new`], with the memory for everything that `room` allows from the start: no pass within it takes more.
    pub fn with_room(model: Arc<CpuModel>, room: ForwardRoom) -> Self {
        let config = &model.config;
        let rows = room.pass_rows_max();
        let row = |width: usize| Vec::with_capacity(rows * width);
        let ropes = |rows: usize| (0..rows).map(|_| RopeRow::with_room(config.head_dim)).collect();
        Self {
            activations: Activations::with_room(
                model.precision,
                model.tier,
                room.product_rows(),
                longest_input(config),
            ),
            plan: AttentionPlan::with_room(room.plan(config)),
            ropes: ropes(rows),
            window_ropes: ropes(if model.window_rope_frequencies.is_some() { rows } else { 0 }),
            slots: Vec::with_capacity(rows),
            x: row(config.hidden),
            normed: Vec::with_capacity(room.product_rows() * config.hidden),
            qkv: row(config.q_rows() + 2 * config.kv_rows()),
            attention: row(config.q_rows()),
            gate_up: row(2 * config.feed_forward),
            feed_forward: row(config.feed_forward),
            added: row(if config.post_norms { config.hidden } else { 0 }),
            kept: Vec::with_capacity(room.kept_rows * config.hidden),
            model,
        }
    }

    /// The model.
    pub fn model(&self) -> &Arc<CpuModel> {
        &self.model
    }

    /// The shape of a KV pool for `model`, holding numbers as it was told to.
    pub fn kv_shape(model: &CpuModel, block_tokens: usize, blocks: usize) -> KvShape {
        Self::kv_shape_of(&model.config, model.kv_dtype, block_tokens, blocks)
    }

    /// The same for a model that is not loaded yet.
    pub(crate) fn kv_shape_of(config: &ModelConfig, dtype: KvDtype, block_tokens: usize, blocks: usize) -> KvShape {
        KvShape {
            layers: config.layers,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            block_tokens,
            blocks,
            dtype,
        }
    }

    /// Hidden states kept by the last [`Forward::run`].
    pub fn kept_rows(&self) -> usize {
        self.kept.len() / self.model.config.hidden
    }

    /// Computes all rows and writes their keys and values into `kv`. Kept hidden states stay until the next call.
    ///
    /// # Errors
    /// [`TaskPanicked`] when a kernel panicked; the contents of the blocks written to are then undefined.
    ///
    /// # Panics
    /// When a token is outside the vocabulary, or a table is too short or names a block outside the pool.
    pub fn run(&mut self, kv: &mut KvPool, batch: &[SequenceRows<'_>]) -> Result<(), TaskPanicked> {
        self.kept.clear();
        let all_rows = batch.iter().map(|sequence| sequence.tokens.len()).sum();
        if all_rows == 0 {
            return Ok(());
        }
        let pass_rows = pass_rows(all_rows);
        let model = Arc::clone(&self.model);
        let mut session = model.threads.enter();
        let mut pass: Vec<PassRun<'_>> = Vec::with_capacity(batch.len());
        let mut rows = 0;
        for sequence in batch {
            let keep_from = match sequence.keep {
                Keep::None => sequence.tokens.len(),
                Keep::Last => sequence.tokens.len().saturating_sub(1),
                Keep::All => 0,
            };
            let mut done = 0;
            while done < sequence.tokens.len() {
                if rows == pass_rows {
                    self.pass(&mut session, kv, &pass, rows)?;
                    pass.clear();
                    rows = 0;
                }
                let count = (sequence.tokens.len() - done).min(pass_rows - rows);
                pass.push(PassRun {
                    tokens: &sequence.tokens[done..done + count],
                    context: sequence.context + done,
                    table: sequence.table,
                    first_row: rows,
                    keep_from: keep_from.saturating_sub(done),
                });
                done += count;
                rows += count;
            }
        }
        if rows > 0 {
            self.pass(&mut session, kv, &pass, rows)?;
        }
        Ok(())
    }

    /// Logits of kept rows `first .. first + count` into `out`, one row of the vocabulary's length each.
    ///
    /// # Errors
    /// [`TaskPanicked`] when a kernel panicked.
    ///
    /// # Panics
    /// When the rows were not kept or `out` has another length.
    pub fn logits(&mut self, first: usize, count: usize, out: &mut [f32]) -> Result<(), TaskPanicked> {
        let model = Arc::clone(&self.model);
        let (hidden, vocab) = (model.config.hidden, model.config.vocab);
        assert_eq!(out.len(), count * vocab, "one row of logits each");
        let mut session = model.threads.enter();
        let x = &self.kept[first * hidden..][..count * hidden];
        self.normed.resize(count * hidden, 0.0);
        let (norm, eps) = (&model.output_norm, model.config.rms_eps);
        self.activations.norm_quantise(&mut session, model.tier, x, norm, eps, &mut self.normed)?;
        let parts = [Part { matrix: model.head(), column: 0 }];
        multiply(&mut session, model.tier, &self.activations, &parts, Store::Replace, out, vocab)
    }

    fn pass(
        &mut self,
        session: &mut Session<'_>,
        kv: &mut KvPool,
        runs: &[PassRun<'_>],
        rows: usize,
    ) -> Result<(), TaskPanicked> {
        let model = Arc::clone(&self.model);
        let config = &model.config;
        self.place(kv, runs);
        let attention_runs = runs.iter().map(|run| AttentionRun {
            first_row: run.first_row,
            rows: run.tokens.len(),
            context: run.context,
            table: run.table,
        });
        self.plan.set(kv, config.heads, model.tier, session.threads(), attention_runs);
        self.x.resize(rows * config.hidden, 0.0);
        self.normed.resize(rows * config.hidden, 0.0);
        self.qkv.resize(rows * (config.q_rows() + 2 * config.kv_rows()), 0.0);
        self.attention.resize(rows * config.q_rows(), 0.0);
        self.gate_up.resize(rows * 2 * config.feed_forward, 0.0);
        self.feed_forward.resize(rows * config.feed_forward, 0.0);
        self.added.resize(if config.post_norms { rows * config.hidden } else { 0 }, 0.0);
        let tokens: Vec<u32> = runs.iter().flat_map(|run| run.tokens.iter().copied()).collect();
        session.rows(&mut self.x, config.hidden, |row, x| {
            model.embedding.dequantise_row(tokens[row] as usize, x);
            if config.embedding_scale != 1.0 {
                x.iter_mut().for_each(|value| *value *= config.embedding_scale);
            }
        })?;
        for (index, layer) in model.layers.iter().enumerate() {
            self.attention_block(session, kv, index, layer)?;
            self.feed_forward_block(session, layer)?;
        }
        for run in runs {
            let keep = run.first_row + run.keep_from.min(run.tokens.len())..run.first_row + run.tokens.len();
            self.kept.extend_from_slice(&self.x[keep.start * config.hidden..keep.end * config.hidden]);
        }
        Ok(())
    }

    /// Finds each row's slot in the pool and its rotation.
    fn place(&mut self, kv: &KvPool, runs: &[PassRun<'_>]) {
        let block_tokens = kv.shape().block_tokens;
        self.slots.clear();
        for run in runs {
            for position in run.context..run.context + run.tokens.len() {
                let row = self.slots.len();
                let offset = (position % block_tokens) as u32;
                self.slots.push(KvSlot { block: run.table[position / block_tokens], offset });
                let pairs = self.model.rope_pairs;
                set_rope(&mut self.ropes, row, pairs, &self.model.rope_frequencies, position);
                if let Some(frequencies) = &self.model.window_rope_frequencies {
                    set_rope(&mut self.window_ropes, row, pairs, frequencies, position);
                }
            }
        }
    }

    /// x += output(attention(rope(q), rope(k), v)) of norm(x).
    fn attention_block(
        &mut self,
        session: &mut Session<'_>,
        kv: &mut KvPool,
        index: usize,
        layer: &LayerWeights,
    ) -> Result<(), TaskPanicked> {
        let model = &*self.model;
        let (config, tier) = (&model.config, model.tier);
        let (q, k) = (config.q_rows(), config.kv_rows());
        let stride = q + 2 * k;
        self.activations.norm_quantise(session, tier, &self.x, &layer.attn_norm, config.rms_eps, &mut self.normed)?;
        let parts = [
            Part { matrix: &layer.q, column: 0 },
            Part { matrix: &layer.k, column: q },
            Part { matrix: &layer.v, column: q + k },
        ];
        multiply(session, tier, &self.activations, &parts, Store::Replace, &mut self.qkv, stride)?;
        let has_own_ropes = layer.window.is_some() && model.window_rope_frequencies.is_some();
        let ropes = if has_own_ropes { &self.window_ropes } else { &self.ropes };
        session.rows(&mut self.qkv, stride, |row, heads| {
            if let Some(bias) = &layer.qkv_bias {
                add(heads, bias);
            }
            if let Some([of_q, of_k]) = &layer.qk_norm {
                rms_norm_heads(tier, &mut heads[..q], of_q, config.rms_eps);
                rms_norm_heads(tier, &mut heads[q..q + k], of_k, config.rms_eps);
            }
            // Keys stand right behind queries: all their heads turn together.
            rope(tier, model.rope_pairs, &ropes[row], &mut heads[..q + k]);
        })?;
        kv.store(session, index, &self.slots, KvRows { rows: &self.qkv, stride, key_column: q, value_column: q + k })?;
        let attention = AttentionLayer { index, scale: config.attention_scale, window: layer.window };
        let queries = HeadRows { data: self.qkv.as_slice(), stride, column: 0 };
        let results = HeadRows { data: self.attention.as_mut_slice(), stride: q, column: 0 };
        attend(session, &self.plan, kv, attention, queries, results)?;
        self.activations.quantise(session, tier, &mut self.attention, q)?;
        self.join(session, &layer.attn_output, layer.attn_post_norm.as_deref(), layer.attn_output_bias.as_deref())
    }

    /// x += down(activation(gate) * up) of norm(x).
    fn feed_forward_block(&mut self, session: &mut Session<'_>, layer: &LayerWeights) -> Result<(), TaskPanicked> {
        let model = &*self.model;
        let (config, tier) = (&model.config, model.tier);
        let width = config.feed_forward;
        self.activations.norm_quantise(session, tier, &self.x, &layer.ffn_norm, config.rms_eps, &mut self.normed)?;
        let parts = [Part { matrix: &layer.gate, column: 0 }, Part { matrix: &layer.up, column: width }];
        multiply(session, tier, &self.activations, &parts, Store::Replace, &mut self.gate_up, 2 * width)?;
        self.activations.gated_quantise(session, tier, model.gate, &self.gate_up, width, &mut self.feed_forward)?;
        self.join(session, &layer.down, layer.ffn_post_norm.as_deref(), None)
    }

    /// x += norm(matrix * activations + bias), each only where the model has it.
    fn join(
        &mut self,
        session: &mut Session<'_>,
        matrix: &PackedMatrix,
        post_norm: Option<&[f32]>,
        bias: Option<&[f32]>,
    ) -> Result<(), TaskPanicked> {
        let model = &*self.model;
        let (tier, hidden, eps) = (model.tier, model.config.hidden, model.config.rms_eps);
        let parts = [Part { matrix, column: 0 }];
        let Some(weight) = post_norm else {
            multiply(session, tier, &self.activations, &parts, Store::Add, &mut self.x, hidden)?;
            return match bias {
                None => Ok(()),
                Some(bias) => session.rows(&mut self.x, hidden, |_, x| add(x, bias)),
            };
        };
        multiply(session, tier, &self.activations, &parts, Store::Replace, &mut self.added, hidden)?;
        session.rows(&mut self.added, hidden, |_, row| {
            if let Some(bias) = bias {
                add(row, bias);
            }
            rms_norm_heads(tier, row, weight, eps);
        })?;
        let added = &self.added;
        session.rows(&mut self.x, hidden, |row, x| add(x, &added[row * hidden..][..hidden]))
    }
}

/// Rows of each pass over a batch of `rows`: as few passes as may be, of about equal length, for a short last one would read all weights for
/// little.
fn pass_rows(rows: usize) -> usize {
    let passes = rows.div_ceil(PASS_ROWS_MAX).max(1);
    rows.div_ceil(passes).next_multiple_of(PASS_GRAIN)
}

/// Fills place `row` of a growing list of rotations.
fn set_rope(ropes: &mut Vec<RopeRow>, row: usize, pairs: RopePairs, frequencies: &[f64], position: usize) {
    if ropes.len() == row {
        ropes.push(RopeRow::default());
    }
    ropes[row].set(pairs, frequencies, position as u64);
}

/// `to += values`, value by value: one rounding each, so in any order and width the same bits.
fn add(to: &mut [f32], values: &[f32]) {
    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
}

#[cfg(test)]
mod tests {
    use super::pass_rows;

    #[test]
    fn passes_are_few_and_about_equal() {
        for (rows, each) in [(1, 8), (128, 128), (144, 144), (160, 160), (161, 88), (320, 160), (512, 128), (530, 136)]
        {
            assert_eq!(pass_rows(rows), each, "{rows} rows");
        }
    }
}
