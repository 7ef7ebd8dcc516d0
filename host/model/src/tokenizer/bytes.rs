//! How a vocabulary spells bytes.

use super::TokenKind;

/// The two ways in which vocabularies write arbitrary bytes as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    /// GPT-2's: each byte is one character; printable bytes are themselves, the others follow from U+0100.
    ByteLevel,
    /// SentencePiece's: U+2581 for a space, `<0x0A>` for a byte without a token.
    Metaspace,
}

impl Scheme {
    /// Appends the bytes a spelling stands for. Control tokens are spelled plainly in either scheme, user-defined ones but for the space.
    pub(super) fn append(self, spelling: &str, kind: TokenKind, out: &mut Vec<u8>) {
        match (self, kind) {
            (Scheme::Metaspace, TokenKind::UserDefined) => out.extend(spelling.replace('\u{2581}', " ").as_bytes()),
            (_, TokenKind::Control | TokenKind::UserDefined) => out.extend(spelling.as_bytes()),
            (_, TokenKind::Unused) => {}
            (Scheme::ByteLevel, TokenKind::Normal) => {
                let start = out.len();
                for character in spelling.chars() {
                    match byte_of(character) {
                        Some(byte) => out.push(byte),
                        None => {
                            // Not written in the byte alphabet at all: it stands for itself.
                            out.truncate(start);
                            out.extend(spelling.as_bytes());
                            return;
                        }
                    }
                }
            }
            (Scheme::Metaspace, TokenKind::Normal) => match byte_fallback(spelling) {
                Some(byte) => out.push(byte),
                None => out.extend(spelling.replace('\u{2581}', " ").as_bytes()),
            },
        }
    }
}

/// Inverse of GPT-2's table: printable Latin-1 stands for itself, U+0100 + n for the n-th byte that is not printable.
fn byte_of(character: char) -> Option<u8> {
    let code = character as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        // 0x00..=0x20, then 0x7f..=0xa0, then 0xad.
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The 256 characters of GPT-2's table.
pub(super) fn alphabet() -> impl Iterator<Item = char> {
    ('\u{21}'..='\u{143}').filter(|&character| byte_of(character).is_some())
}

fn byte_fallback(spelling: &str) -> Option<u8> {
    let digits = spelling.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(scheme: Scheme, spelling: &str, expected: &[u8]) {
        let mut out = Vec::new();
        scheme.append(spelling, TokenKind::Normal, &mut out);
        assert_eq!(out, expected, "{spelling}");
    }

    #[test]
    fn spellings_stand_for_bytes() {
        check(Scheme::ByteLevel, "Ġthe", b" the");
        check(Scheme::ByteLevel, "Ċ", b"\n");
        check(Scheme::ByteLevel, "Ã©", "é".as_bytes());
        check(Scheme::ByteLevel, "日", "日".as_bytes());
        check(Scheme::Metaspace, "▁the", b" the");
        check(Scheme::Metaspace, "<0xE6>", &[0xe6]);
        check(Scheme::Metaspace, "<0xZZ>", b"<0xZZ>");
    }

    /// The table's own definition, written out as GPT-2's `bytes_to_unicode` builds it.
    #[test]
    fn every_byte_has_one_character() {
        let printable = |b: u8| (b'!'..=b'~').contains(&b) || (0xa1..=0xac).contains(&b) || b >= 0xae;
        let mut next = 256;
        for byte in 0..=255u8 {
            let code = if printable(byte) {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            assert_eq!(byte_of(char::from_u32(code).unwrap()), Some(byte));
        }
        assert_eq!(byte_of(char::from_u32(next).unwrap()), None);
        assert_eq!(alphabet().count(), 256);
    }
}
