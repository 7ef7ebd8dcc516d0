//! AMX: tile registers and the instructions on them, for x86-64 Linux on stable Rust.
//!
//! A thread may touch a tile only after three things: the CPU and the system have AMX ([`is_supported`]), the process has asked the system
//! for the room that tiles need in its saved state (done once, inside [`is_supported`]), and the thread has told the CPU the shapes of its
//! eight tiles ([`Tiles::configure`]). The last returns a guard, whose end gives the tiles back: a thread that holds tiles costs eight KiB
//! more at each switch.
//!
//! The compiler knows nothing of tiles: it neither uses nor saves them. So their contents live on from one function here to the next, as
//! long as the guard does. Every function that writes a tile says so to the compiler all the same.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Rows a tile can have, and 4-byte groups a row can have.
pub const SIDE: usize = 16;

/// Whether this process can use AMX tiles with int8 and bfloat16 products: the CPU has them, and the system saves them and gave permission.
pub fn is_supported() -> bool {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    *SUPPORTED.get_or_init(|| cpu_has_tiles() && system_saves_tiles() && system_permits_tiles())
}

/// The CPU's word: tiles, int8 and bfloat16 products.
fn cpu_has_tiles() -> bool {
    const BF16_TILE_INT8: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    // CPUID is there on every x86-64; the leaf is asked for only where it exists.
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BF16_TILE_INT8 == BF16_TILE_INT8
}

/// Whether the system has switched on the saving of tile state (XCR0 bits 17 and 18).
fn system_saves_tiles() -> bool {
    const OS_XSAVE: u32 = 1 << 27;
    const TILE_STATE: u32 = 0b11 << 17;
    if __cpuid(1).ecx & OS_XSAVE == 0 {
        return false;
    }
    let low: u32;
    // SAFETY: the system has enabled the instruction, as bit 27 above says; it reads a register.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack, preserves_flags)) };
    low & TILE_STATE == TILE_STATE
}

/// Asks Linux for permission to use tile data; it holds for all threads of the process.
fn system_permits_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes nothing but the permission.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// Shapes of the eight tiles, in the form the CPU reads (palette 1).
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct TileShapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileShapes {
    /// Eight tiles, each of so many rows (1..=16) of so many bytes (a multiple of 4, 4..=64).
    ///
    /// # Panics
    /// When a shape is outside these ranges.
    pub const fn new(shapes: [(usize, usize); 8]) -> Self {
        let mut all = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut tile = 0;
        while tile < 8 {
            let (rows, bytes) = shapes[tile];
            assert!(rows >= 1 && rows <= SIDE, "a tile has 1 to 16 rows");
            assert!(bytes >= 4 && bytes <= 64 && bytes.is_multiple_of(4), "a tile's row has 4 to 64 bytes, in fours");
            all.rows[tile] = rows as u8;
            all.row_bytes[tile] = bytes as u16;
            tile += 1;
        }
        all
    }
}

/// This thread's right to use its tiles, in the shapes it asked for. All tiles are zero at the start.
#[derive(Debug)]
pub struct Tiles {
    /// Tile state belongs to a thread.
    not_send: PhantomData<*const ()>,
}

impl Tiles {
    /// Sets the shapes of this thread's tiles. A thread holds one guard at a time: the end of a second one would take the first one's tiles.
    ///
    /// # Panics
    /// Where AMX is not supported.
    pub fn configure(shapes: &TileShapes) -> Self {
        assert!(is_supported(), "AMX is not supported here");
        // SAFETY: AMX is there and permitted, and the shapes are valid by construction. The operand is an address and the block is assumed
        // to read memory, so the compiler has written the shapes before.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) shapes, out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _, options(nostack, preserves_flags, readonly));
        }
        Self { not_send: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the guard was made where AMX is supported.
        unsafe {
            asm!("tilerelease", out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _, options(nostack, nomem, preserves_flags));
        }
    }
}

