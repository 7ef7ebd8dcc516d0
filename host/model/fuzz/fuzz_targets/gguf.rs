//! Any bytes as a GGUF index: an answer or a typed refusal, never a panic. Ranges of an accepted index lie in the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use penstock_model::GgufHeader;

fuzz_target!(|file: &[u8]| {
    if let Ok(header) = GgufHeader::parse(file) {
        for tensor in header.tensors() {
            assert!(file.get(tensor.bytes.clone()).is_some());
        }
    }
});
