//! The same model in another weight type, as `tests/oracle/requantise.py` makes it.

use std::path::Path;

use penstock_model::gguf::quantise::quantise;
use penstock_model::gguf::{Gguf, GgufType};
use penstock_model::{DType, dequantise_row};

/// The file at `path` with every matrix stored anew as `dtype`; metadata, names and order stay byte for byte.
pub fn requantise(path: &Path, dtype: DType) -> Vec<u8> {
    let gguf = Gguf::open(path).expect("opens");
    let file: &[u8] = gguf.map();
    let mut header = file[..gguf.header().data_offset].to_vec();
    let mut data = Vec::new();
    for tensor in gguf.header().tensors() {
        data.resize(data.len().next_multiple_of(32), 0);
        let GgufType::Supported(stored) = tensor.kind else { panic!("{} is of no supported type", tensor.name) };
        let wanted = if tensor.dimensions > 1 { dtype } else { stored };
        // Behind the name come the dimensions, and behind those type and offset.
        let name = [&(tensor.name.len() as u64).to_le_bytes()[..], tensor.name.as_bytes()].concat();
        let at = header.windows(name.len()).rposition(|window| window == name).expect("the header names its tensors");
        let tail = at + name.len() + 4 + 8 * tensor.dimensions as usize;
        header[tail..tail + 4].copy_from_slice(&GgufType::id_of(wanted).to_le_bytes());
        header[tail + 4..tail + 12].copy_from_slice(&(data.len() as u64).to_le_bytes());
        let bytes = &file[tensor.bytes.clone()];
        if wanted == stored {
            data.extend(bytes);
            continue;
        }
        let mut values = vec![0f32; tensor.cols];
        for row in bytes.chunks_exact(bytes.len() / tensor.rows) {
            dequantise_row(stored, row, &mut values).expect("whole rows");
            data.extend(quantise(wanted, &values));
        }
    }
    header.extend(data);
    header
}
