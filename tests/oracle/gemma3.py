#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What do other implementations answer for Gemma 3 270M?

Token ids come from SentencePiece itself, given the tokens, scores and kinds that the GGUF holds, for the texts of
tokenizer.jsonl and a few more, into gemma3_tokenizer.jsonl: {"text", "parse_special", "ids"}, no BOS added. SentencePiece
never reads control tokens in a text: where they are to be parsed, the text is cut at them, longest spelling first.

Logits come from transformers in float32, on the GGUF's weights as the PyPI package gguf unpacks them, for the raw texts
of texts.jsonl named below, each with BOS in front; the longest is cut, but not so short that the window of 512 tokens
would not matter. They go to gemma3_logits.bin, laid out as logits.bin is (see logits.py) but for the magic "PSLOGIT2"
and token ids in 32 bits.
"""

import argparse
import hashlib
import json
import re
import struct
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from logits import largest, log_sum_exp
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizer_ids import line_of
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

HERE = Path(__file__).resolve().parent
TEXTS = ["short_fact", "long_mill", "code_rust", "maths", "german", "russian", "chinese", "emoji_mix"]
TOKENS_MAX = 800
KEPT = 12
MORE = ["<start_of_turn>user\nHi<end_of_turn>\n", "<bos><eos><pad>", "<unused7> <mask>", "a\n\n\nb   c\t\td", " lead", "▁ raw",
        "\u0001\u0002", "\U0001f9d1\u200d\U0001f680 \U000e0041", "ＡＢＣ ﬁ", "1234567890 12.5", "\r\n\r\n", "   ", "aaaaaaaaaaaaaaaaaaaaaaaaa"]


def weights(reader):
    """Hugging Face names and values. Files hold norms as they are applied, Hugging Face the difference to 1."""
    parts = {
        "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    tops = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    out = {}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        if stem in tops:
            name = tops[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{parts[part]}"
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        out[name + ".weight"] = torch.from_numpy(values - 1 if "norm" in name else values)
    return out


def build(reader):
    value = lambda key: reader.fields["gemma3." + key].contents()
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=value("embedding_length"), intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"), num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"), head_dim=value("attention.key_length"),
        max_position_embeddings=value("context_length"), rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        sliding_window=value("attention.sliding_window"), query_pre_attn_scalar=value("attention.key_length"),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": value("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(config.num_hidden_layers)]
    assert config.layer_types == kinds, config.layer_types
    config._attn_implementation = "eager"
    model = Gemma3ForCausalLM(config).eval().float()
    missing, unexpected = model.load_state_dict(weights(reader), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


CONTROL, USER_DEFINED, BYTE = 3, 4, 6


class Pieces:
    """SentencePiece with the vocabulary of a GGUF file."""

    def __init__(self, reader):
        value = lambda key: reader.fields["tokenizer.ggml." + key].contents()
        tokens, scores, kinds = value("tokens"), value("scores"), value("token_type")
        assert not value("add_space_prefix") and value("model") == "llama"
        proto = ModelProto()
        unknown = value("unknown_token_id")
        for number, (token, score, kind) in enumerate(zip(tokens, scores, kinds)):
            piece = proto.pieces.add()
            # The file has spaces for the marks that SentencePiece has in tokens of the model's makers.
            piece.piece = token.replace(" ", "\u2581") if kind == USER_DEFINED else token
            piece.score = score
            piece.type = 2 if number == unknown else kind
        proto.trainer_spec.model_type = 2
        proto.trainer_spec.byte_fallback = True
        proto.trainer_spec.unk_piece = tokens[unknown]
        proto.trainer_spec.unk_id, proto.trainer_spec.pad_id = unknown, value("padding_token_id")
        proto.trainer_spec.bos_id, proto.trainer_spec.eos_id = value("bos_token_id"), value("eos_token_id")
        proto.trainer_spec.bos_piece, proto.trainer_spec.eos_piece = tokens[value("bos_token_id")], tokens[value("eos_token_id")]
        proto.trainer_spec.pad_piece = tokens[value("padding_token_id")]
        proto.normalizer_spec.name = "identity"
        proto.normalizer_spec.add_dummy_prefix = False
        proto.normalizer_spec.remove_extra_whitespaces = False
        self.engine = SentencePieceProcessor(model_proto=proto.SerializeToString())
        self.bos = value("bos_token_id")
        self.control = {token: number for number, (token, kind) in enumerate(zip(tokens, kinds)) if kind == CONTROL}
        longest_first = sorted(self.control, key=len, reverse=True)
        self.cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def ids(self, text, parse_special):
        if not parse_special:
            return self.engine.encode(text)
        out = []
        for number, part in enumerate(self.cut.split(text)):
            out += [self.control[part]] if number % 2 else self.engine.encode(part)
        return out


def write_ids(pieces, path):
    lines = (HERE / "tokenizer.jsonl").read_text(encoding="utf-8").split("\n")
    cases = [json.loads(line) for line in lines if line]
    # SentencePiece takes a text up to its first NUL for the whole.
    cases = [(case["text"], case["parse_special"]) for case in cases if "\0" not in case["text"]]
    cases += [(text, special) for text in MORE for special in (False, True)]
    path.write_text("".join(line_of(t, s, pieces.ids(t, s)) for t, s in cases), encoding="utf-8", newline="\n")
    print(f"{len(cases)} texts")


@torch.inference_mode()
def write_logits(pieces, model, digest, path):
    entries = [json.loads(line) for line in (HERE / "texts.jsonl").read_text(encoding="utf-8").split("\n") if line]
    texts = {entry["name"]: entry["text"] for entry in entries if entry["name"] in TEXTS}
    parts = [b"PSLOGIT2", digest, struct.pack("<III", model.config.vocab_size, KEPT, len(TEXTS))]
    positions = 0
    for name in TEXTS:
        ids = [pieces.bos] + pieces.ids(texts[name], False)
        ids = ids[:TOKENS_MAX]
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
        raw = name.encode("utf-8")
        parts += [struct.pack("<H", len(raw)), raw, struct.pack("<I", len(ids)), np.asarray(ids, "<u4").tobytes()]
        for row in logits:
            top = largest(row, KEPT)
            parts += [struct.pack("<f", log_sum_exp(row)), row[top].astype("<f4").tobytes(), top.astype("<u4").tobytes()]
        positions += len(ids)
        print(f"{name}: {len(ids)} tokens, first choices {logits.argmax(-1)[-4:]}", flush=True)
    path.write_bytes(b"".join(parts))
    print(f"{positions} positions")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="gemma-3-270m.Q4_K_M.gguf, as `cargo xtask model --which gemma3` puts it")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the answers (default: beside this)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    with open(args.gguf, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    reader = GGUFReader(args.gguf)
    pieces = Pieces(reader)
    write_ids(pieces, args.out / "gemma3_tokenizer.jsonl")
    write_logits(pieces, build(reader), digest, args.out / "gemma3_logits.bin")


if __name__ == "__main__":
    main()
