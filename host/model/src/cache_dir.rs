//! Where models live on this machine, and what the demo model is called. One file, also compiled into the build tasks that fetch it.

use std::path::PathBuf;

/// File name of the demo model.
pub const DEMO_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// File name of the second model that tests use: another family, other storage types, a SentencePiece vocabulary.
pub const GEMMA3_FILE: &str = "gemma-3-270m.Q4_K_M.gguf";

/// Folder of downloaded models: `PENSTOCK_CACHE`, else `XDG_CACHE_HOME/penstock`, else `~/.cache/penstock`; below it `models`.
///
/// None when no home is known.
pub fn models_dir() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("PENSTOCK_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("penstock")))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache/penstock")))
        .map(|dir| dir.join("models"))
}

/// Folder of packed weights whose model's folder cannot be written.
#[allow(dead_code, reason = "the build tasks pack nothing")]
pub fn packed_dir() -> Option<PathBuf> {
    models_dir().map(|dir| dir.with_file_name("packed"))
}

/// Where the demo model is, or would be.
#[allow(dead_code, reason = "the build tasks have their own way to it")]
pub fn demo_path() -> Option<PathBuf> {
    models_dir().map(|dir| dir.join(DEMO_FILE))
}

/// Where Gemma 3 270M is, or would be.
#[allow(dead_code, reason = "the build tasks have their own way to it")]
pub fn gemma3_path() -> Option<PathBuf> {
    models_dir().map(|dir| dir.join(GEMMA3_FILE))
}
