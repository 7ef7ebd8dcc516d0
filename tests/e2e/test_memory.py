"""Memory: what the server says it will take, what it takes, and what it refuses to begin with."""

import os
import re

import httpx
import pytest

from server import MODEL_NAME, Server, run_to_end

MIB = 1 << 20
GIB = 1 << 30
# SmolLM2-135M: 30 layers of 3 KV heads of 64, keys and values, two bytes each.
TOKEN_BYTES = 30 * 3 * 64 * 2 * 2
CONTEXT = 8192
USES = ("weights", "kv", "workspace", "reserve")


def refused(*args):
    """The server ends by itself before it loads anything, and says why in one line."""
    code, _, said = run_to_end("serve", "--listen", "127.0.0.1:0", *args)
    assert code == 1, said
    assert "loading the weights" not in said and "panic" not in said, said
    (line,) = [line for line in said.splitlines() if line.startswith("penstock: ")]
    return line


@pytest.fixture
def demo_flags():
    return ("--model", os.environ["PENSTOCK_DEMO_MODEL"])


def uses(server):
    metrics = server.metrics()
    return {use: metrics.sum("penstock_memory_bytes", use=use) for use in (*USES, "limit")}


def answers(server, tokens):
    body = {"model": MODEL_NAME, "prompt": [1] * (tokens - 4), "max_tokens": 4, "temperature": 0}
    with httpx.Client(base_url=server.url, timeout=120) as http:
        return http.post("/v1/completions", json=body)


def test_a_context_that_does_not_fit_is_refused_and_the_remedy_helps(demo_flags, tmp_path):
    limit = 520 * MIB
    line = refused(*demo_flags, "--memory-bytes", limit)
    for part in ("context", "512 blocks", "520 MiB", "replicas.memory_bytes", "--kv-dtype int8", "--model"):
        assert part in line, line
    tokens = int(re.search(r"--context-tokens (\d+)", line).group(1))
    assert 16 <= tokens < CONTEXT
    server = Server(tmp_path / "shorter", "--memory-bytes", limit, "--context-tokens", tokens)
    try:
        assert server.kv_blocks() * 16 >= tokens
        told = uses(server)
        assert sum(told[use] for use in USES) <= told["limit"] == limit
        assert answers(server, tokens).status_code == 200
        longer = answers(server, tokens + 1)
        assert longer.status_code == 400, longer.text
    finally:
        server.stop()


def test_blocks_that_do_not_fit_are_refused_and_those_named_do(demo_flags, tmp_path):
    line = refused(*demo_flags, "--memory-bytes", GIB, "--replicas", 2, "--kv-blocks", 20_000)
    for part in ("20000 blocks", "1024 MiB", "2 replicas", "fewer replicas"):
        assert part in line, line
    blocks = int(re.search(r"--kv-blocks (\d+)", line).group(1))
    assert 2 <= blocks < 20_000
    one_more = refused(*demo_flags, "--memory-bytes", GIB, "--replicas", 2, "--kv-blocks", blocks + 1)
    assert f"{blocks + 1} blocks" in one_more
    server = Server(tmp_path / "fits", "--memory-bytes", GIB, "--replicas", 2, "--kv-blocks", blocks)
    try:
        told = uses(server)
        assert 2 * blocks * 16 * TOKEN_BYTES <= told["kv"] <= told["limit"] == GIB
        # A pool of a named size is there from the start.
        assert 2 * blocks * 16 * TOKEN_BYTES < server.rss_kib() * 1024 < GIB
    finally:
        server.stop()


def test_a_limit_below_the_model_is_refused(demo_flags):
    line = refused(*demo_flags, "--memory-bytes", 100 * MIB)
    for part in ("100 MiB of memory are too few", "weights take 9", "reserve", "--memory-bytes"):
        assert part in line, line


@pytest.mark.parametrize("kv_dtype, share", [("bf16", 1.0), ("int8", 136 / 256)])
def test_the_pool_is_what_fits_and_its_memory_is_taken_with_its_use(tmp_path, figure, kv_dtype, share):
    server = Server(tmp_path / "own", "--memory-bytes", GIB, "--kv-dtype", kv_dtype)
    try:
        told = uses(server)
        assert told["limit"] == GIB and sum(told[use] for use in USES) <= GIB
        # All that is left is used, but for less than a block and its books.
        block = 16 * TOKEN_BYTES * share
        assert GIB - sum(told[use] for use in USES) < block + 4096
        pool = server.kv_blocks() * block
        assert pool <= told["kv"] <= pool * 1.02
        fresh = server.rss_kib() * 1024
        assert fresh < told["weights"] + told["workspace"] + told["reserve"], "nothing of the pool is there yet"
        assert answers(server, 4_000).status_code == 200
        used = server.rss_kib() * 1024
        assert used - fresh > 4_000 * TOKEN_BYTES * share * 0.9, "what was stored is there now"
        assert used < GIB
        figure(f"{kv_dtype}: {server.kv_blocks()} blocks in 1 GiB; resident {fresh >> 20} MiB, then {used >> 20} MiB")
        table = re.findall(r"^    (weights|KV|workspace|reserve|together) +(\d+) MiB  (.+)$", server.log(), re.M)
        assert [name for name, _, _ in table] == ["weights", "KV", "workspace", "reserve", "together"]
        for (_, mib, _), use in zip(table, USES):
            assert int(mib) == -(-int(told[use]) // MIB)
        assert f"{server.kv_blocks()} blocks, {server.kv_blocks() * 16} tokens" in table[1][2]
        assert "of 1024 MiB: replicas.memory_bytes" in table[4][2]
    finally:
        server.stop()


def test_without_a_word_the_pool_holds_a_context_and_no_more_than_can_be_used(server):
    told = uses(server)
    assert sum(told[use] for use in USES) <= told["limit"]
    assert CONTEXT <= server.kv_blocks() * 16 <= 64 * CONTEXT


def test_the_fingerprint_tells_how_keys_and_values_are_held(server, tmp_path):
    other = Server(tmp_path / "int8", "--kv-blocks", 64, "--kv-dtype", "int8")
    try:
        seen = [answers(each, 16).json()["system_fingerprint"] for each in (server, server, other)]
    finally:
        other.stop()
    assert seen[0] == seen[1] != seen[2]
    assert all(re.fullmatch(r"[0-9a-f]{12}", fingerprint) for fingerprint in seen)
