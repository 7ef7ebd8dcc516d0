//! Where does the kept head of a distribution end?
//!
//! Nothing is sorted but what lies close to the end. One pass sums what lies above each of a few marks; the end lies between two of them, and
//! the tokens there are few enough to be looked at one by one, or else marks are set between those two.

use penstock_kernels_cpu::Tier;
use penstock_kernels_cpu::logits::{Kept, MARKS, Row, Softmax, Token, weigh};

/// Most tokens that are looked at one by one while marks can still tell them apart.
const CLOSE_MAX: usize = 1024;

/// Passes with marks, after which whatever is between two of them is looked at one by one.
const PASSES_MAX: u32 = 8;

/// How far the marks of a later pass lie from where the end would be if the mass were spread evenly, in parts of the range.
const NEAR_MARKS: [f64; MARKS - 1] = [0.16, 0.04, 0.01, -0.01, -0.04, -0.16];

/// Below the likeliest token, in nats, the marks of the first pass. Before the first comes one just below the likeliest token.
const FIRST_MARKS: [f32; MARKS - 1] = [-0.75, -2.0, -3.5, -5.5, -8.0, -12.0];

/// Exponents at or below this have no weight at all.
const WEIGHTLESS: f32 = -87.0;

/// How long a head is kept: the shortest that reaches this.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Head {
    /// So many tokens.
    Tokens(usize),
    /// This share of what all that may be kept weigh.
    Share(f64),
}

/// A token close to the end: its place in the order of likelihood, and what it counts.
#[derive(Clone, Copy, Debug)]
struct Close {
    /// Ascends where likelihood falls, then with the id.
    place: u64,
    mass: f32,
}

impl Close {
    fn kept(self) -> Kept {
        Kept { logit: logit_of((self.place >> 32) as u32), id: self.place as u32 }
    }
}

/// Bits that ascend where the logit falls; zeros of both signs have the same.
fn falling(logit: f32) -> u32 {
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 == 0 { !bits & 0x7fff_ffff } else { bits }
}

/// What [`falling`] was made from.
fn logit_of(falling: u32) -> f32 {
    f32::from_bits(if falling >> 31 == 0 { !falling & 0x7fff_ffff } else { falling })
}

/// The range in which a head ends.
#[derive(Clone, Copy, Debug)]
struct Range {
    /// Not above this.
    high: f32,
    /// Above this.
    low: f32,
    /// What lies above `high`.
    outside: f64,
    /// What lies above `low`.
    reached: f64,
    /// Mass for each unit of logit just above `high`, where it is known.
    density: Option<f64>,
}

impl Range {
    fn is_one_value(&self) -> bool {
        self.low >= self.high.next_down()
    }

    /// The border behind all that `kept` keeps of it.
    fn whole(&self, kept: Kept) -> Kept {
        if self.high > kept.logit { Kept { logit: self.high, id: u32::MAX } } else { kept }
    }

    /// How deep in the range the end is to be expected, 0 at `high` and 1 at `low`.
    ///
    /// The density of mass is taken for a straight line through the range's mean, with the geometric mean of that and the density above
    /// at `high`. Square roots are exact on every machine, which logarithms are not.
    fn expected(&self, wanted: f64, width: f64) -> f64 {
        let mass = self.reached - self.outside;
        if mass <= 0.0 {
            return 0.5;
        }
        let part = ((wanted - self.outside) / mass).clamp(0.0, 1.0);
        let edge = self.density.map_or(1.0, |density| (density * width / mass).sqrt().min(2.0));
        2.0 * part / (edge + (edge * edge + 4.0 * (1.0 - edge) * part).sqrt())
    }

    /// Marks inside, from the highest: one that only the greatest value passes; the others close to where the end is to be expected, or at
    /// equal distances.
    fn marks(&self, wanted: f64, is_expected: bool) -> [f32; MARKS] {
        let (low, high) = (f64::from(self.low.max(f32::MIN)), f64::from(self.high));
        let expected = self.expected(wanted, high - low);
        let mut marks = [self.high.next_down(); MARKS];
        for (i, mark) in marks.iter_mut().enumerate().skip(1) {
            let even = i as f64 / MARKS as f64;
            let depth = if is_expected { expected - NEAR_MARKS[i - 1] } else { even };
            let at = high - (high - low) * depth.clamp(0.0, 1.0);
            *mark = (at as f32).clamp(self.low, self.high.next_down());
        }
        marks
    }

