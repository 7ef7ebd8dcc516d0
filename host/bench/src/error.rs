//! Why a run could not begin. What goes wrong with a single request is part of its record instead.

use thiserror::Error;

/// A run that could not begin, or whose results could not be kept.
#[derive(Debug, Error)]
pub enum BenchError {
    /// The plan asks for what cannot be done.
    #[error("{flag}: {problem}")]
    Plan {
        /// The flag at fault.
        flag: &'static str,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// The prompt file cannot be used.
    #[error("prompt file {path}{}: {problem}", line.map(|line| format!(", line {line}")).unwrap_or_default())]
    Prompts {
        /// The file.
        path: String,
        /// The line, from 1.
        line: Option<usize>,
        /// What is wrong.
        problem: String,
    },
    /// Nothing answers.
    #[error("nothing answers at {url} ({cause}); start a server there (`penstock serve`), or name another with --url")]
    Unreachable {
        /// Where it was tried.
        url: String,
        /// What the connection said.
        cause: String,
    },
    /// The server does not say which models it has.
    #[error("{url} does not say which models it serves ({cause}); name one with --model")]
    Models {
        /// What was asked.
        url: String,
        /// What came back.
        cause: String,
    },
    /// A result file could not be written.
    #[error("write {path}: {cause}")]
    Save {
        /// The file.
        path: String,
        /// Why.
        cause: std::io::Error,
    },
}
