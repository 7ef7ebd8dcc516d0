#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is the same model in another weight type?

Copies a GGUF with every matrix stored anew in one type. The gguf package unpacks and packs the blocks; metadata, names
and order stay byte for byte, so that equal quantisers give equal files: the tests make the same file without Python
and compare digests. Types: those that the package can pack (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1).
"""

import argparse
import hashlib
import struct
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

ALIGNMENT = 32


def info_tail(header, name):
    """Where the type and the offset stand in a tensor's entry: behind its name and dimensions."""
    name = name.encode("utf-8")
    at = header.rindex(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    dimensions = struct.unpack_from("<I", header, at)[0]
    return at + 4 + 8 * dimensions


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the GGUF to read")
    parser.add_argument("--type", default="Q8_0", help="type of the matrices (default Q8_0)")
    parser.add_argument("--out", type=Path, required=True, help="the GGUF to write")
    args = parser.parse_args()

    kind = GGMLQuantizationType[args.type]
    reader = GGUFReader(args.model)
    header = bytearray(args.model.read_bytes()[: reader.data_offset])
    data = bytearray()
    for tensor in reader.tensors:
        data.extend(bytes(-len(data) % ALIGNMENT))
        stored_as = kind if len(tensor.shape) > 1 else tensor.tensor_type
        struct.pack_into("<IQ", header, info_tail(header, tensor.name), stored_as, len(data))
        if stored_as == tensor.tensor_type:
            data.extend(tensor.data.tobytes())
        else:
            data.extend(quantize(np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32), kind).tobytes())
    args.out.write_bytes(header + data)
    print(f"{len(header) + len(data)} bytes, SHA-256 {hashlib.sha256(header + data).hexdigest()}")


if __name__ == "__main__":
    main()
