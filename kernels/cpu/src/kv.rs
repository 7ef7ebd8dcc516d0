//! The KV pool: bfloat16 keys and values of all layers, in blocks of tokens.
//!
//! # Layout
//! ```text
//! pool    [block][layer][kv head][group of 16 tokens] { keys, values }
//! keys    [head_dim / 2][16 tokens][2]    two neighbouring dimensions of sixteen tokens: one load scores sixteen tokens
//! values  [8][head_dim][2]                two neighbouring tokens of each dimension
//! ```
//!
//! A block is one contiguous range over all layers, so that copying, moving or sending one is a single copy. The pairs are what bfloat16
//! dot-product instructions and AMX tiles consume.

use std::fmt;

use crate::half::f32_to_bf16;
use crate::lanes::LANES;
use crate::memory::{HugeBuffer, MemoryBudget, MemoryError};
use crate::pool::{Session, SharedMut, TaskPanicked};

/// Tokens that lie together inside a block.
pub const GROUP_TOKENS: usize = LANES;

/// The shape of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Key-value heads per layer.
    pub kv_heads: usize,
    /// Values per head; a multiple of 16.
    pub head_dim: usize,
    /// Tokens per block; a multiple of 16.
    pub block_tokens: usize,
    /// Blocks in the pool.
    pub blocks: usize,
}

/// Why a pool could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvError {
    /// A dimension is 0, not a multiple of 16 where it must be, or the size overflows.
    Shape(KvShape),
    /// No memory.
    Memory(MemoryError),
}

impl fmt::Display for KvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvError::Shape(shape) => {
                write!(f, "no kv pool of this shape (head_dim and block_tokens must be multiples of 16): {shape:?}")
            }
            KvError::Memory(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for KvError {}

impl From<MemoryError> for KvError {
    fn from(error: MemoryError) -> Self {
        KvError::Memory(error)
    }
}

/// Where one token's keys and values go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSlot {
    /// Block in the pool.
    pub block: u32,
    /// Token inside the block.
    pub offset: u32,
}

/// Where keys and values of a batch of rows are read from: row r begins at `r * stride` of `rows`.
#[derive(Clone, Copy, Debug)]
pub struct KvRows<'a> {
    /// Rows that hold all heads' keys and values, among other things.
    pub rows: &'a [f32],
    /// Distance between two rows.
    pub stride: usize,
    /// Column of the first key.
    pub key_column: usize,
    /// Column of the first value.
    pub value_column: usize,
}

/// Keys and values of one replica.
#[derive(Debug)]
pub struct KvPool {
    shape: KvShape,
    data: HugeBuffer,
}

impl KvShape {
    /// bfloat16 numbers of one group: keys and values.
    pub(crate) fn group_len(&self) -> usize {
        2 * GROUP_TOKENS * self.head_dim
    }

    /// bfloat16 numbers of one head in one block.
    pub(crate) fn head_len(&self) -> usize {
        self.block_tokens / GROUP_TOKENS * self.group_len()
    }

    /// bfloat16 numbers of one block.
    fn block_len(&self) -> usize {
        self.layers * self.kv_heads * self.head_len()
    }

    /// Bytes of one block over all layers, or `None` when the shape is not legal.
    pub fn block_bytes(&self) -> Option<usize> {
        let legal = self.layers > 0
            && self.kv_heads > 0
            && self.head_dim > 0
            && self.head_dim.is_multiple_of(LANES)
            && self.block_tokens > 0
            && self.block_tokens.is_multiple_of(GROUP_TOKENS);
        let heads = self.layers.checked_mul(self.kv_heads)?;
        let values = self.head_dim.checked_mul(self.block_tokens)?.checked_mul(heads)?;
        values.checked_mul(4).filter(|_| legal)
    }
}

impl KvPool {
    /// A zeroed pool, resident from the start.
    ///
    /// # Errors
    /// [`KvError`] when the shape is not legal or there is no memory.
    pub fn new(budget: &MemoryBudget, shape: KvShape) -> Result<Self, KvError> {
        let bytes = shape.block_bytes().and_then(|bytes| bytes.checked_mul(shape.blocks));
        match bytes {
            Some(bytes) if bytes > 0 && u32::try_from(shape.blocks).is_ok() => {
                let mut data = budget.allocate(bytes)?;
                data.prefault();
                Ok(Self { shape, data })
            }
            _ => Err(KvError::Shape(shape)),
        }
    }

