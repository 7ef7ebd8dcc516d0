//! What a user names: `hf:OWNER/NAME`, with a revision or a file.

use std::fmt;

use crate::error::HubError;

/// Longest name of a repository, revision or file, in bytes; the hub allows 96 for a repository.
const NAME_BYTES_MAX: usize = 512;

/// A repository, and what of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// `OWNER/NAME`.
    pub repository: String,
    /// Branch, tag or commit; `main` unless told.
    pub revision: String,
    /// One file (a GGUF); `None` for the folder of configuration, tokenizer and safetensors.
    pub file: Option<String>,
}

impl Source {
    /// Reads `hf:OWNER/NAME[@REVISION][:FILE]`; `None` for what does not begin with `hf:`.
    ///
    /// # Errors
    /// [`HubError::Name`] when the rest is not of that form, or names what could leave the cache.
    pub fn parse(text: &str) -> Option<Result<Self, HubError>> {
        text.strip_prefix("hf:").map(|rest| Self::parse_rest(text, rest))
    }

    fn parse_rest(text: &str, rest: &str) -> Result<Self, HubError> {
        let fault = |what| Err(HubError::Name { name: text.to_owned(), what });
        let (rest, file) = match rest.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (rest, None),
        };
        let (repository, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        match repository.split_once('/') {
            Some((owner, name)) if is_plain(owner) && is_plain(name) => {}
            _ => return fault("the repository is not OWNER/NAME in letters, digits, '-', '_' and '.'"),
        }
        if !is_path(revision) {
            return fault("the revision is not a branch, a tag or a commit");
        }
        if file.is_some_and(|file| !is_path(file) || !file.ends_with(".gguf")) {
            return fault("the file is not the path of a .gguf file");
        }
        Ok(Self { repository: repository.to_owned(), revision: revision.to_owned(), file: file.map(str::to_owned) })
    }

    /// Whether the revision is a commit, which never changes.
    pub fn is_pinned(&self) -> bool {
        is_commit(&self.revision)
    }

    /// The same source at a commit: what a manifest records, and what can be given back as a name.
    pub fn at(&self, commit: &str) -> Self {
        Self { revision: commit.to_owned(), ..self.clone() }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hf:{}@{}", self.repository, self.revision)?;
        self.file.as_ref().map_or(Ok(()), |file| write!(f, ":{file}"))
    }
}

/// Forty hexadecimal digits.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn is_plain(part: &str) -> bool {
    let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=NAME_BYTES_MAX).contains(&part.len()) && part.bytes().all(is_legal) && !part.bytes().all(|byte| byte == b'.')
}

/// A relative path of plain parts: it can neither leave its folder nor hide another meaning in a URL.
pub(crate) fn is_path(text: &str) -> bool {
    text.len() <= NAME_BYTES_MAX && text.split('/').all(is_plain)
}
