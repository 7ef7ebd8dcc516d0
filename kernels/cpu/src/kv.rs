//! The KV pool: keys and values of all layers, in blocks of tokens, as bfloat16 or as scaled int8.
//!
//! # Layout
//! ```text
//! pool    [block][layer][kv head][group of 16 tokens] { keys, values, int8 alone: key scales, value scales }
//!
//! bfloat16
//! keys    [head_dim / 2][16 tokens][2]    two neighbouring dimensions of sixteen tokens: one load scores sixteen tokens
//! values  [8][head_dim][2]                two neighbouring tokens of each dimension
//!
//! int8, biased by 128 to an unsigned byte
//! keys    [head_dim / 4][16 tokens][4]    four neighbouring dimensions of sixteen tokens
//! values  [4][head_dim][4]                four neighbouring tokens of each dimension
//! scales  [16 tokens] f32                 of keys, and behind them of values
//! ```
//!
//! A block is one contiguous range over all layers, so that copying, moving or sending one is a single copy. The groups of two and four are
//! what dot-product instructions and AMX tiles consume.
//!
//! # int8
//! The keys of one head of one token share a scale, and so do its values: the largest magnitude over 127. A number is held as its quotient
//! by the scale, rounded to the nearest integer, ties to even. Magnitudes below 1e-30 count as zero. A head whose keys or values are not finite
//! has NaN for both scales, so that whatever sees the token is not finite either.

use std::fmt;
use std::sync::Arc;

use crate::activation::TINY;
use crate::half::f32_to_bf16;
use crate::lanes::LANES;
use crate::memory::{HugeBuffer, MemoryBudget, MemoryError};
use crate::pool::{Session, SharedMut, TaskPanicked};

/// Tokens that lie together inside a block.
pub const GROUP_TOKENS: usize = LANES;

/// How a pool holds keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum KvDtype {
    /// bfloat16: two bytes a number.
    #[default]
    Bf16,
    /// Eight bits a number, and a scale for the keys and one for the values of each head of a token.
    Int8,
}

impl KvDtype {
    /// Every way, the default first.
    pub const ALL: [KvDtype; 2] = [KvDtype::Bf16, KvDtype::Int8];

