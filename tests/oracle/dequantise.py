#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How does another implementation get at exactly the weights of a llama-architecture GGUF?

Writes a folder that transformers loads: float32 weights equal to what the GGUF's blocks stand for, the configuration,
and a tokenizer built from the GGUF's vocabulary, merges and chat template. The gguf package unpacks the blocks, so
nothing here shares code with the server under test.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token

# GGUF name -> transformers name. {} is the layer.
OUTSIDE_LAYERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER = {
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
}


def transformers_name(gguf_name):
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        _, layer, stem, kind = parts
        return f"{IN_LAYER[stem].format(layer)}.{kind}"
    stem, kind = parts
    return f"{OUTSIDE_LAYERS[stem]}.{kind}"


def halves_from_pairs(weight, heads):
    """Puts the rows of a head back in the order transformers rotates them in.

    A llama GGUF stores a head's rows so that rows 2i and 2i+1 are rotated together; transformers rotates row i with
    row i + head_dim/2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


class Gguf:
    """A GGUF's metadata by key and its tensors as float32 arrays."""

    def __init__(self, path):
        self.reader = GGUFReader(path)

    def get(self, key, default=None):
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    def tensors(self):
        for tensor in self.reader.tensors:
            shape = [int(n) for n in reversed(tensor.shape)]
            values = dequantize(tensor.data, tensor.tensor_type)
            yield tensor.name, np.asarray(values, dtype=np.float32).reshape(shape)


def weights(gguf):
    rotated_heads = {
        "q_proj": gguf.get("llama.attention.head_count"),
        "k_proj": gguf.get("llama.attention.head_count_kv"),
    }
    found = {}
    for name, values in gguf.tensors():
        name = transformers_name(name)
        for projection, heads in rotated_heads.items():
            if f".{projection}." in name:
                values = halves_from_pairs(values, heads)
        found[name] = np.ascontiguousarray(values)
    return found


def config(gguf, tied):
    heads = gguf.get("llama.attention.head_count")
    width = gguf.get("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "head_dim": gguf.get("llama.attention.key_length", width // heads),
        "intermediate_size": gguf.get("llama.feed_forward_length"),
        "num_hidden_layers": gguf.get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv"),
        "max_position_embeddings": gguf.get("llama.context_length"),
        "rms_norm_eps": gguf.get("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.get("llama.rope.freq_base"),
        "vocab_size": len(gguf.get("tokenizer.ggml.tokens")),
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def tokenizer(gguf):
    """The "smollm" pre-tokenizer: every digit by itself, then GPT-2's byte-level splits."""
    if gguf.get("tokenizer.ggml.pre") != "smollm":
        raise SystemExit(f"no recipe for pre-tokenizer {gguf.get('tokenizer.ggml.pre')!r}")
    tokens = gguf.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.get("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    made.decoder = decoders.ByteLevel()
    kinds = gguf.get("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds) if kind == CONTROL_TOKEN]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


def tokenizer_config(gguf):
    tokens = gguf.get("tokenizer.ggml.tokens")
    named = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
    }
    made = {name: tokens[gguf.get(key)] for name, key in named.items() if gguf.get(key) is not None}
    made["tokenizer_class"] = "PreTrainedTokenizerFast"
    made["model_max_length"] = gguf.get("llama.context_length")
    made["clean_up_tokenization_spaces"] = False
    made["chat_template"] = gguf.get("tokenizer.chat_template")
    return made


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the GGUF to read")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write, made when missing")
    args = parser.parse_args()

    gguf = Gguf(args.model)
    if gguf.get("general.architecture") != "llama":
        raise SystemExit(f"no recipe for architecture {gguf.get('general.architecture')!r}")
    args.out.mkdir(parents=True, exist_ok=True)
    found = weights(gguf)
    save_file(found, args.out / "model.safetensors", metadata={"format": "pt"})
    write_json(args.out / "config.json", config(gguf, tied="lm_head.weight" not in found))
    write_json(args.out / "tokenizer_config.json", tokenizer_config(gguf))
    tokenizer(gguf).save(str(args.out / "tokenizer.json"))
    print(f"{len(found)} tensors, {sum(w.size for w in found.values())} weights")


if __name__ == "__main__":
    main()