    /// The part between the first mark that reaches `wanted` and the mark before.
    fn narrow(&mut self, marks: &[f32; MARKS], masses: &[f64; MARKS + 1], wanted: f64) {
        let reached = (0..MARKS).find(|&i| masses[i] >= wanted);
        let passed = reached.unwrap_or(MARKS);
        if passed > 1 {
            let width = f64::from(marks[passed - 2]) - f64::from(marks[passed - 1]);
            self.density = (width > 0.0).then(|| (masses[passed - 1] - masses[passed - 2]) / width);
        }
        if passed > 0 {
            self.high = marks[passed - 1];
            self.outside = masses[passed - 1];
        }
        if let Some(reached) = reached {
            (self.low, self.reached) = (marks[reached], masses[reached]);
        }
    }
}

/// Finds ends. Holds buffers only.
#[derive(Debug, Default)]
pub(super) struct Selector {
    tokens: Vec<Token>,
    logits: Vec<f32>,
    masses: Vec<f32>,
    close: Vec<Close>,
}

impl Selector {
    /// With the memory for a row in which each token is looked at.
    pub(super) fn with_room(vocabulary: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(vocabulary),
            logits: Vec::with_capacity(vocabulary),
            masses: Vec::with_capacity(vocabulary),
            close: Vec::with_capacity(vocabulary),
        }
    }

    /// Bytes of that memory.
    pub(super) const fn room_bytes(vocabulary: usize) -> usize {
        vocabulary * (size_of::<Token>() + 2 * size_of::<f32>() + size_of::<Close>())
    }

    /// The last token of a head of what `kept` keeps.
    pub(super) fn end(&mut self, tier: Tier, row: Row<'_>, softmax: Softmax, kept: Kept, head: Head) -> Kept {
        match head {
            Head::Tokens(count) => {
                self.end_of_few(row, kept, count).unwrap_or_else(|| self.search(tier, row, softmax, kept, head))
            }
            Head::Share(_) => self.search(tier, row, softmax, kept, head),
        }
    }

    /// The `count` likeliest tokens of a row, likeliest first.
    pub(super) fn largest(&mut self, tier: Tier, row: Row<'_>, count: usize) -> Vec<Token> {
        if count == 0 {
            return Vec::new();
        }
        let softmax = Softmax { max: row.max(), scale: 0.0 };
        let end = self.end(tier, row, softmax, Kept::ALL, Head::Tokens(count));
        let mut tokens = Vec::with_capacity(count);
        row.between(end.logit.next_down(), f32::INFINITY, end, count, &mut tokens);
        tokens.sort_unstable_by_key(|token| (falling(token.logit), token.id));
        tokens
    }

    /// As [`Selector::end`], where the greatest values of blocks tell most tokens apart from the `count` likeliest.
    fn end_of_few(&mut self, row: Row<'_>, kept: Kept, count: usize) -> Option<Kept> {
        // As many blocks have a value that is not below the mark, so the head ends there or above.
        let mark = if count <= row.maxima().len() {
            self.logits.clear();
            self.logits.extend_from_slice(row.maxima());
            let (_, mark, _) = self.logits.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
            mark.next_down()
        } else {
            f32::NEG_INFINITY
        };
        self.tokens.clear();
        let is_whole = row.between(mark, f32::INFINITY, kept, CLOSE_MAX, &mut self.tokens);
        if !is_whole {
            return None;
        }
        if self.tokens.len() < count {
            // Then the border before was above the mark.
            return Some(kept);
        }
        self.close.clear();
        self.close.extend(self.tokens.iter().map(|&token| close(token, 1.0)));
        let (_, last, _) = self.close.select_nth_unstable_by_key(count - 1, |close| close.place);
        Some(last.kept())
    }

    fn search(&mut self, tier: Tier, row: Row<'_>, softmax: Softmax, kept: Kept, head: Head) -> Kept {
        let measure = match head {
            Head::Tokens(_) => None,
            Head::Share(_) => Some(softmax),
        };
        let at = |nats: f32| (softmax.max + nats / softmax.scale).max(f32::MIN);
        let lowest = at(WEIGHTLESS).max(kept.logit);
        let mut marks = [softmax.max.next_down(); MARKS];
        for (mark, nats) in marks[1..].iter_mut().zip(FIRST_MARKS) {
            *mark = at(nats).clamp(lowest.next_down(), softmax.max.next_down());
        }
        let mut masses = row.masses(measure, kept, marks);
        let mut range =
            Range { high: softmax.max, low: lowest.next_down(), outside: 0.0, reached: masses[MARKS], density: None };
        let wanted = match head {
            Head::Tokens(count) if count as f64 >= masses[MARKS] => return kept,
            Head::Tokens(count) => count as f64,
            Head::Share(share) => share * masses[MARKS],
        };
        for pass in 1.. {
            range.narrow(&marks, &masses, wanted);
            if range.is_one_value() {
                return self.end_of_equals(tier, row, measure, kept, range, wanted);
            }
            self.tokens.clear();
            let most = if pass < PASSES_MAX { CLOSE_MAX } else { usize::MAX };
            if row.between(range.low, range.high, kept, most, &mut self.tokens) {
                break;
            }
            marks = range.marks(wanted, pass % 2 == 1);
            masses = row.masses(measure, kept, marks);
        }
        self.weigh_tokens(tier, measure);
        self.end_of_close(wanted - range.outside).unwrap_or(range.whole(kept))
    }

    /// Where all tokens of the range are equal: the border's id is that of the first with which the head is long enough.
    fn end_of_equals(
        &mut self,
        tier: Tier,
        row: Row<'_>,
        measure: Option<Softmax>,
        kept: Kept,
        range: Range,
        wanted: f64,
    ) -> Kept {
        self.tokens.clear();
        self.tokens.push(Token { id: 0, logit: range.high });
        self.weigh_tokens(tier, measure);
        let each = f64::from(self.close[0].mass);
        let count = ((wanted - range.outside) / each).ceil().max(1.0);
        self.tokens.clear();
        // A float beyond the integers becomes the largest of them.
        row.between(range.low, range.high, kept, count as usize, &mut self.tokens);
        // Rounding may ask for one more than there are: then the last of them.
        self.tokens.last().map_or(range.whole(kept), |last| Kept { logit: range.high, id: last.id })
    }

    /// Fills `close` from `tokens`.
    fn weigh_tokens(&mut self, tier: Tier, measure: Option<Softmax>) {
        self.masses.clear();
        self.masses.resize(self.tokens.len(), 1.0);
        if let Some(softmax) = measure {
            self.logits.clear();
            self.logits.extend(self.tokens.iter().map(|token| token.logit));
            weigh(tier, &self.logits, softmax, &mut self.masses);
        }
        self.close.clear();
        self.close.extend(self.tokens.iter().zip(&self.masses).map(|(&token, &mass)| close(token, mass)));
    }

    /// The token with which the close ones reach `left`, the last where rounding leaves a trace of it; `None` of none.
    fn end_of_close(&mut self, mut left: f64) -> Option<Kept> {
        let mut between = self.close.as_mut_slice();
        // Whatever is likelier than `between` is kept and taken off `left`; the end lies in `between`.
        while between.len() > 32 {
            let half = between.len() / 2;
            between.select_nth_unstable_by_key(half, |close| close.place);
            let mass: f64 = between[..half].iter().map(|close| f64::from(close.mass)).sum();
            if mass >= left {
                between = &mut between[..half];
            } else {
                left -= mass;
                between = &mut between[half..];
            }
        }
        between.sort_unstable_by_key(|close| close.place);
        let last = between.iter().find(|close| {
            left -= f64::from(close.mass);
            left <= 0.0
        });
        last.or(between.last()).map(|last| last.kept())
    }
}

fn close(token: Token, mass: f32) -> Close {
    Close { place: u64::from(falling(token.logit)) << 32 | u64::from(token.id), mass }
}
