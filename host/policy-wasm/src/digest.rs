//! Which bytes are these? SHA-256, written in hexadecimal.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

/// Identity of a component or a policy set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest of several pieces, each with its length in front, so that no two lists of pieces share it.
    pub fn of_pieces(pieces: &[&[u8]]) -> Self {
        let mut hash = Sha256::new();
        for piece in pieces {
            hash.update((piece.len() as u64).to_le_bytes());
            hash.update(piece);
        }
        Self(hash.finalize().into())
    }

    /// As bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first eight bytes as a number, for records with a fixed width.
    pub fn short(&self) -> u64 {
        let mut head = [0; 8];
        head.copy_from_slice(&self.0[..8]);
        u64::from_be_bytes(head)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

/// The text is not 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a digest is 64 hexadecimal digits")]
pub struct NotADigest;

impl FromStr for Digest {
    type Err = NotADigest;

    fn from_str(text: &str) -> Result<Self, NotADigest> {
        let digits = text.strip_prefix("sha256:").unwrap_or(text).as_bytes();
        if digits.len() != 64 {
            return Err(NotADigest);
        }
        let mut out = [0; 32];
        for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
            let nibble = |digit: u8| (digit as char).to_digit(16).ok_or(NotADigest);
            *byte = (nibble(pair[0])? << 4 | nibble(pair[1])?) as u8;
        }
        Ok(Self(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_sha_256() {
        // FIPS 180-4, the one-block example.
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Digest::of(b"abc").to_string(), text);
        assert_eq!(text.parse(), Ok(Digest::of(b"abc")));
        assert_eq!(format!("sha256:{text}").parse(), Ok(Digest::of(b"abc")));
        assert_eq!(Digest::of(b"abc").short(), 0xba78_16bf_8f01_cfea);
        for bad in ["", "sha256:", &text[1..], &text.replace('b', "g"), &format!("{text}00")] {
            assert_eq!(bad.parse::<Digest>(), Err(NotADigest));
        }
    }

    #[test]
    fn pieces_do_not_run_together() {
        assert_ne!(Digest::of_pieces(&[b"ab", b"c"]), Digest::of_pieces(&[b"a", b"bc"]));
    }
}
