//! What can go wrong with a model, and what the reader of the message can do about it.

use std::path::PathBuf;

use crate::dtype::DType;

/// Every failure of this crate. The text names the place, the finding and, where there is one, the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },

    /// A path holds neither a GGUF file nor a model folder.
    #[error("{path} is not a model: {what}; give a .gguf file, or a folder with config.json, tokenizer.json and *.safetensors", path = path.display())]
    NotAModel {
        /// The path given.
        path: PathBuf,
        /// What was found there.
        what: String,
    },

    /// The file breaks its own format. Nothing of it is used.
    #[error("malformed {format} file at byte {at}: {what}; the file is damaged or truncated, fetch it again")]
    Malformed {
        /// `gguf` or `safetensors`.
        format: &'static str,
        /// Offset of the finding in the file.
        at: u64,
        /// The finding.
        what: String,
    },

    /// A JSON file of a model folder could not be understood.
    #[error("{file}: {what}")]
    Json {
        /// File name within the folder.
        file: String,
        /// The parser's message or the missing key.
        what: String,
    },

    /// The model is sound but of a kind this version does not run.
    #[error("unsupported {what}: {name}; {remedy}")]
    Unsupported {
        /// The kind of thing: architecture, pre-tokenizer, rope scaling, ...
        what: &'static str,
        /// Its name in the file.
        name: String,
        /// What to do instead.
        remedy: &'static str,
    },

    /// A metadata key is missing, of the wrong type, or out of range.
    #[error("model configuration key {key}: {what}")]
    Config {
        /// The key.
        key: String,
        /// The finding.
        what: String,
    },

    /// A tensor that the configuration requires is not in the file.
    #[error("tensor {name} is missing; the file does not hold the model that its configuration describes")]
    TensorMissing {
        /// Name as the file would spell it.
        name: String,
    },

    /// A file of a sharded model is missing, or holds something else than the index says.
    #[error("shard {file} {what}")]
    Shard {
        /// Name of the shard.
        file: String,
        /// The finding.
        what: String,
    },

    /// A tensor that the architecture has no place for: the model computes something that this version does not.
    #[error(
        "tensor {name} has no place in a {architecture} model as its configuration describes it; the model is of another kind"
    )]
    TensorUnknown {
        /// Name in the file.
        name: String,
        /// What the configuration says.
        architecture: &'static str,
    },

    /// A tensor's shape is not the one the configuration implies.
    #[error("tensor {name} has shape [{rows} x {cols}] where the configuration implies [{want_rows} x {want_cols}]")]
    TensorShape {
        /// Name in the file.
        name: String,
        /// Rows found (output features).
        rows: usize,
        /// Columns found (input features).
        cols: usize,
        /// Rows implied.
        want_rows: usize,
        /// Columns implied.
        want_cols: usize,
    },

    /// A tensor is stored in a type that no kernel reads.
    #[error(
        "tensor {name} is stored as {dtype}; supported are F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K and Q6_K: convert the model to one of them"
    )]
    TensorType {
        /// Name in the file.
        name: String,
        /// Type in the file's own words.
        dtype: String,
    },

    /// A row given to [`crate::dequantise_row`] does not have the length its type implies.
    #[error("{bytes} bytes of {dtype} do not make {values} values")]
    RowLength {
        /// The row's type.
        dtype: DType,
        /// Bytes given.
        bytes: usize,
        /// Values asked for.
        values: usize,
    },

    /// The tokenizer could not be built from its description.
    #[error("tokenizer: {what}")]
    Tokenizer {
        /// The finding.
        what: String,
    },

    /// A text could not be encoded.
    #[error("cannot encode text: {what}")]
    Encode {
        /// The finding.
        what: String,
    },

    /// A chat was asked of a model that has no template.
    #[error("this model has no chat template; use the completions endpoint, or a model file with a template")]
    TemplateMissing,

    /// The template itself is broken: it does not parse or calls what does not exist.
    #[error("chat template: {what}")]
    TemplateBroken {
        /// The engine's message with line and cause.
        what: String,
    },

    /// The template refused these messages by `raise_exception`; a fault of the request.
    #[error("chat template refused the messages: {what}")]
    TemplateRefused {
        /// The template's own words.
        what: String,
    },

    /// The template ran out of instructions, depth or output for this conversation; a fault of the request's size or of the template.
    #[error("chat template exceeded its {limit} on these messages; shorten the conversation")]
    TemplateLimit {
        /// `fuel`, `recursion` or `output size`.
        limit: &'static str,
    },

    /// Message text spells control tokens in a place where the template's own logic depends on it, so that it cannot be kept apart.
    #[error(
        "message text contains the control token {token} where this model's chat template cannot keep it apart; remove it from the message"
    )]
    ControlTokenInText {
        /// The token's spelling, or a description of it.
        token: String,
    },

    /// Stop strings of a request break a bound.
    #[error("stop strings: {what}")]
    Stop {
        /// The finding.
        what: String,
    },

    /// A file is not the one that was pinned.
    #[error("{artefact} has SHA-256 {found} where {expected} was pinned; the file was changed or damaged")]
    HashMismatch {
        /// Which artefact: `weights`, `tokenizer`, `chat template`.
        artefact: &'static str,
        /// Hash found, hexadecimal.
        found: String,
        /// Hash expected, hexadecimal.
        expected: String,
    },
}

impl ModelError {
    pub(crate) fn gguf(at: usize, what: impl Into<String>) -> Self {
        Self::Malformed { format: "gguf", at: at as u64, what: what.into() }
    }

    pub(crate) fn config(key: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Config { key: key.into(), what: what.into() }
    }

    pub(crate) fn json(file: impl Into<String>, what: impl ToString) -> Self {
        Self::Json { file: file.into(), what: what.to_string() }
    }

    pub(crate) fn io(path: &std::path::Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.to_path_buf(), action, source }
    }

    /// Whether the fault lies in the request's text rather than in the model: the edge answers these with a 400.
    pub fn is_request_fault(&self) -> bool {
        matches!(
            self,
            Self::TemplateRefused { .. }
                | Self::TemplateLimit { .. }
                | Self::ControlTokenInText { .. }
                | Self::Stop { .. }
                | Self::Encode { .. }
                | Self::TemplateMissing
        )
    }
}