    /// Its name in configuration, reports and the identity of cached blocks.
    pub fn name(self) -> &'static str {
        match self {
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8 => "int8",
        }
    }

    /// Bytes of the keys and values of one head of one token.
    fn head_token_bytes(self, head_dim: usize) -> Option<usize> {
        match self {
            KvDtype::Bf16 => head_dim.checked_mul(2 * size_of::<u16>()),
            KvDtype::Int8 => head_dim.checked_mul(2)?.checked_add(2 * size_of::<f32>()),
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

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
    /// How numbers are held.
    pub dtype: KvDtype,
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
///
/// Others may hold the memory too ([`KvPool::memory`]), and read or write blocks that no step touches at that time: so nothing here makes a
/// slice over more than one block.
#[derive(Debug)]
pub struct KvPool {
    shape: KvShape,
    data: Arc<HugeBuffer>,
}

impl KvShape {
    /// Bytes of one group: keys, values and scales.
    pub(crate) fn group_bytes(&self) -> usize {
        GROUP_TOKENS * self.dtype.head_token_bytes(self.head_dim).expect("the pool's size was checked when it was made")
    }

    /// Bytes of one head in one block.
    fn head_bytes(&self) -> usize {
        self.block_tokens / GROUP_TOKENS * self.group_bytes()
    }

    /// Bytes of one token over all layers, or `None` when they overflow.
    pub fn token_bytes(&self) -> Option<usize> {
        let heads = self.layers.checked_mul(self.kv_heads)?;
        self.dtype.head_token_bytes(self.head_dim)?.checked_mul(heads)
    }

    /// Bytes of one block over all layers, or `None` when the shape is not legal.
    pub fn block_bytes(&self) -> Option<usize> {
        let legal = self.layers > 0
            && self.kv_heads > 0
            && self.head_dim > 0
            && self.head_dim.is_multiple_of(LANES)
            && self.block_tokens > 0
            && self.block_tokens.is_multiple_of(GROUP_TOKENS);
        self.token_bytes()?.checked_mul(self.block_tokens).filter(|_| legal)
    }
}

impl KvPool {
    /// A zeroed pool, resident from the start: no step pays for a first touch, and memory use does not creep.
    ///
    /// # Errors
    /// [`KvError`] when the shape is not legal or there is no memory.
    pub fn new(budget: &MemoryBudget, shape: KvShape) -> Result<Self, KvError> {
        let mut pool = Self::on_use(budget, shape)?;
        if let Some(data) = Arc::get_mut(&mut pool.data) {
            data.prefault();
        }
        Ok(pool)
    }

    /// As [`KvPool::new`], but a page becomes resident when its first token is stored, and stays so. Such a pool may be far larger than what is
    /// ever used of it.
    ///
    /// # Errors
    /// As for [`KvPool::new`].
    pub fn on_use(budget: &MemoryBudget, shape: KvShape) -> Result<Self, KvError> {
        Self::made(shape, |bytes| budget.allocate(bytes))
    }

    /// As [`KvPool::on_use`], in memory that other processes of the host can map, to read; resident from the start if it is to be.
    ///
    /// # Errors
    /// As for [`KvPool::new`].
    pub fn shared(budget: &MemoryBudget, shape: KvShape, is_resident: bool) -> Result<Self, KvError> {
        Self::made(shape, |bytes| {
            let mut data = budget.allocate_shared(bytes)?;
            if is_resident {
                data.prefault();
            }
            Ok(data)
        })
    }

    fn made(shape: KvShape, allocate: impl FnOnce(usize) -> Result<HugeBuffer, MemoryError>) -> Result<Self, KvError> {
        let bytes = shape.block_bytes().and_then(|bytes| bytes.checked_mul(shape.blocks));
        match bytes {
            Some(bytes) if bytes > 0 && u32::try_from(shape.blocks).is_ok() => {
                Ok(Self { shape, data: Arc::new(allocate(bytes)?) })
            }
            _ => Err(KvError::Shape(shape)),
        }
    }

    /// What the pool takes from its budget: its bytes in whole huge pages.
    pub fn mapped_bytes(shape: &KvShape) -> Option<u64> {
        let bytes = shape.block_bytes()?.checked_mul(shape.blocks)?;
        crate::memory::mapped_bytes(bytes).map(|bytes| bytes as u64)
    }

    /// The memory itself, blocks of [`KvShape::block_bytes`] side by side, for transports. A block that one of them touches must be in no
    /// step at that time.
    pub fn memory(&self) -> Arc<HugeBuffer> {
        Arc::clone(&self.data)
    }

    /// First byte of a block.
    fn block_ptr(&self, block: u32) -> *mut u8 {
        assert!((block as usize) < self.shape.blocks, "no block {block}");
        // SAFETY: the block lies inside the buffer.
        unsafe { self.data.base().as_ptr().add(block as usize * self.block_stride()) }
    }

    /// The pool's shape.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Byte at which one head of one layer begins in block `block`.
    fn head_start(&self, block: usize, layer: usize, kv_head: usize) -> usize {
        ((block * self.shape.layers + layer) * self.shape.kv_heads + kv_head) * self.shape.head_bytes()
    }

    /// Bytes of one block.
    pub(crate) fn block_stride(&self) -> usize {
        self.shape.layers * self.shape.kv_heads * self.shape.head_bytes()
    }

    /// First byte of a head in block 0; blocks are [`KvPool::block_stride`] apart.
    pub(crate) fn head_ptr(&self, layer: usize, kv_head: usize) -> *const u8 {
        assert!(layer < self.shape.layers && kv_head < self.shape.kv_heads, "no such layer or head");
        // SAFETY: the head lies inside block 0, which lies inside the buffer.
        unsafe { self.data.as_ptr().add(self.head_start(0, layer, kv_head)) }
    }

    /// The bytes of one block, all layers: what a transfer sends.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn block(&self, block: u32) -> &[u8] {
        // SAFETY: the block lies inside the buffer; the caller has it to itself, as for every access to a block.
        unsafe { std::slice::from_raw_parts(self.block_ptr(block), self.block_stride()) }
    }

    /// The bytes of one block, to be filled by a transfer.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn block_mut(&mut self, block: u32) -> &mut [u8] {
        // SAFETY: as in `block`; the exclusive borrow keeps other callers out.
        unsafe { std::slice::from_raw_parts_mut(self.block_ptr(block), self.block_stride()) }
    }

    /// Copies a block over another, all layers.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        // SAFETY: both blocks lie inside the buffer; they may be one and the same.
        unsafe { std::ptr::copy(self.block_ptr(from), self.block_ptr(to), self.block_stride()) }
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
        let data = SharedMut(self.data.base().as_ptr());
        let this = &*self;
        session.run_if_large(shape.kv_heads, slots.len() * width, |kv_head| {
            for (row, slot) in slots.iter().enumerate() {
                let row = &from.rows[row * from.stride..][..from.stride];
                let keys = &row[from.key_column + kv_head * shape.head_dim..][..shape.head_dim];
                let values = &row[from.value_column + kv_head * shape.head_dim..][..shape.head_dim];
                let (group, token) = (slot.offset as usize / GROUP_TOKENS, slot.offset as usize % GROUP_TOKENS);
                let start = this.head_start(slot.block as usize, layer, kv_head) + group * shape.group_bytes();
                // SAFETY: slot, layer and head were checked, so the group lies inside the buffer; one task alone writes a head's groups,
                // and the exclusive borrow of the pool keeps readers out.
                unsafe {
                    let group = data.get().add(start);
                    match shape.dtype {
                        KvDtype::Bf16 => store_bf16(group.cast(), token, keys, values),
                        KvDtype::Int8 => store_int8(group, token, keys, values),
                    }
                }
            }
        })
    }
}

