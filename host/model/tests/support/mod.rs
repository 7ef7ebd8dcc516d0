//! What the tests of this crate share: where the demo model is, a seeded generator, the tiny model on disk.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::PathBuf;

use penstock_model::gguf::tiny::TinyLlama;
use penstock_model::{Model, OpenOptions};

/// The demo model's file, by `PENSTOCK_DEMO_MODEL` or where `cargo xtask model` puts it.
pub fn demo_model() -> Option<PathBuf> {
    let told = std::env::var_os("PENSTOCK_DEMO_MODEL").map(PathBuf::from);
    let cached = std::env::var_os("HOME")
        .map(|home| PathBuf::from(home).join(".cache/penstock/models/SmolLM2-135M-Instruct.Q4_1.gguf"));
    let found = told.or(cached).filter(|path| path.is_file());
    if found.is_none() {
        println!("SKIPPED: demo model not found (run `cargo xtask model`)");
    }
    found
}

/// Gemma 3's file, where `cargo xtask model --which gemma3` puts it.
pub fn gemma3() -> Option<PathBuf> {
    let found = penstock_model::cache_dir::gemma3_path().filter(|path| path.is_file());
    if found.is_none() {
        println!("SKIPPED: Gemma 3 not found (run `cargo xtask model --which gemma3`)");
    }
    found
}

/// A file of `tests/oracle` at the repository's root.
pub fn oracle(name: &str) -> Option<String> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/oracle").join(name);
    let text = std::fs::read_to_string(&path).ok();
    if text.is_none() {
        println!("SKIPPED: tests/oracle/{name} not found");
    }
    text
}

/// Writes a model file and opens it.
pub fn open_bytes(bytes: &[u8]) -> Result<Model, penstock_model::ModelError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, bytes).unwrap();
    Model::open(&path, &OpenOptions::default(), &mut |_, _| {})
}

/// The tiny model.
pub fn tiny() -> Model {
    open_bytes(&TinyLlama::default().file()).unwrap()
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}
