//! Keeping control-token spellings in message text apart from the template's own: where may a control token be read?

use tokenizers::AddedToken;

/// A piece of rendered text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// To be encoded with control-token spellings as plain characters.
    Text(&'a str),
    /// A control token of the template.
    Special(u32),
}

/// The spellings of all control tokens.
#[derive(Clone, Debug)]
pub(crate) struct Guard {
    tokens: Vec<(u32, AddedToken)>,
    /// For each first byte, whether some spelling begins with it: the quick way out for ordinary text.
    first: [bool; 256],
}

impl Guard {
    pub(crate) fn new(mut tokens: Vec<(u32, AddedToken)>) -> Self {
        // Longest first, so that the first that matches is the one the engine would take.
        tokens.sort_by_key(|(id, token)| (std::cmp::Reverse(token.content.len()), *id));
        let mut first = [false; 256];
        for (_, token) in &tokens {
            first[usize::from(token.content.as_bytes()[0])] = true;
        }
        Self { tokens, first }
    }

    fn at<'a>(&'a self, text: &'a str, start: usize) -> impl Iterator<Item = &'a (u32, AddedToken)> {
        let candidate = self.first[usize::from(text.as_bytes()[start])];
        let rest = &text.as_bytes()[start..];
        self.tokens.iter().filter(move |(_, token)| candidate && rest.starts_with(token.content.as_bytes()))
    }

    /// The first control-token spelling of a text.
    pub(crate) fn spelled<'a>(&self, text: &'a str) -> Option<&'a str> {
        let longest = |start| self.at(text, start).next().map(|(_, token)| &text[start..start + token.content.len()]);
        (0..text.len()).find_map(longest)
    }

    /// Every place at which a spelling begins, overlapping ones included, with the shortest spelling's length there.
    pub(crate) fn places(&self, text: &str) -> Vec<(usize, usize)> {
        let shortest = |start| self.at(text, start).map(|(_, token)| token.content.len()).min();
        (0..text.len()).filter_map(|start| shortest(start).map(|length| (start, length))).collect()
    }

    /// Whether text in front of or behind this one could complete a spelling: it ends with a spelling's beginning or begins with its end.
    pub(crate) fn touches_border(&self, text: &str) -> bool {
        let text = text.as_bytes();
        self.tokens.iter().any(|(_, token)| {
            let spelling = token.content.as_bytes();
            // A text shorter than the spelling may be its middle; then both of its ends lie in the spelling.
            let middle = !text.is_empty() && text.len() < spelling.len() && contains(spelling, text);
            middle
                || (1..spelling.len()).any(|cut| text.ends_with(&spelling[..cut]) || text.starts_with(&spelling[cut..]))
        })
    }

    /// Splits rendered text at the control tokens that the template wrote: the leftmost, longest spellings that no barrier falls into.
    /// `barriers` are byte offsets, ascending.
    pub(crate) fn split<'a>(&self, text: &'a str, barriers: &[usize]) -> Vec<Part<'a>> {
        let mut parts = Vec::new();
        let mut text_start = 0;
        let mut at = 0;
        while at < text.len() {
            let next_barrier = barriers[barriers.partition_point(|&barrier| barrier <= at)..].first();
            let open = |token: &AddedToken| next_barrier.is_none_or(|&barrier| barrier >= at + token.content.len());
            let found = self.at(text, at).find(|(_, token)| open(token));
            let Some((id, token)) = found else {
                at += 1;
                continue;
            };
            let mut before = &text[text_start..at];
            if token.lstrip {
                before = before.trim_end();
            }
            if !before.is_empty() {
                parts.push(Part::Text(before));
            }
            parts.push(Part::Special(*id));
            at += token.content.len();
            if token.rstrip {
                at = text.len() - text[at..].trim_start().len();
            }
            text_start = at;
        }
        if text_start < text.len() {
            parts.push(Part::Text(&text[text_start..]));
        }
        parts
    }
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> Guard {
        let token = |text: &str| AddedToken::from(text, true);
        Guard::new(vec![(7, token("<a>")), (8, token("<a><b>")), (9, token("<b>").rstrip(true))])
    }

    #[test]
    fn template_tokens_are_read_and_barred_ones_are_not() {
        use Part::{Special, Text};
        let guard = guard();
        assert_eq!(guard.split("x<a>y", &[]), [Text("x"), Special(7), Text("y")]);
        assert_eq!(guard.split("<a><b>  y", &[]), [Special(8), Text("  y")]);
        assert_eq!(guard.split("<a><b>  y", &[3]), [Special(7), Special(9), Text("y")]);
        assert_eq!(guard.split("<a><b>", &[1]), [Text("<a>"), Special(9)]);
        assert_eq!(guard.split("<a><b>", &[1, 4]), [Text("<a><b>")]);
        assert_eq!(guard.split("<a><b>", &[0, 6]), [Special(8)]);
    }

    #[test]
    fn spellings_are_found_where_they_are() {
        let guard = guard();
        assert_eq!(guard.places("é<a><b><a"), [(2, 3), (5, 3)]);
        assert_eq!(guard.spelled("<a"), None);
        assert_eq!(guard.spelled("1 < 2 <b>"), Some("<b>"));
        assert!(guard.touches_border("1 <"));
        assert!(guard.touches_border("> quote"));
        assert!(guard.touches_border("a"));
        assert!(!guard.touches_border("plain, 1 < 2"));
        assert!(!guard.touches_border(""));
    }
}
