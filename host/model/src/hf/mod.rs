//! A Hugging Face folder: what do its JSON files and its safetensors files say?

mod config;
mod refuse;
mod rope;
mod safetensors;

use std::fs;
use std::io::Read as _;
use std::path::Path;

use crate::error::ModelError;
use crate::limits::JSON_BYTES_MAX;

pub(crate) use config::config;
pub(crate) use safetensors::Safetensors;

/// Reads a small JSON file of the folder, bounded; `Ok(None)` when it is not there.
pub(crate) fn read_json_bytes(folder: &Path, name: &str) -> Result<Option<Vec<u8>>, ModelError> {
    let path = folder.join(name);
    let file = match fs::File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(ModelError::io(&path, "open", e)),
    };
    let mut bytes = Vec::new();
    file.take(JSON_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|e| ModelError::io(&path, "read", e))?;
    if bytes.len() as u64 > JSON_BYTES_MAX {
        return Err(ModelError::json(name, format!("is larger than {JSON_BYTES_MAX} bytes")));
    }
    Ok(Some(bytes))
}

/// Like [`read_json_bytes`], parsed.
pub(crate) fn read_json<T: serde::de::DeserializeOwned>(folder: &Path, name: &str) -> Result<Option<T>, ModelError> {
    let Some(bytes) = read_json_bytes(folder, name)? else { return Ok(None) };
    serde_json::from_slice(&bytes).map(Some).map_err(|e| ModelError::json(name, e))
}
