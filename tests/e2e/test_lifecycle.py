"""From the command line to the exit code: help, configuration, start, replicas, retries, drain."""

import asyncio
import json
import re
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from server import MODEL_NAME, Server, run_to_end
from wire import Events

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

PROMPT = {"model": MODEL_NAME, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
LONG = {**PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two replicas and an admin listener."""
    server = Server(tmp_path_factory.mktemp("pair"), "--replicas", 2, "--kv-blocks", 600, "--admin-listen", "127.0.0.1:0")
    yield server
    server.stop()


# --- the command line


def test_help_teaches():
    code, text, _ = run_to_end("serve", "--help")
    assert code == 0
    for flag in (
        "--model",
        "--listen",
        "--replicas",
        "--threads",
        "--kv-blocks",
        "--keys",
        "--config",
        "--drain-grace",
        "--admin-listen",
    ):
        assert flag in text
    assert "Examples:" in text and "SIGTERM" in text and "[default: 127.0.0.1:8000]" in text
    assert run_to_end("--version")[1].startswith("penstock ")


def test_a_wrong_flag_is_named():
    code, _, text = run_to_end("serve", "--replica", "2")
    assert code == 2 and "--replicas" in text


def test_config_prints_the_effective_configuration(tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_text('[replicas]\ncount = 3\nkv_blocks = 77\n[objectives.gold]\nclass = 6\n')
    code, text, said = run_to_end("config", "--config", path, "--kv-blocks", 99, "--listen", "127.0.0.1:0")
    assert code == 0, said
    for line in ("count = 3", "kv_blocks = 99", 'listen = "127.0.0.1:0"', "class = 6", "drain_grace_s = 30"):
        assert line in text
    # What is printed is a configuration file.
    again = tmp_path / "again.toml"
    again.write_text(text)
    assert run_to_end("config", "--config", again)[1] == text
    code, _, said = run_to_end("config", "--kv-blocks", 1)
    assert code == 2 and "replicas.kv_blocks = 1" in said


@pytest.mark.skipif(tomllib is None, reason="tomllib needs Python 3.11")
def test_every_key_of_the_configuration_is_documented_with_its_default():
    _, text, _ = run_to_end("config")
    page = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+\.\w+)` \| [^|]* \| ([^|]*) \|", page, re.M))
    for section, keys in tomllib.loads(text).items():
        for key, value in keys.items():
            if isinstance(value, dict):
                # A class: one row stands for all eight.
                assert set(value) <= {"sheddable", "floor_blocks", "slo_ttft_ms"}
                continue
            shown = documented.pop(f"{section}.{key}", None)
            assert shown is not None, f"{section}.{key} is not in docs/configuration.md"
            assert shown.strip("` ") == json.dumps(value).strip('"'), f"{section}.{key}"
    # Keys without a value are absent from what is printed.
    assert all(shown.strip() == "none" for shown in documented.values()), documented


def test_an_address_in_use_is_said_clearly_and_at_once(pair):
    code, _, said = run_to_end("serve", "--listen", f"127.0.0.1:{pair.port}")
    assert code == 1
    assert f"127.0.0.1:{pair.port}" in said and "--listen" in said and "in use" in said
    assert "packing" not in said, "it is known before the model is loaded"


# --- running


def test_both_replicas_serve(pair):
    loads = httpx.get(f"{pair.url}/v1/loads").json()
    assert [load["dp_rank"] for load in loads["loads"]] == [0, 1]

    async def scene():
        async with httpx.AsyncClient(base_url=pair.url, timeout=60) as http:
            ready = asyncio.Semaphore(0)
            leave = asyncio.Event()

            async def one():
                async with http.stream("POST", "/v1/completions", json=LONG) as response:
                    # Kept: a reader that is let go closes the stream.
                    lines = response.aiter_lines()
                    await lines.__anext__()
                    ready.release()
                    await leave.wait()

            tasks = [asyncio.create_task(one()) for _ in range(2)]
            for _ in tasks:
                await ready.acquire()
            running, deadline = [], time.monotonic() + 10
            # Reports come at the end of a step.
            while running != [1, 1] and time.monotonic() < deadline:
                loads = (await http.get("/v1/loads")).json()
                running = [load["num_running_reqs"] for load in loads["loads"]]
            leave.set()
            await asyncio.gather(*tasks)
            return running

    assert asyncio.run(scene()) == [1, 1]
    pair.wait_until_idle()


def test_replicas_give_the_same_tokens(pair):
    body = {**PROMPT, "temperature": 1, "seed": 3, "max_tokens": 24}
    with httpx.Client(base_url=pair.url, timeout=60) as http:
        texts = {http.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(6)}
    assert len(texts) == 1


def test_bfloat16_products_answer_alike_alone_and_among_others(tmp_path):
    server = Server(tmp_path, "--precision", "bf16", "--packed-cache", "off")
    try:
        question = {"role": "user", "content": "What is the capital of France?"}
        chat = {"model": MODEL_NAME, "messages": [question], "temperature": 0, "max_tokens": 16}
        body = {**PROMPT, "max_tokens": 24, "logprobs": 2}

        async def scene():
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
                answer = (await http.post("/v1/chat/completions", json=chat)).json()

                async def ask(prompt):
                    choice = (await http.post("/v1/completions", json={**body, "prompt": prompt})).json()["choices"][0]
                    return choice["text"], choice["logprobs"]

                alone = await ask(PROMPT["prompt"])
                # The prompt may be found in the cache this time, in a batch of prompts of other lengths.
                others = [ask(f"{number} is a number" + " and so is the next one" * number) for number in range(6)]
                among = await asyncio.gather(ask(PROMPT["prompt"]), *others, ask(PROMPT["prompt"]))
                return answer["choices"][0]["message"]["content"], alone, among

        text, alone, among = asyncio.run(scene())
        assert "Paris" in text
        assert among[0] == alone and among[-1] == alone
        assert among[1] != alone
        assert re.search(r"precision=\W*bf16/(fma|avx512-bf16|amx-bf16)", re.sub(r"\x1b\[[0-9;]*m", "", server.log_path.read_text()))
    finally:
        server.stop()


def test_the_admin_listener_shows_what_is_in_force(pair):
    admin = pair.admin_url()
    config = httpx.get(f"{admin}/config").text
    assert "count = 2" in config and "kv_blocks = 600" in config
    replicas = httpx.get(f"{admin}/replicas").json()
    assert [replica["state"] for replica in replicas["replicas"]] == ["ready", "ready"]
    assert replicas["replicas"][0]["blocks"]["total"] == 600
    seats = httpx.get(f"{admin}/policies").json()["seats"]
    assert [seat["seat"] for seat in seats] == ["admission", "routing", "fairness", "eviction", "overload"]
    assert httpx.get(f"{pair.url}/config").status_code == 404, "not on the public listener"
    assert httpx.post(f"{admin}/v1/completions", json=PROMPT).status_code == 404, "and no work on the admin listener"


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_with_the_same_key_gets_the_first_answer(pair, stream):
    headers = {"Idempotency-Key": f"retry-{stream}"}
    body = {**PROMPT, "temperature": 1, "stream": stream}
    with httpx.Client(base_url=pair.url, timeout=60) as http:
        before = pair.metrics().sum("vllm:e2e_request_latency_seconds_count")
        first, second = (http.post("/v1/completions", json=body, headers=headers) for _ in range(2))
        assert first.status_code == second.status_code == 200
        # No seed: only a replay can be equal.
        assert first.content == second.content
        assert second.headers["x-penstock-idempotent-replay"] == "true"
        assert second.headers["content-type"] == first.headers["content-type"]
        assert pair.metrics().sum("vllm:e2e_request_latency_seconds_count") == before + 1
        conflict = http.post("/v1/completions", json={**body, "max_tokens": 9}, headers=headers)
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")


def test_a_retry_beside_the_first_call_waits_for_it_and_a_failure_frees_the_key(pair):
    headers = {"Idempotency-Key": "beside"}
    body = {**PROMPT, "temperature": 1, "max_tokens": 60, "ignore_eos": True}
    answers = []

    def call():
        answers.append(httpx.post(f"{pair.url}/v1/completions", json=body, headers=headers, timeout=60).content)

    threads = [threading.Thread(target=call) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(answers) == 3 and len(set(answers)) == 1
    headers = {"Idempotency-Key": "fails"}
    late = {**headers, "x-request-timeout-ms": "50"}
    failed = httpx.post(f"{pair.url}/v1/completions", json={**body, "max_tokens": 4000}, headers=late, timeout=60)
    assert failed.status_code == 504
    again = httpx.post(f"{pair.url}/v1/completions", json={**body, "max_tokens": 3}, headers=headers, timeout=60)
    assert again.status_code == 200


# --- stopping


def read_stream(server, body, into):
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        into["status"] = response.status_code
        into["started"].set()
        into["events"] = Events(response)


def streaming(server, body):
    """Starts a stream on a thread and returns once it runs."""
    into = {"started": threading.Event()}
    thread = threading.Thread(target=read_stream, args=(server, body, into), daemon=True)
    thread.start()
    assert into["started"].wait(30)
    return thread, into


def test_a_drain_lets_streams_finish_and_takes_nothing_new(pair):
    """Last in this file for this server: it ends it."""
    thread, into = streaming(pair, {**LONG, "max_tokens": 250})
    with httpx.Client(base_url=pair.url, timeout=30) as http:
        assert http.get("/health").status_code == 200
        pair.signal(signal.SIGTERM)
        pair.wait_for_log("draining")
        health = http.get("/health")
        assert (health.status_code, health.json()["reason"]) == (503, "draining")
        assert http.get("/live").status_code == 200
        refused = http.post("/v1/completions", json=PROMPT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-llm-d-request-dropped-reason"] == "draining"
    thread.join(60)
    into["events"].check_frame()
    assert into["events"].errors() == []
    reasons = [choice["finish_reason"] for chunk in into["events"].chunks() for choice in chunk["choices"]]
    assert reasons[-1] == "length"
    assert pair.wait() == 0
    assert "drained" in pair.log() and "panicked" not in pair.log()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{pair.url}/health")


def test_past_the_grace_streams_end_with_a_typed_error(tmp_path):
    server = Server(tmp_path, "--drain-grace", 1)
    try:
        thread, into = streaming(server, LONG)
        server.signal(signal.SIGTERM)
        thread.join(30)
        into["events"].check_frame()
        assert [error["code"] for error in into["events"].errors()] == ["draining"]
        assert into["events"].text(), "some text came before"
        assert server.wait() == 0
    finally:
        server.stop()
