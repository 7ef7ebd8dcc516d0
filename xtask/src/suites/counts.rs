//! Passed, failed, skipped: how runners' closing lines are read and how ours is written.

use std::fmt;

/// Results of one suite or of all.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Counts {
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// From libtest's `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
    pub fn from_libtest(line: &str) -> Option<Self> {
        let rest = line.strip_prefix("test result: ")?;
        let number = |word: &str| {
            rest.split([';', '.']).find_map(|part| part.trim().strip_suffix(word)?.trim().parse::<u64>().ok())
        };
        Some(Self { passed: number("passed")?, failed: number("failed")?, skipped: number("ignored")? })
    }

    /// From pytest's `== 2 failed, 10 passed, 1 skipped in 3.1s ==`.
    pub fn from_pytest(line: &str) -> Option<Self> {
        let inner = line.trim_matches(['=', ' ']);
        let (results, _) = inner.rsplit_once(" in ")?;
        let mut counts = Self::default();
        for part in results.split(", ") {
            let (number, word) = part.split_once(' ')?;
            let number: u64 = number.parse().ok()?;
            match word {
                "passed" => counts.passed += number,
                "failed" | "error" | "errors" => counts.failed += number,
                "skipped" => counts.skipped += number,
                _ => {}
            }
        }
        Some(counts)
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_both_runners_are_read() {
        let libtest =
            "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        assert_eq!(Counts::from_libtest(libtest), Some(Counts { passed: 12, failed: 1, skipped: 2 }));
        let pytest = "==== 2 failed, 10 passed, 1 skipped, 3 warnings in 3.10s ====";
        assert_eq!(Counts::from_pytest(pytest), Some(Counts { passed: 10, failed: 2, skipped: 1 }));
        assert_eq!(Counts::from_pytest("collected 3 items"), None);
    }
}