/// Fills tile `T` from memory: row `i` begins at `from + i * stride` bytes.
///
/// # Safety
/// A [`Tiles`] guard of this thread is alive, `T` is below 8, and all rows of the tile's shape are readable.
#[inline(always)]
pub unsafe fn load<const T: usize>(from: *const u8, stride: usize) {
    // SAFETY: the contract is passed on.
    unsafe {
        asm!("tileloadd tmm{tile}, [{from} + {stride}]", tile = const T, from = in(reg) from, stride = in(reg) stride,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
            out("tmm7") _, options(nostack, preserves_flags, readonly));
    }
}

/// Writes tile `T` to memory: row `i` begins at `to + i * stride` bytes.
///
/// # Safety
/// As [`load`], with writable rows.
#[inline(always)]
pub unsafe fn store<const T: usize>(to: *mut u8, stride: usize) {
    // SAFETY: the contract is passed on.
    unsafe {
        asm!("tilestored [{to} + {stride}], tmm{tile}", tile = const T, to = in(reg) to, stride = in(reg) stride,
            options(nostack, preserves_flags));
    }
}

/// Sets tile `T` to zero.
///
/// # Safety
/// A [`Tiles`] guard of this thread is alive and `T` is below 8.
#[inline(always)]
pub unsafe fn zero<const T: usize>() {
    // SAFETY: the contract is passed on.
    unsafe {
        asm!("tilezero tmm{tile}", tile = const T, out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _, options(nostack, nomem, preserves_flags));
    }
}

