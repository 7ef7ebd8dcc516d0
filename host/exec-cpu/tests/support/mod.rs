//! What the executor tests share: a seeded stream of numbers, and a small random model with a plain f64 twin.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::collections::HashMap;
use std::sync::{Arc, Once};

use penstock_exec_cpu::{CpuModel, MemoryBudget, Numerics, ThreadPool, Tier};
use penstock_model::gguf::quantise::quantise;
use penstock_model::weights::{LayerPart, TensorRole, TensorView};
use penstock_model::{Activation, Architecture, DType, ModelConfig, RopeLayout, RopeScaling, dequantise_row};

/// SplitMix64.
pub struct Noise(pub u64);

impl Noise {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn tokens(&mut self, len: usize, vocabulary: usize) -> Vec<u32> {
        (0..len).map(|_| self.below(vocabulary) as u32).collect()
    }

    pub fn shuffled(&mut self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

/// A random Llama, small enough for the scalar oracle.
pub struct TinyModel {
    pub config: ModelConfig,
    tensors: HashMap<TensorRole, (usize, usize, Vec<f32>, Vec<u8>)>,
    /// Storage of each matrix; what is not named is F32.
    dtypes: HashMap<TensorRole, DType>,
}

impl TinyModel {
    pub fn new(rope_layout: RopeLayout, tied_head: bool) -> Self {
        let config = ModelConfig {
            architecture: Architecture::Llama,
            layers: 2,
            hidden: 64,
            feed_forward: 96,
            heads: 6,
            kv_heads: 2,
            head_dim: 32,
            rope_dims: 32,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::None,
            rope_layout,
            rms_eps: 1e-5,
            context_length: 512,
            vocab: 203,
            attention_scale: 1.0 / 32f32.sqrt(),
            embedding_scale: 1.0,
            norm_offset: 0.0,
            activation: Activation::Silu,
            post_norms: false,
            qkv_bias: false,
            attn_output_bias: false,
            qk_norm: false,
            tied_head,
            sliding_window: None,
        };
        Self::with_config(config)
    }

    /// As [`TinyModel::new`], wide enough for super-blocks, matrices stored as `dtype` says. The reference reads what is stored.
    pub fn stored(tied_head: bool, dtype: impl Fn(TensorRole) -> DType) -> Self {
        let narrow = Self::new(RopeLayout::Interleaved, tied_head).config;
        Self::of(ModelConfig { hidden: 256, feed_forward: 256, heads: 8, ..narrow }, dtype)
    }

    /// A model of any shape, every matrix in F32.
    pub fn with_config(config: ModelConfig) -> Self {
        Self::of(config, |_| DType::F32)
    }

    fn of(config: ModelConfig, dtype: impl Fn(TensorRole) -> DType) -> Self {
        config.validate().expect("a legal shape");
        let (vocab, hidden, tied_head) = (config.vocab, config.hidden, config.tied_head);
        let mut this = Self { config, tensors: HashMap::new(), dtypes: HashMap::new() };
        let mut noise = Noise(77);
        this.add(TensorRole::TokenEmbedding, vocab, hidden, 1.0, &mut noise, &dtype);
        this.add(TensorRole::OutputNorm, 1, hidden, 1.0, &mut noise, &dtype);
        if !tied_head {
            this.add(TensorRole::Output, vocab, hidden, 0.4, &mut noise, &dtype);
        }
        for index in 0..this.config.layers {
            for part in LayerPart::ALL {
                if let Some((rows, cols)) = part.shape(&this.config) {
                    // Weights of this size keep activations of order one.
                    let size = if rows == 1 { 1.0 } else { 1.7 / (cols as f32).sqrt() };
                    this.add(TensorRole::layer(index, part), rows, cols, size, &mut noise, &dtype);
                }
            }
        }
        this
    }

    fn add(
        &mut self,
        role: TensorRole,
        rows: usize,
        cols: usize,
        size: f32,
        noise: &mut Noise,
        dtype: impl Fn(TensorRole) -> DType,
    ) {
        let drawn: Vec<f32> = (0..rows * cols).map(|_| noise.value() * size).collect();
        let dtype = if rows == 1 { DType::F32 } else { dtype(role) };
        let bytes = quantise(dtype, &drawn);
        let mut values = vec![0f32; rows * cols];
        dequantise_row(dtype, &bytes, &mut values).expect("whole blocks");
        self.dtypes.insert(role, dtype);
        self.tensors.insert(role, (rows, cols, values, bytes));
    }

    pub fn view(&self, role: TensorRole) -> Option<TensorView<'_>> {
        let (rows, cols, _, bytes) = self.tensors.get(&role)?;
        Some(TensorView { dtype: self.dtypes[&role], rows: *rows, cols: *cols, bytes })
    }

    pub fn load(&self, threads: usize, tier: Tier) -> Arc<CpuModel> {
        self.load_with(threads, Numerics { tier, ..Numerics::default() })
    }

    pub fn load_with(&self, threads: usize, numerics: Numerics) -> Arc<CpuModel> {
        let threads = Arc::new(ThreadPool::new(threads).expect("threads start"));
        let budget = MemoryBudget::new(1 << 30);
        Arc::new(
            CpuModel::from_tensors(&self.config, |role| self.view(role), threads, &budget, numerics).expect("loads"),
        )
    }

    fn times(&self, role: TensorRole, x: &[f64]) -> Vec<f64> {
        let (_, cols, values, _) = &self.tensors[&role];
        values.chunks(*cols).map(|row| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()).collect()
    }

    fn norm(&self, role: TensorRole, x: &[f64]) -> Vec<f64> {
        let scale =
            1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + f64::from(self.config.rms_eps)).sqrt();
        x.iter().zip(&self.tensors[&role].2).map(|(x, &w)| x * scale * f64::from(w)).collect()
    }