    /// The pool's shape.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Where one head of one layer begins in block `block`.
    fn head_start(&self, block: usize, layer: usize, kv_head: usize) -> usize {
        ((block * self.shape.layers + layer) * self.shape.kv_heads + kv_head) * self.shape.head_len()
    }

    /// First number of a head in block 0, and the distance between blocks.
    pub(crate) fn head_ptr(&self, layer: usize, kv_head: usize) -> (*const u16, usize) {
        assert!(layer < self.shape.layers && kv_head < self.shape.kv_heads, "no such layer or head");
        let start = self.head_start(0, layer, kv_head);
        // SAFETY: the head lies inside block 0, which lies inside the buffer; the buffer is aligned far beyond u16.
        let start = unsafe { self.data.as_ptr().cast::<u16>().add(start) };
        (start, self.shape.block_len())
    }

    /// The bytes of one block, all layers: what a transfer sends.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn block(&self, block: u32) -> &[u8] {
        let bytes = self.shape.block_len() * 2;
        &self.data[block as usize * bytes..][..bytes]
    }

    /// The bytes of one block, to be filled by a transfer.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn block_mut(&mut self, block: u32) -> &mut [u8] {
        let bytes = self.shape.block_len() * 2;
        &mut self.data[block as usize * bytes..][..bytes]
    }

    /// Copies a block over another, all layers.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        let bytes = self.shape.block_len() * 2;
        assert!((to as usize) < self.shape.blocks, "no block {to}");
        self.data.copy_within(from as usize * bytes..(from as usize + 1) * bytes, to as usize * bytes);
    }

    /// Rounds and writes the keys and values of one layer, one slot a row.
    ///
    /// # Errors
    /// [`TaskPanicked`] when a task panicked.
    ///
    /// # Panics
    /// When a slot lies outside the pool, or the rows are too short.
    pub fn store(
        &mut self,
        session: &mut Session<'_>,
        layer: usize,
        slots: &[KvSlot],
        from: KvRows<'_>,
    ) -> Result<(), TaskPanicked> {
        let shape = self.shape;
        let width = shape.kv_heads * shape.head_dim;
        assert!(layer < shape.layers, "no layer {layer}");
        assert!(from.key_column + width <= from.stride && from.value_column + width <= from.stride, "rows too short");
        assert!(from.rows.len() >= slots.len() * from.stride, "too few rows");
        for slot in slots {
            let inside = (slot.block as usize) < shape.blocks && (slot.offset as usize) < shape.block_tokens;
            assert!(inside, "slot {slot:?} is outside the pool");
        }
        let data = SharedMut(self.data.as_mut_ptr().cast::<u16>());
        let this = &*self;
        session.run_if_large(shape.kv_heads, slots.len() * width, |kv_head| {
            for (row, slot) in slots.iter().enumerate() {
                let row = &from.rows[row * from.stride..][..from.stride];
                let keys = &row[from.key_column + kv_head * shape.head_dim..][..shape.head_dim];
                let values = &row[from.value_column + kv_head * shape.head_dim..][..shape.head_dim];
                let (group, token) = (slot.offset as usize / GROUP_TOKENS, slot.offset as usize % GROUP_TOKENS);
                let start = this.head_start(slot.block as usize, layer, kv_head) + group * shape.group_len();
                // SAFETY: slot, layer and head were checked, so the group lies inside the buffer; one task alone writes a head's groups,
                // and the exclusive borrow of the pool keeps readers out.
                unsafe { store_token(data.get().add(start), token, keys, values) };
            }
        })
    }
}

/// Writes one token into its group.
///
/// # Safety
/// `group` must hold a whole group of `keys.len()` dimensions, and no other thread may touch it.
unsafe fn store_token(group: *mut u16, token: usize, keys: &[f32], values: &[f32]) {
    let head_dim = keys.len();
    // SAFETY: the offsets follow the module's layout and stay inside one group, for which the caller vouches.
    unsafe {
        let key = group.add(2 * token).cast::<[u16; 2]>();
        for (i, pair) in keys.chunks_exact(2).enumerate() {
            key.add(i * GROUP_TOKENS).write([f32_to_bf16(pair[0]), f32_to_bf16(pair[1])]);
        }
        let value = group.add(GROUP_TOKENS * head_dim + token / 2 * 2 * head_dim + token % 2);
        for (i, &v) in values.iter().enumerate() {
            value.add(2 * i).write(f32_to_bf16(v));
        }
    }
}
