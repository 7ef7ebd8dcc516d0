#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What logits does transformers compute, in float32, at every position of every text of texts.jsonl?

Each text is run alone, in one forward pass over all its tokens (teacher forcing). The logits kept at position i are
those computed from tokens 0..=i, so they rank candidates for token i + 1; the last position is kept too.

texts.jsonl has one object a line: {"name", "kind": "raw", "text"} or {"name", "kind": "chat", "messages"}. A chat is
rendered by the model's template, with the prompt for an answer added unless the last message is the assistant's.

The output, little-endian and without padding:

    file    := header text*
    header  := magic     8 bytes  "PSLOGIT1"
               model     32 bytes SHA-256 of the GGUF file
               vocab     u32      logits at each position in the model
               kept      u32      logits kept at each position, k
               texts     u32      how many texts follow
    text    := name_len  u16
               name      name_len bytes of UTF-8
               tokens    u32      n
               ids       n * u16
               positions n * position
    position:= lse       f32      ln(sum(exp(logit))) over the whole vocabulary
               logits    k * f32  largest first; of equal logits the lower id is first
               ids       k * u16  the token ids of those logits
"""

import argparse
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
MAGIC = b"PSLOGIT1"


def token_ids(tokenizer, entry):
    if entry["kind"] == "raw":
        text = entry["text"]
    else:
        messages = entry["messages"]
        answer_next = messages[-1]["role"] != "assistant"
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next)
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.inference_mode()
def logits_of(model, ids):
    """Logits of every position, as a [tokens, vocab] array."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()


def largest(row, k):
    """The ids of the k largest logits, largest first, equal ones by id."""
    cut = np.partition(row, -k)[-k]
    candidates = np.flatnonzero(row >= cut)
    return candidates[np.lexsort((candidates, -row[candidates]))][:k]


def log_sum_exp(row):
    wide = row.astype(np.float64)
    top = wide.max()
    return top + np.log(np.exp(wide - top).sum())


def encode_text(name, ids, logits, k):
    name = name.encode("utf-8")
    parts = [struct.pack("<H", len(name)), name, struct.pack("<I", len(ids)), np.asarray(ids, dtype="<u2").tobytes()]
    for row in logits:
        top = largest(row, k)
        parts += [struct.pack("<f", log_sum_exp(row)), row[top].astype("<f4").tobytes(), top.astype("<u2").tobytes()]
    return b"".join(parts)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="the GGUF that was dequantised (for its digest)")
    parser.add_argument("--hf", type=Path, required=True, help="the folder that dequantise.py wrote")
    parser.add_argument("--texts", type=Path, default=HERE / "texts.jsonl", help="the texts (default: beside this)")
    parser.add_argument("--out", type=Path, default=HERE / "logits.bin", help="the answers (default: beside this)")
    parser.add_argument("--kept", type=int, default=20, help="logits kept at each position (default 20)")
    parser.add_argument("--threads", type=int, default=2, help="threads for torch (default 2)")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.hf)
    model = AutoModelForCausalLM.from_pretrained(args.hf, dtype=torch.float32, attn_implementation="eager").eval()
    vocab = model.config.vocab_size
    if vocab > 1 << 16:
        raise SystemExit("the layout keeps token ids in 16 bits")

    entries = [json.loads(line) for line in args.texts.read_text(encoding="utf-8").split("\n") if line]
    parts = [MAGIC, sha256(args.gguf), struct.pack("<III", vocab, args.kept, len(entries))]
    positions = 0
    for entry in entries:
        ids = token_ids(tokenizer, entry)
        parts.append(encode_text(entry["name"], ids, logits_of(model, ids), args.kept))
        positions += len(ids)
        print(f"{entry['name']}: {len(ids)} tokens", flush=True)
    data = b"".join(parts)
    args.out.write_bytes(data)
    print(f"{len(entries)} texts, {positions} positions, {len(data)} bytes")


if __name__ == "__main__":
    main()
