//! Weights by role: which bytes are the Q projection of layer 7?

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;

use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::error::ModelError;

/// What a tensor is for, independent of how a file names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorRole {
    /// `[vocab x hidden]`: one row a token.
    TokenEmbedding,
    /// `[1 x hidden]`: norm before the output projection.
    OutputNorm,
    /// `[vocab x hidden]`: the output projection. With a tied head this resolves to the token embedding.
    Output,
    /// A tensor of one layer.
    Layer {
        /// Layer, from 0.
        index: usize,
        /// Which of its tensors.
        part: LayerPart,
    },
}

impl TensorRole {
    /// Shorthand for a layer's tensor.
    pub const fn layer(index: usize, part: LayerPart) -> Self {
        Self::Layer { index, part }
    }
}

/// The tensors a layer may have. Matrices are `[out x in]`, vectors `[1 x n]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerPart {
    /// Norm before attention, `[1 x hidden]`.
    AttnNorm,
    /// Query projection, `[q_rows x hidden]`, rows in the order of [`crate::RopeLayout`].
    AttnQ,
    /// Key projection, `[kv_rows x hidden]`, rows in the order of [`crate::RopeLayout`].
    AttnK,
    /// Value projection, `[kv_rows x hidden]`.
    AttnV,
    /// Query bias, `[1 x q_rows]`, where the configuration has biases.
    AttnQBias,
    /// Key bias, `[1 x kv_rows]`.
    AttnKBias,
    /// Value bias, `[1 x kv_rows]`.
    AttnVBias,
    /// Per-head query norm, `[1 x head_dim]`, where the configuration has QK norm.
    AttnQNorm,
    /// Per-head key norm, `[1 x head_dim]`.
    AttnKNorm,
    /// Attention output projection, `[hidden x q_rows]`.
    AttnOutput,
    /// Its bias, `[1 x hidden]`, where the configuration has one.
    AttnOutputBias,
    /// Norm of attention's output, `[1 x hidden]`, where the configuration has post norms.
    AttnPostNorm,
    /// Norm before the feed-forward block, `[1 x hidden]`.
    FfnNorm,
    /// Gate projection, `[feed_forward x hidden]`.
    FfnGate,
    /// Up projection, `[feed_forward x hidden]`.
    FfnUp,
    /// Down projection, `[hidden x feed_forward]`.
    FfnDown,
    /// Norm of the feed-forward block's output, `[1 x hidden]`, where the configuration has post norms.
    FfnPostNorm,
}

impl LayerPart {
    /// Every part, in storage order of the index.
    pub const ALL: [LayerPart; 17] = [
        Self::AttnNorm,
        Self::AttnQ,
        Self::AttnK,
        Self::AttnV,
        Self::AttnQBias,
        Self::AttnKBias,
        Self::AttnVBias,
        Self::AttnQNorm,
        Self::AttnKNorm,
        Self::AttnOutput,
        Self::AttnOutputBias,
        Self::AttnPostNorm,
        Self::FfnNorm,
        Self::FfnGate,
        Self::FfnUp,
        Self::FfnDown,
        Self::FfnPostNorm,
    ];

    /// Rows and columns that a configuration implies; `None` when its layers do not have this part.
    pub fn shape(self, config: &ModelConfig) -> Option<(usize, usize)> {
        let (hidden, ff, q, kv) = (config.hidden, config.feed_forward, config.q_rows(), config.kv_rows());
        match self {
            Self::AttnNorm | Self::FfnNorm => Some((1, hidden)),
            Self::AttnQ => Some((q, hidden)),
            Self::AttnK | Self::AttnV => Some((kv, hidden)),
            Self::AttnQBias => config.qkv_bias.then_some((1, q)),
            Self::AttnKBias | Self::AttnVBias => config.qkv_bias.then_some((1, kv)),
            Self::AttnQNorm | Self::AttnKNorm => config.qk_norm.then_some((1, config.head_dim)),
            Self::AttnOutput => Some((hidden, q)),
            Self::AttnOutputBias => config.attn_output_bias.then_some((1, hidden)),
            Self::AttnPostNorm | Self::FfnPostNorm => config.post_norms.then_some((1, hidden)),
            Self::FfnGate | Self::FfnUp => Some((ff, hidden)),
            Self::FfnDown => Some((hidden, ff)),
        }
    }
}

/// One tensor, borrowed from the mapped file. Row r is `bytes[r * row_bytes .. (r + 1) * row_bytes]`; no alignment is promised.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Storage type.
    pub dtype: DType,
    /// Output features; 1 for a vector.
    pub rows: usize,
    /// Input features, the contiguous direction; the length of a vector.
    pub cols: usize,
    /// All rows.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.bytes.len() / self.rows
    }

    /// One stored row. Panics when `row` is out of range, as indexing does.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let size = self.row_bytes();
        &self.bytes[row * size..(row + 1) * size]
    }

    /// All values as f32, row by row, by the scalar reference. For norms, biases and tests.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (row, values) in out.chunks_exact_mut(self.cols).enumerate() {
            crate::dtype::dequantise_row(self.dtype, self.row(row), values)
                .expect("the loader checked the tensor's size");
        }
        out
    }
}

/// Where one tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub name: String,
    pub file: usize,
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub bytes: Range<usize>,
}

