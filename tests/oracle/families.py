#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which logits does transformers compute, in float32, for one tiny model of each family?

The models are made here: a configuration by transformers' own classes, and weights by a formula that the tests repeat,
so that no weights need be kept. For each model families.jsonl gets one line

    {"name", "seed", "config", "divisors", "tokens"}

with config.json as transformers writes it, and what the rotary frequencies were divided by (what a GGUF file would
store, if anything). families.bin gets tokens x vocab little-endian f32 logits, models in the order of the lines.

The formula. Value i of the tensor called NAME comes from z = splitmix64(fnv1a64(NAME) xor seed, i), the (i + 1)-th number
of that sequence.

    matrices  (z >> 56) - 128, at least -127; at i % 32 == 0 it is 127 or -127 by its sign (0 counts as positive).
              Times 2^-9; the embedding 2^-7, but 2^-9 for Gemma. So blocks of 32 have exact 8-bit quants.
    biases    (z >> 40) / 2^24 - 0.5
    norms     (z >> 40) / 2^24 + 0.5, and 1 less for Gemma, whose files hold the difference to 1
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
MASK = (1 << 64) - 1
TOKENS = 48
VOCAB = 96

SHAPE = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1,
    pad_token_id=None,
)
LLAMA3 = dict(rope_type="llama3", rope_theta=10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
PLAIN = dict(rope_type="default", rope_theta=10_000.0)

# Name, class, and what differs from SHAPE.
MODELS = [
    ("llama", "Llama", dict(tie_word_embeddings=False, rope_parameters=PLAIN)),
    ("llama-llama3", "Llama", dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
    ("llama-linear-bias", "Llama", dict(
        tie_word_embeddings=False, attention_bias=True, rope_parameters=dict(PLAIN, rope_type="linear", factor=4.0))),
    ("mistral-window", "Mistral", dict(tie_word_embeddings=False, sliding_window=16, rope_parameters=PLAIN)),
    ("qwen2", "Qwen2", dict(
        tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=1, use_sliding_window=False,
        rope_parameters=dict(PLAIN, rope_theta=1_000_000.0))),
    ("qwen2-window", "Qwen2", dict(
        tie_word_embeddings=False, num_attention_heads=2, num_key_value_heads=2, use_sliding_window=True,
        sliding_window=16, max_window_layers=1, rope_parameters=PLAIN)),
    ("qwen3", "Qwen3", dict(tie_word_embeddings=True, rope_parameters=dict(PLAIN, rope_theta=1_000_000.0))),
    ("qwen3-untied", "Qwen3", dict(tie_word_embeddings=False, num_key_value_heads=4, rope_parameters=PLAIN)),
    ("gemma3", "Gemma3", dict(
        num_hidden_layers=4, num_key_value_heads=1, sliding_window=16, query_pre_attn_scalar=48,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1_000_000.0, factor=8.0),
                             sliding_attention=PLAIN))),
]


def fnv1a64(text):
    state = 0xCBF29CE484222325
    for byte in text.encode("utf-8"):
        state = ((state ^ byte) * 0x100000001B3) & MASK
    return state


def splitmix64(seed, count):
    with np.errstate(over="ignore"):
        steps = np.arange(1, count + 1, dtype=np.uint64)
        z = np.uint64(seed) + steps * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def weights(name, shape, seed, is_gemma):
    count = int(np.prod(shape))
    z = splitmix64(fnv1a64(name) ^ seed, count)
    fraction = (z >> np.uint64(40)).astype(np.float64) / 2**24
    if len(shape) == 2:
        quants = np.maximum((z >> np.uint64(56)).astype(np.int64) - 128, -127)
        quants[::32] = np.where(quants[::32] < 0, -127, 127)
        exponent = 7 if name == "model.embed_tokens.weight" and not is_gemma else 9
        values = quants / 2.0**exponent
    elif name.endswith(".bias"):
        values = fraction - 0.5
    else:
        values = fraction + (-0.5 if is_gemma else 0.5)
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


def tiny(family, changes, seed):
    is_gemma = family == "Gemma3"
    prefix = "Gemma3Text" if is_gemma else family
    config = getattr(transformers, prefix + "Config")(**{**SHAPE, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, family + "ForCausalLM")(config).eval().float()
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    state = {name: weights(name, tuple(value.shape), seed, is_gemma) for name, value in state.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    if config.tie_word_embeddings:
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def divisors(model):
    """What llama3 divides each frequency by; None for the others."""
    parameters = model.config.rope_parameters
    if parameters.get("rope_type") != "llama3":
        return None
    dim = model.config.head_dim
    plain = parameters["rope_theta"] ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    return [float(np.float32(d)) for d in plain / model.model.rotary_emb.inv_freq.double().numpy()]


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the answers (default: beside this)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines, answers = [], []
    for number, (name, family, changes) in enumerate(MODELS):
        seed = 1000 + number
        model = tiny(family, changes, seed)
        tokens = [int(z) % VOCAB for z in splitmix64(seed, TOKENS)]
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        config = model.config.to_dict()
        config["architectures"] = [family + "ForCausalLM"]
        line = {"name": name, "seed": seed, "config": config, "divisors": divisors(model), "tokens": tokens}
        lines.append(json.dumps(line, sort_keys=True) + "\n")
        answers.append(logits.numpy().astype("<f4").tobytes())
        print(f"{name}: logits of root mean square {logits.square().mean().sqrt():.3f}")
    (args.out / "families.jsonl").write_text("".join(lines), encoding="utf-8")
    (args.out / "families.bin").write_bytes(b"".join(answers))


if __name__ == "__main__":
    main()
