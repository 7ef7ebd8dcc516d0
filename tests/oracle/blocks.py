#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which values does another implementation read in blocks of quantised weights?

Writes one line a type and row: name, the row's bytes and the float32 values that the gguf package unpacks, both in
hexadecimal, values little-endian. Bytes are random but for the half-precision scales, which stay small and finite.
"""

import argparse
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

HERE = Path(__file__).resolve().parent
SEED = 20

# Type -> where the halves lie in a block.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def rows(random, kind, halves):
    length, size = GGML_QUANT_SIZES[kind]
    for _ in range(2):
        blocks = random.integers(0, 256, size=(64 // length or 1, size), dtype=np.uint8)
        for at in halves:
            scales = random.uniform(-0.1, 0.1, size=len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
        yield blocks.reshape(1, -1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "blocks.txt", help="the answers (default: beside this)")
    args = parser.parse_args()
    random = np.random.default_rng(SEED)
    lines = ["# type, row, values: written by blocks.py"]
    for name, halves in HALVES.items():
        kind = GGMLQuantizationType[name]
        for row in rows(random, kind, halves):
            values = dequantize(row, kind).astype("<f4")
            lines.append(f"{name} {row.tobytes().hex()} {values.tobytes().hex()}")
    args.out.write_text("\n".join(lines) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