/// Writes one token into its group of bfloat16 numbers.
///
/// # Safety
/// `group` must hold a whole group of `keys.len()` dimensions, aligned for u16, and no other thread may touch it.
unsafe fn store_bf16(group: *mut u16, token: usize, keys: &[f32], values: &[f32]) {
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

/// Writes one token into its group of bytes and scales.
///
/// # Safety
/// `group` must hold a whole group of `keys.len()` dimensions, aligned for f32, and no other thread may touch it.
unsafe fn store_int8(group: *mut u8, token: usize, keys: &[f32], values: &[f32]) {
    let head_dim = keys.len();
    let (mut key_scale, key_inverse) = scale_of(keys);
    let (mut value_scale, value_inverse) = scale_of(values);
    if key_scale.is_nan() || value_scale.is_nan() {
        // A score that is not a number has no weight: it is the value's scale that spoils the sum.
        (key_scale, value_scale) = (f32::NAN, f32::NAN);
    }
    // SAFETY: the offsets follow the module's layout and stay inside one group, for which the caller vouches.
    unsafe {
        let key = group.add(4 * token);
        for (i, four) in keys.chunks_exact(4).enumerate() {
            for (j, &x) in four.iter().enumerate() {
                key.add(i * 4 * GROUP_TOKENS + j).write(biased_byte(x * key_inverse));
            }
        }
        let value = group.add(GROUP_TOKENS * head_dim + token / 4 * 4 * head_dim + token % 4);
        for (i, &x) in values.iter().enumerate() {
            value.add(4 * i).write(biased_byte(x * value_inverse));
        }
        let scales = group.add(2 * GROUP_TOKENS * head_dim).cast::<f32>();
        scales.add(token).write(key_scale);
        scales.add(GROUP_TOKENS + token).write(value_scale);
    }
}

/// The scale of a head's numbers, and what they are multiplied by to become integers. The scale is NaN where a number is not finite.
fn scale_of(head: &[f32]) -> (f32, f32) {
    // Magnitudes are ordered like their bits, and what is not finite lies above them all.
    let largest = f32::from_bits(head.iter().fold(0, |largest, x| largest.max(x.abs().to_bits())));
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest > TINY {
        (largest / 127.0, 127.0 / largest)
    } else {
        (0.0, 0.0)
    }
}

/// `x`, whose magnitude is below 128, rounded to the nearest integer, ties to even, plus 128.
#[inline(always)]
fn biased_byte(x: f32) -> u8 {
    // Above 2^23 floats are whole numbers, and their low bits count them: the adder rounds, on every CPU alike.
    (x + 12_582_912.0).to_bits() as u8 ^ 0x80
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded_to_nearest_even() {
        let cases =
            [(0.0, 128), (0.5, 128), (1.5, 130), (2.5, 130), (-0.5, 128), (-1.5, 126), (126.51, 255), (-127.0, 1)];
        for (x, byte) in cases {
            assert_eq!(biased_byte(x), byte, "{x}");
        }
    }

    #[test]
    fn a_head_that_is_not_finite_has_no_scale() {
        assert_eq!(scale_of(&[0.0, -254.0, 1.0]), (2.0, 0.5));
        assert_eq!(scale_of(&[0.0, 1e-31]), (0.0, 0.0));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(scale_of(&[1.0, bad, 2.0]).0.is_nan());
        }
    }
}