    fn rotate(&self, heads: &mut [f64], position: usize) {
        let dim = self.config.head_dim;
        for head in heads.chunks_mut(dim) {
            for i in 0..dim / 2 {
                let (a, b) = match self.config.rope_layout {
                    RopeLayout::Interleaved => (2 * i, 2 * i + 1),
                    RopeLayout::Halves => (i, i + dim / 2),
                };
                let angle = position as f64 / f64::from(self.config.rope_theta).powf(2.0 * i as f64 / dim as f64);
                let (x, y) = (head[a], head[b]);
                head[a] = x * angle.cos() - y * angle.sin();
                head[b] = x * angle.sin() + y * angle.cos();
            }
        }
    }

    /// Logits at every position, in f64, as the architecture's definition reads.
    pub fn reference(&self, tokens: &[u32]) -> Vec<Vec<f64>> {
        let c = &self.config;
        let embedding = &self.tensors[&TensorRole::TokenEmbedding].2;
        let mut x: Vec<Vec<f64>> = tokens
            .iter()
            .map(|&t| embedding[t as usize * c.hidden..][..c.hidden].iter().map(|&v| f64::from(v)).collect())
            .collect();
        for layer in 0..c.layers {
            let of = |part| TensorRole::layer(layer, part);
            let (mut keys, mut values): (Vec<Vec<f64>>, Vec<Vec<f64>>) = (Vec::new(), Vec::new());
            for (position, x) in x.iter_mut().enumerate() {
                let normed = self.norm(of(LayerPart::AttnNorm), x);
                let mut query = self.times(of(LayerPart::AttnQ), &normed);
                let mut key = self.times(of(LayerPart::AttnK), &normed);
                self.rotate(&mut query, position);
                self.rotate(&mut key, position);
                keys.push(key);
                values.push(self.times(of(LayerPart::AttnV), &normed));
                let mut mixed = vec![0f64; c.q_rows()];
                for head in 0..c.heads {
                    let column = head / (c.heads / c.kv_heads) * c.head_dim;
                    let query = &query[head * c.head_dim..][..c.head_dim];
                    let weight = |key: &Vec<f64>| {
                        let dot: f64 = query.iter().zip(&key[column..]).map(|(q, k)| q * k).sum();
                        (dot / (c.head_dim as f64).sqrt()).exp()
                    };
                    let weights: Vec<f64> = keys.iter().map(weight).collect();
                    let sum: f64 = weights.iter().sum();
                    for d in 0..c.head_dim {
                        mixed[head * c.head_dim + d] =
                            weights.iter().zip(&values).map(|(w, v)| w * v[column + d]).sum::<f64>() / sum;
                    }
                }
                for (x, y) in x.iter_mut().zip(self.times(of(LayerPart::AttnOutput), &mixed)) {
                    *x += y;
                }
                let normed = self.norm(of(LayerPart::FfnNorm), x);
                let gate = self.times(of(LayerPart::FfnGate), &normed);
                let up = self.times(of(LayerPart::FfnUp), &normed);
                let gated: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                for (x, y) in x.iter_mut().zip(self.times(of(LayerPart::FfnDown), &gated)) {
                    *x += y;
                }
            }
        }
        let head = if c.tied_head { TensorRole::TokenEmbedding } else { TensorRole::Output };
        x.iter().map(|x| self.times(head, &self.norm(TensorRole::OutputNorm, x))).collect()
    }
}

/// Every tier that this machine can run, the oracle first. Those of its architecture that it cannot are named aloud, once in a test binary.
pub fn tiers() -> Vec<Tier> {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let is_foreign = |tier: Tier| (tier == Tier::Neon) != cfg!(target_arch = "aarch64");
        let missing: Vec<&str> = Tier::ALL[1..]
            .iter()
            .filter(|tier| !tier.is_supported() && !is_foreign(**tier))
            .map(|tier| tier.name())
            .collect();
        if !missing.is_empty() {
            eprintln!("SKIPPED tiers that this CPU lacks: {}", missing.join(", "));
        }
    });
    Tier::ALL.into_iter().filter(|tier| tier.is_supported()).collect()
}

/// The fastest tier, or `None`, said aloud, on a machine that has the oracle alone.
pub fn fast_tier() -> Option<Tier> {
    let tier = Tier::detect();
    if tier == Tier::Scalar {
        eprintln!("SKIPPED fast tiers: this CPU has none of their instructions");
        return None;
    }
    Some(tier)
}
