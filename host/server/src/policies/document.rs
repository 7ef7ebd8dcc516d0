//! How is a policy set written down? TOML or JSON, seat by seat; a seat may name a component by its file instead of its digest.
//!
//! ```toml
//! [routing]
//! policy = "file:load-overlap.wasm"     # or "sha256:9f…", or "native:overlap-load"
//! parameters = { prefill-scale = 2 }
//! ```

use std::fmt::Write as _;
use std::path::{Component, Path};

use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// Largest document that is read.
const DOCUMENT_BYTES_MAX: u64 = 256 << 10;
/// Largest component that is read: what an interpreter with its library takes, and room.
pub const COMPONENT_BYTES_MAX: u64 = 32 << 20;

/// A document whose seats name components by digest, and the components that it named by file.
pub struct Document {
    /// The set.
    pub set: Value,
    /// Bytes by digest, each once.
    pub components: Vec<(String, Vec<u8>)>,
}

/// Reads the document at `path` and every component file that it names. Files are beside the document, or below its folder.
///
/// # Errors
/// What cannot be read or parsed, by name.
pub fn read(path: &Path) -> Result<Document, String> {
    let text = bytes(path, DOCUMENT_BYTES_MAX)?;
    let text = String::from_utf8(text).map_err(|_| format!("{}: not UTF-8", path.display()))?;
    let is_json = path.extension().is_some_and(|extension| extension == "json");
    let mut set = parse(&text, is_json).map_err(|fault| format!("{}: {fault}", path.display()))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut components: Vec<(String, Vec<u8>)> = Vec::new();
    let seats = set.as_object_mut().into_iter().flat_map(|seats| seats.iter_mut());
    for (seat, spec) in seats {
        let Some(policy) = spec.get_mut("policy") else { continue };
        let Some(file) = policy.as_str().and_then(|policy| policy.strip_prefix("file:")) else { continue };
        let file = Path::new(file);
        if !file.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
            return Err(format!("{}: {seat}.policy: a file is named from the document's folder", path.display()));
        }
        let component = bytes(&folder.join(file), COMPONENT_BYTES_MAX)
            .map_err(|fault| format!("{}: {seat}.policy: {fault}", path.display()))?;
        let digest = digest_of(&component);
        *policy = Value::String(format!("sha256:{digest}"));
        if components.iter().all(|(known, _)| *known != digest) {
            components.push((digest, component));
        }
    }
    Ok(Document { set, components })
}

/// The text of a set as JSON values.
pub fn parse(text: &str, is_json: bool) -> Result<Value, String> {
    if is_json {
        return serde_json::from_str(text).map_err(|fault| format!("not JSON: {fault}"));
    }
    toml::from_str(text).map_err(|fault| format!("not TOML: {}", fault.message()))
}

/// SHA-256 in hexadecimal.
pub fn digest_of(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// A file's bytes, within a bound.
///
/// # Errors
/// What the system says, or that it is too large.
pub fn bytes(path: &Path, most: u64) -> Result<Vec<u8>, String> {
    let told = |fault: std::io::Error| format!("{}: {fault}", path.display());
    let length = std::fs::metadata(path).map_err(told)?.len();
    if length > most {
        return Err(format!("{}: {length} bytes, at most {most}", path.display()));
    }
    std::fs::read(path).map_err(told)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("penstock-document-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn files_become_digests_and_both_notations_say_the_same() {
        let folder = folder("both");
        std::fs::write(folder.join("a.wasm"), b"abc").unwrap();
        let toml = "[routing]\npolicy = \"file:a.wasm\"\nfuel-base = 7\n[eviction]\npolicy = \"native:lru\"\n";
        let json = r#"{"routing": {"policy": "file:./a.wasm", "fuel-base": 7}, "eviction": {"policy": "native:lru"}}"#;
        std::fs::write(folder.join("set.toml"), toml).unwrap();
        std::fs::write(folder.join("set.json"), json).unwrap();
        let (one, two) = (read(&folder.join("set.toml")).unwrap(), read(&folder.join("set.json")).unwrap());
        assert_eq!(one.set, two.set);
        // SHA-256 of "abc": FIPS 180-2, appendix B.1.
        let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(one.set["routing"]["policy"], format!("sha256:{digest}"));
        assert_eq!(one.components, [(digest.to_owned(), b"abc".to_vec())]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let folder = folder("faults");
        for (text, part) in [
            ("[routing]\npolicy = \"file:../a.wasm\"", "routing.policy: a file is named from the document's folder"),
            ("[routing]\npolicy = \"file:/etc/passwd\"", "routing.policy: a file is named from the document's folder"),
            ("[routing]\npolicy = \"file:none.wasm\"", "none.wasm"),
            ("[routing", "not TOML"),
        ] {
            std::fs::write(folder.join("set.toml"), text).unwrap();
            let fault = read(&folder.join("set.toml")).err().unwrap();
            assert!(fault.contains(part), "{fault}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
