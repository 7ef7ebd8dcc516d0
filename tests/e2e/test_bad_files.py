"""Bad files: what the server cannot use keeps it from starting, and it says why in one line, without a panic."""

import json
import os
import re
import shutil
import struct
from pathlib import Path

import httpx
import pytest

from server import MODEL_NAME, Server, run_to_end


def refuses_to_start(*args, parts, code=1, env=None):
    """The process ends by itself, with this code, and says why in words without a panic."""
    status, _, said = run_to_end("serve", "--listen", "127.0.0.1:0", *args, env=env)
    assert status == code, said
    for part in parts:
        assert part in said, said
    assert "panic" not in said and "RUST_BACKTRACE" not in said
    return said


def test_all_faults_of_a_configuration_are_reported_at_once(tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_text(
        '[server]\nlisten = "nowhere"\nfoo = 1\n[replicas]\ncount = 0\nkv_blocks = "many"\n'
        '[limits]\nqueue_requests_max = 0\n[http]\nbody_bytes_max = 1\n[nothing]\n[classes."9"]\nsheddable = true\n'
    )
    parts = [
        "server.listen",
        "server.foo",
        "replicas.count = 0",
        "replicas.kv_blocks",
        "limits.queue_requests_max",
        "http.body_bytes_max",
        "[nothing]",
        "classes.9",
        str(path),
    ]
    refuses_to_start("--config", path, parts=parts, code=2)
    for text in ("[server", "= 5", "\x00"):
        path.write_text(text)
        refuses_to_start("--config", path, parts=[str(path)], code=2)
    refuses_to_start("--config", tmp_path / "absent.toml", parts=["absent.toml"], code=2)


@pytest.mark.parametrize(
    "text, part",
    [
        ("", "tenant"),
        ("[[tenant]]\n", "name"),
        ('[[tenant]]\nname = "a"\nkeys_sha256 = ["sk-plain-text-key"]\n', "SHA-256"),
        ('[[tenant]]\nname = "a"\nkeys_sha256 = []\n', "keys_sha256"),
        ("not toml [", "keys.toml"),
    ],
)
def test_a_broken_key_file_keeps_the_server_from_starting(tmp_path, text, part):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    said = refuses_to_start("--keys", path, parts=[part, "keys.toml"], env={"PENSTOCK_CACHE": str(tmp_path)})
    assert "sk-plain-text-key" not in said


# --- model files


def demo():
    return Path(os.environ["PENSTOCK_DEMO_MODEL"])


def damaged(tmp_path, change):
    path = tmp_path / "damaged.gguf"
    shutil.copyfile(demo(), path)
    with open(path, "r+b") as file:
        change(file)
    return path


def metadata_at(name):
    """Where the value of a metadata key begins: behind its name and its type."""
    head = demo().open("rb").read(4 << 20)
    at = head.index(struct.pack("<Q", len(name)) + name.encode())
    return at + 8 + len(name) + 4


def refuses_model(path):
    said = refuses_to_start("--model", path, parts=["cannot be served", path.name])
    (line,) = [line for line in said.splitlines() if line.startswith("penstock: ")]
    return line


@pytest.mark.parametrize("length", [0, 3, 23, 24, 1_000, 700_000, 1_769_060, 1_780_000, 60_000_000])
def test_a_truncated_model_is_refused(tmp_path, length):
    line = refuses_model(damaged(tmp_path, lambda file: file.truncate(length)))
    assert re.search(r"truncated|damaged|not a model|ends|beyond|fetch it again", line), line


def flip(at, mask):
    def change(file):
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))

    return change


@pytest.mark.parametrize(
    "what",
    [
        "magic",
        "version",
        "tensor count",
        "key count",
        "key length",
        "block count",
        "head count",
        "embedding length",
        "vocabulary length",
        "tokenizer kind",
        "tensor name",
        "tensor shape",
        "tensor type",
        "tensor offset",
    ],
)
def test_a_flipped_bit_in_what_describes_the_model_is_refused(tmp_path, what):
    tensors = metadata_at("general.quantization_version") + 4
    name = len("token_embd.weight")
    place = {
        "magic": (0, 0x01),
        "version": (4, 0x40),
        "tensor count": (8 + 5, 0x80),
        "key count": (16, 0x10),
        "key length": (24 + 6, 0x04),
        "block count": (metadata_at("llama.block_count"), 0x20),
        "head count": (metadata_at("llama.attention.head_count"), 0x02),
        "embedding length": (metadata_at("llama.embedding_length"), 0x40),
        "vocabulary length": (metadata_at("tokenizer.ggml.tokens") + 4 + 2, 0x01),
        "tokenizer kind": (metadata_at("tokenizer.ggml.model") + 8, 0x01),
        "tensor name": (tensors + 8, 0x01),
        "tensor shape": (tensors + 8 + name + 4, 0x01),
        "tensor type": (tensors + 8 + name + 4 + 16, 0x20),
        "tensor offset": (tensors + 8 + name + 4 + 16 + 4 + 6, 0x10),
    }[what]
    refuses_model(damaged(tmp_path, flip(*place)))


def test_what_is_no_model_is_refused_by_name(tmp_path):
    refuses_to_start("--model", tmp_path / "absent.gguf", parts=["absent.gguf"])
    refuses_to_start("--model", tmp_path, parts=[str(tmp_path), "config.json"])
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    refuses_to_start("--model", text, parts=["notes.txt"])
    refuses_to_start(parts=["cargo xtask model"], env={"PENSTOCK_CACHE": str(tmp_path / "empty")})


def folder_model(path, vocabulary=300):
    """A tiny Llama in a folder, with zeros for weights and no tokenizer."""
    hidden, inner = 64, 128
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": vocabulary,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        layer + "input_layernorm.weight": (hidden,),
        layer + "post_attention_layernorm.weight": (hidden,),
        layer + "self_attn.q_proj.weight": (hidden, hidden),
        layer + "self_attn.k_proj.weight": (hidden // 2, hidden),
        layer + "self_attn.v_proj.weight": (hidden // 2, hidden),
        layer + "self_attn.o_proj.weight": (hidden, hidden),
        layer + "mlp.gate_proj.weight": (inner, hidden),
        layer + "mlp.up_proj.weight": (inner, hidden),
        layer + "mlp.down_proj.weight": (hidden, inner),
    }
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


def tokenizer_json(words):
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {f"w{at}": at for at in range(words)}, "merges": []},
    }


def test_a_folder_without_or_with_the_wrong_tokenizer_is_refused(tmp_path):
    path = tmp_path / "tiny"
    folder_model(path)
    refuses_to_start("--model", path, parts=["tokenizer.json", "tiny"])
    (path / "tokenizer.json").write_text("{")
    refuses_to_start("--model", path, parts=["tokenizer", "tiny"])
    # A tokenizer of another model: more ids than the embedding has rows.
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json(400)))
    refuses_to_start("--model", path, parts=["tokenizer", "400", "300"])


def test_without_a_chat_template_chat_is_a_422_and_completions_work(tmp_path):
    name = b"tokenizer.chat_template"
    at = demo().open("rb").read(4 << 20).index(name)

    def rename(file):
        file.seek(at)
        file.write(b"tokenizer.chat_templat_")

    server = Server(tmp_path / "server", model=damaged(tmp_path, rename))
    try:
        chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=30)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (422, "messages", "unsupported_value")
        assert "template" in error["message"] and "completions" in error["message"]
        body = {"model": MODEL_NAME, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
        assert "Paris" in answer.json()["choices"][0]["text"]
    finally:
        assert server.stop() == 0