macro_rules! products {
    ($($(#[$meta:meta])* $name:ident = $instruction:literal;)*) => {$(
        $(#[$meta])*
        ///
        /// Row `i` of `C` gains, in column `j`, the sum over `g` of the products of group `g` of row `i` of `A` and group `j` of row `g` of `B`.
        ///
        /// # Safety
        /// A [`Tiles`] guard of this thread is alive; `C`, `A` and `B` are distinct and below 8; their shapes fit each other: `C` has the
        /// rows of `A` and the row bytes of `B`, and `A` has four bytes in a row for each row of `B`.
        #[inline(always)]
        pub unsafe fn $name<const C: usize, const A: usize, const B: usize>() {
            // SAFETY: the contract is passed on.
            unsafe {
                asm!(concat!($instruction, " tmm{c}, tmm{a}, tmm{b}"), c = const C, a = const A, b = const B,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                    out("tmm6") _, out("tmm7") _, options(nostack, nomem, preserves_flags));
            }
        }
    )*};
}

products! {
    /// Products of signed bytes by signed bytes, added to i32.
    dot_signed_signed = "tdpbssd";
    /// Products of signed bytes by unsigned bytes, added to i32.
    dot_signed_unsigned = "tdpbsud";
    /// Products of unsigned bytes by signed bytes, added to i32.
    dot_unsigned_signed = "tdpbusd";
    /// Products of unsigned bytes by unsigned bytes, added to i32.
    dot_unsigned_unsigned = "tdpbuud";
    /// Products of bfloat16 pairs, added to f32: even products and odd products in two sums that are rounded after each addition and
    /// joined at the end, subnormal numbers taken as zero. Not the order of a plain sum.
    dot_bf16 = "tdpbf16ps";
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether to go on; says so aloud where not.
    fn supported() -> bool {
        if !is_supported() {
            eprintln!("SKIPPED tier amx: this CPU or system lacks it");
        }
        is_supported()
    }

    /// 3 rows of 8 bytes by 2 rows of five groups, both as bytes that mean other numbers when signed.
    fn sources() -> ([u8; 24], [u8; 40]) {
        (std::array::from_fn(|i| (i * 37 + 100) as u8), std::array::from_fn(|i| (i * 91 + 7) as u8))
    }

    /// The definition, with `a` and `b` widened by the caller's reading of a byte.
    fn wanted(a: impl Fn(u8) -> i32, b: impl Fn(u8) -> i32) -> Vec<i32> {
        let (left, right) = sources();
        let mut out = Vec::new();
        for row in 0..3 {
            for column in 0..5 {
                let sum = (0..8).map(|k| a(left[row * 8 + k]) * b(right[k / 4 * 20 + column * 4 + k % 4])).sum::<i32>();
                out.push(sum + 1000);
            }
        }
        out
    }

    /// The sum of tile 0 after `product::<0, 1, 2>`.
    fn got(product: unsafe fn()) -> Vec<i32> {
        const SHAPES: TileShapes = TileShapes::new([(3, 20), (3, 8), (2, 20), (1, 4), (1, 4), (1, 4), (1, 4), (1, 4)]);
        let (left, right) = sources();
        let mut sums = [1000i32; 15];
        let guard = Tiles::configure(&SHAPES);
        // SAFETY: the guard is alive and the three arrays have the shapes of the tiles.
        unsafe {
            load::<0>(sums.as_ptr().cast(), 20);
            load::<1>(left.as_ptr(), 8);
            load::<2>(right.as_ptr(), 20);
            product();
            store::<0>(sums.as_mut_ptr().cast(), 20);
        }
        drop(guard);
        sums.to_vec()
    }

    #[test]
    fn integer_products_are_those_of_their_definition() {
        if !supported() {
            return;
        }
        let (signed, unsigned) = (|x: u8| i32::from(x as i8), |x: u8| i32::from(x));
        assert_eq!(got(dot_signed_signed::<0, 1, 2>), wanted(signed, signed));
        assert_eq!(got(dot_signed_unsigned::<0, 1, 2>), wanted(signed, unsigned));
        assert_eq!(got(dot_unsigned_signed::<0, 1, 2>), wanted(unsigned, signed));
        assert_eq!(got(dot_unsigned_unsigned::<0, 1, 2>), wanted(unsigned, unsigned));
    }

    #[test]
    fn bfloat16_products_of_small_integers_are_exact() {
        if !supported() {
            return;
        }
        const SHAPES: TileShapes = TileShapes::new([(2, 8), (2, 8), (2, 8), (1, 4), (1, 4), (1, 4), (1, 4), (1, 4)]);
        let bf16 = |x: f32| (x.to_bits() >> 16) as u16;
        let a = [1.0, 2.0, 3.0, 4.0, -5.0, 6.0, 7.0, 8.0].map(bf16);
        // Two columns of four: 1, -1, 2, 0 and 3, 5, -2, 1, as pairs.
        let b = [1.0, -1.0, 3.0, 5.0, 2.0, 0.0, -2.0, 1.0].map(bf16);
        let mut c = [7.0f32; 4];
        let guard = Tiles::configure(&SHAPES);
        // SAFETY: the guard is alive and the three arrays have the shapes of the tiles.
        unsafe {
            load::<1>(a.as_ptr().cast(), 8);
            load::<2>(b.as_ptr().cast(), 8);
            zero::<0>();
            dot_bf16::<0, 1, 2>();
            store::<0>(c.as_mut_ptr().cast(), 8);
        }
        drop(guard);
        assert_eq!(c, [5.0, 11.0, 3.0, 9.0]);
    }

    #[test]
    fn threads_have_tiles_of_their_own() {
        if !supported() {
            return;
        }
        const SHAPES: TileShapes = TileShapes::new([(1, 4); 8]);
        std::thread::scope(|scope| {
            for seed in 0..4u32 {
                scope.spawn(move || {
                    let guard = Tiles::configure(&SHAPES);
                    let mut back = 0u32;
                    // SAFETY: the guard is alive; a tile is one number.
                    unsafe {
                        load::<7>((&raw const seed).cast(), 4);
                        std::thread::yield_now();
                        store::<7>((&raw mut back).cast(), 4);
                    }
                    drop(guard);
                    assert_eq!(back, seed);
                });
            }
        });
    }
}