/// A source of tensors by role: how a file format names and finds them.
pub(crate) trait TensorSource {
    /// The file's name for a role.
    fn name_of(&self, role: TensorRole) -> String;
    /// The tensor of that name; `Ok(None)` when the file lacks it.
    fn find(&self, name: &str) -> Result<Option<Placed>, ModelError>;
    /// Every name in the file.
    fn names(&self) -> Vec<&str>;
    /// Whether a tensor may be left out although it has no role.
    fn is_ignored(&self, name: &str) -> bool;
}

/// Refuses tensors that no role of this configuration names.
fn refuse_strangers(source: &dyn TensorSource, config: &ModelConfig) -> Result<(), ModelError> {
    let layers = (0..config.layers).flat_map(|index| {
        let parts = LayerPart::ALL.into_iter().filter(|part| part.shape(config).is_some());
        parts.map(move |part| TensorRole::Layer { index, part })
    });
    // A tied head may be stored a second time.
    let roles = [TensorRole::TokenEmbedding, TensorRole::OutputNorm, TensorRole::Output].into_iter().chain(layers);
    let known: HashSet<String> = roles.map(|role| source.name_of(role)).collect();
    let strangers = source.names().into_iter().filter(|name| !known.contains(*name) && !source.is_ignored(name));
    match strangers.min() {
        None => Ok(()),
        Some(name) => {
            Err(ModelError::TensorUnknown { name: name.to_owned(), architecture: config.architecture.name() })
        }
    }
}

/// All tensors of a model, mapped. Cheap to share behind an `Arc`; every view borrows from it.
#[derive(Debug)]
pub struct Weights {
    files: Vec<Arc<Mmap>>,
    embedding: Placed,
    output_norm: Placed,
    output: Option<Placed>,
    layers: Vec<Vec<Option<Placed>>>,
}

impl Weights {
    /// Finds every tensor that the configuration implies and checks its shape. A tensor without a role is refused: the model that it
    /// belongs to computes something else.
    pub(crate) fn collect(
        source: &dyn TensorSource,
        files: Vec<Arc<Mmap>>,
        config: &ModelConfig,
    ) -> Result<Self, ModelError> {
        let get = |role: TensorRole, (rows, cols): (usize, usize)| -> Result<Placed, ModelError> {
            let name = source.name_of(role);
            let placed = source.find(&name)?.ok_or(ModelError::TensorMissing { name: name.clone() })?;
            if (placed.rows, placed.cols) != (rows, cols) {
                return Err(ModelError::TensorShape {
                    name,
                    rows: placed.rows,
                    cols: placed.cols,
                    want_rows: rows,
                    want_cols: cols,
                });
            }
            Ok(placed)
        };
        let table = (config.vocab, config.hidden);
        let embedding = get(TensorRole::TokenEmbedding, table)?;
        let output_norm = get(TensorRole::OutputNorm, (1, config.hidden))?;
        let output = if config.tied_head { None } else { Some(get(TensorRole::Output, table)?) };
        let layer = |index: usize| -> Result<Vec<Option<Placed>>, ModelError> {
            LayerPart::ALL
                .iter()
                .map(|&part| part.shape(config).map(|shape| get(TensorRole::Layer { index, part }, shape)).transpose())
                .collect()
        };
        let layers = (0..config.layers).map(layer).collect::<Result<Vec<_>, _>>()?;
        refuse_strangers(source, config)?;
        Ok(Self { files, embedding, output_norm, output, layers })
    }

    fn placed(&self, role: TensorRole) -> Option<&Placed> {
        match role {
            TensorRole::TokenEmbedding => Some(&self.embedding),
            TensorRole::OutputNorm => Some(&self.output_norm),
            TensorRole::Output => Some(self.output.as_ref().unwrap_or(&self.embedding)),
            TensorRole::Layer { index, part } => self.layers.get(index)?.get(part as usize)?.as_ref(),
        }
    }

    /// The tensor of a role; `None` for a layer out of range or a part that this model does not have.
    pub fn get(&self, role: TensorRole) -> Option<TensorView<'_>> {
        let placed = self.placed(role)?;
        let bytes = &self.files[placed.file][placed.bytes.clone()];
        Some(TensorView { dtype: placed.dtype, rows: placed.rows, cols: placed.cols, bytes })
    }

    /// The tensor of a role, or a typed error that names it.
    pub fn tensor(&self, role: TensorRole) -> Result<TensorView<'_>, ModelError> {
        self.get(role).ok_or_else(|| ModelError::TensorMissing { name: format!("{role:?}") })
    }

    /// The name a role has in the file, for messages.
    pub fn name(&self, role: TensorRole) -> Option<&str> {
        self.placed(role).map(|placed| placed.name.as_str())
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of all tensors in use.
    pub fn bytes(&self) -> u64 {
        let layers = self.layers.iter().flatten().flatten();
        let all = layers.chain([&self.embedding, &self.output_norm]).chain(&self.output);
        all.map(|placed| placed.bytes.len() as u64).sum()
    }

    /// Storage types in use, ascending, without repeats: part of the model's identity and of logs.
    pub fn dtypes(&self) -> Vec<DType> {
        let layers = self.layers.iter().flatten().flatten();
        let all = layers.chain([&self.embedding, &self.output_norm]).chain(&self.output);
        let mut out: Vec<DType> = all.map(|placed| placed.dtype).collect();
        out.sort_unstable();
        out.dedup();
        out
    }
}
