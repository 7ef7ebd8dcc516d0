//! How do messages and inputs become bytes? Little-endian, in the order of the declarations, a number for each variant.
//!
//! [`Encode`] and [`Decode`] are written field by field with two small macros, so that a new field or variant is a compile error here,
//! where its place in the format is decided. Effects can only be written: a replay compares them and never carries them out.

mod answer;
mod effect;
mod gateway;
mod handoff;
mod ids;
mod message;
mod plan;
mod replica;
mod seated;

use std::sync::Arc;

use penstock_base::Manifest;
use penstock_base::codec::{DecodeError, Reader, Writer};

pub use answer::{AnswerHead, AnswerRecord, Given, KeptAnswer, ObserveFault};
pub use seated::{Declarations, SavedSeat, Seated};

/// Can be written.
pub trait Encode {
    /// Appends the value.
    fn put(&self, out: &mut Writer);
}

/// Can be read back.
pub trait Decode: Sized {
    /// Reads what [`Encode::put`] wrote.
    ///
    /// # Errors
    /// Bytes that end early, or that no value is written as.
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

/// A struct is its fields, in this order.
macro_rules! record {
    ($($ty:ty { $($field:ident),* $(,)? })*) => { $(
        impl $crate::wire::Encode for $ty {
            fn put(&self, out: &mut penstock_base::codec::Writer) {
                $(self.$field.put(out);)*
            }
        }
        impl $crate::wire::Decode for $ty {
            fn take(from: &mut penstock_base::codec::Reader<'_>) -> Result<Self, penstock_base::codec::DecodeError> {
                Ok(Self { $($field: $crate::wire::Decode::take(from)?),* })
            }
        }
    )* };
}

/// An enum is one byte for the variant, then the variant's parts.
macro_rules! choice {
    ($ty:ty, $what:literal { $($tag:literal => $variant:ident $(($($part:ident),*))? $({$($field:ident),* $(,)?})?),* $(,)? }) => {
        choice!(write only $ty { $($tag => $variant $(($($part),*))? $({$($field),*})?),* });
        impl $crate::wire::Decode for $ty {
            fn take(from: &mut penstock_base::codec::Reader<'_>) -> Result<Self, penstock_base::codec::DecodeError> {
                Ok(match from.u8()? {
                    $($tag => {
                        $($(let $part = $crate::wire::Decode::take(from)?;)*)?
                        $($(let $field = $crate::wire::Decode::take(from)?;)*)?
                        Self::$variant $(($($part),*))? $({$($field),*})?
                    })*
                    _ => return Err(penstock_base::codec::DecodeError::Invalid($what)),
                })
            }
        }
    };
    (write only $ty:ty { $($tag:literal => $variant:ident $(($($part:ident),*))? $({$($field:ident),* $(,)?})?),* $(,)? }) => {
        impl $crate::wire::Encode for $ty {
            fn put(&self, out: &mut penstock_base::codec::Writer) {
                match self {
                    $(Self::$variant $(($($part),*))? $({$($field),*})? => {
                        out.u8($tag);
                        $($($part.put(out);)*)?
                        $($($field.put(out);)*)?
                    })*
                }
            }
        }
    };
}

pub(crate) use {choice, record};

macro_rules! plain {
    ($($ty:ty: $method:ident),* $(,)?) => { $(
        impl Encode for $ty {
            fn put(&self, out: &mut Writer) {
                out.$method(*self);
            }
        }
        impl Decode for $ty {
            fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
                from.$method()
            }
        }
    )* };
}

plain! { u8: u8, bool: bool, u16: u16, u32: u32, u64: u64 }

impl Encode for usize {
    fn put(&self, out: &mut Writer) {
        out.count(*self);
    }
}

impl Decode for usize {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        from.index()
    }
}

impl<T: Encode, const N: usize> Encode for [T; N] {
    fn put(&self, out: &mut Writer) {
        self.iter().for_each(|each| each.put(out));
    }
}

impl<T: Decode + Copy + Default, const N: usize> Decode for [T; N] {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut all = [T::default(); N];
        for each in &mut all {
            *each = T::take(from)?;
        }
        Ok(all)
    }
}

impl Encode for str {
    fn put(&self, out: &mut Writer) {
        out.blob(self.as_bytes());
    }
}

impl Decode for String {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let bytes = from.blob()?.to_vec();
        Self::from_utf8(bytes).map_err(|_| DecodeError::Invalid("text"))
    }
}

impl Encode for Option<Vec<u8>> {
    fn put(&self, out: &mut Writer) {
        out.option(self.as_ref(), |out, bytes| out.blob(bytes));
    }
}

impl Decode for Option<Vec<u8>> {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        from.option(|from| from.blob().map(<[u8]>::to_vec))
    }
}

impl<T: Encode> Encode for Vec<T> {
    fn put(&self, out: &mut Writer) {
        out.list(self.iter(), |out, each| each.put(out));
    }
}

impl<T: Decode> Decode for Vec<T> {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        // Grown as it is read: a count in damaged bytes takes no more memory than the bytes themselves would.
        let count = from.count()?;
        let mut all = Self::new();
        for _ in 0..count {
            all.push(T::take(from)?);
        }
        Ok(all)
    }
}

impl Encode for Arc<Manifest> {
    fn put(&self, out: &mut Writer) {
        self.encode(out);
    }
}

impl Decode for Arc<Manifest> {
    fn take(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Manifest::decode(from).map(Arc::new)
    }
}

/// A value as bytes of its own.
pub fn to_bytes(value: &impl Encode) -> Vec<u8> {
    let mut out = Writer::new();
    value.put(&mut out);
    out.into_bytes()
}

/// A value that is all of `bytes`.
///
/// # Errors
/// As [`Decode::take`], and bytes left over.
pub fn from_bytes<T: Decode>(bytes: &[u8]) -> Result<T, DecodeError> {
    let mut from = Reader::new(bytes);
    let value = T::take(&mut from)?;
    from.finish()?;
    Ok(value)
}
