"""What balancers, operators and other programs read: probes, metrics, load, ids, errors, the form of streams."""

import time

import httpx
import pytest

from server import MODEL_NAME
from wire import Events

PROMPT = {"model": MODEL_NAME, "prompt": "One two three", "max_tokens": 4, "temperature": 0}

# The Gateway API Inference Extension's model-server protocol, and vLLM's names for the rest.
NAMES = {
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_success_total": "counter",
    "penstock_admission_total": "counter",
    "penstock_policy_generation": "gauge",
    "penstock_kv_blocks": "gauge",
    "penstock_memory_bytes": "gauge",
    "penstock_policy_call_duration_seconds": "histogram",
}


def test_probes_answer(http):
    assert http.get("/live").status_code == 200
    health = http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


def test_metrics_have_the_names_that_others_read(http, server):
    assert http.post("/v1/completions", json=PROMPT).status_code == 200
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds = dict(line.split(" ")[2:4] for line in response.text.splitlines() if line.startswith("# TYPE"))
    assert {name: kinds.get(name) for name in NAMES} == NAMES
    metrics = server.metrics()
    assert all(f'model_name="{MODEL_NAME}"' in key for key in metrics.series)
    pool = server.kv_blocks()
    assert metrics.sum("vllm:cache_config_info", block_size="16", num_gpu_blocks=str(pool)) == 1
    assert metrics.sum("penstock_admission_total", outcome="Dispatched") > 0
    server.wait_until_idle()
    blocks = server.metrics()
    assert blocks.sum("penstock_kv_blocks", state="free") + blocks.sum("penstock_kv_blocks", state="cached") == pool


def test_counters_count_what_one_request_did(http, server):
    server.wait_until_idle()
    before = server.metrics()
    usage = http.post("/v1/completions", json=PROMPT).json()["usage"]
    after = server.metrics()

    def grown(name, **labels):
        return after.sum(name, **labels) - before.sum(name, **labels)

    assert grown("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("vllm:generation_tokens_total") == usage["completion_tokens"] == 4
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert grown("vllm:inter_token_latency_seconds_count") == 3
    assert grown("vllm:request_time_per_output_token_seconds_count") == 1
    assert grown("vllm:request_success_total", finished_reason="length") == 1
    assert grown("vllm:request_success_total") == 1


def test_loads_have_the_shape_that_routers_read(http, server):
    server.wait_until_idle()
    loads = http.get("/v1/loads").json()
    assert set(loads) >= {"timestamp", "dp_rank_count", "loads", "aggregate"}
    assert loads["dp_rank_count"] == len(loads["loads"]) == 1
    load = loads["loads"][0]
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"]) == (0, 0, 0, 0)
    assert load["max_total_num_tokens"] == server.kv_blocks() * 16
    assert load["token_usage"] == 0.0
    assert loads["aggregate"]["total_running_reqs"] == 0


def test_load_is_seen_while_something_runs(http, server):
    body = {**PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        # Kept: a reader that is let go closes the stream.
        lines = response.iter_lines()
        next(lines)
        deadline = time.monotonic() + 10
        # Reports come at the end of a step.
        while True:
            loads = httpx.get(f"{server.url}/v1/loads").json()
            metrics = server.metrics()
            if loads["loads"][0]["num_running_reqs"] or time.monotonic() > deadline:
                break
    assert loads["loads"][0]["num_running_reqs"] == 1
    assert loads["loads"][0]["num_used_tokens"] > 0
    assert metrics.sum("vllm:num_requests_running") == 1
    assert 0 < metrics.sum("vllm:kv_cache_usage_perc") < 1
    server.wait_until_idle()


@pytest.mark.parametrize(
    "method, path, body, status",
    [
        ("POST", "/v1/completions", PROMPT, 200),
        ("POST", "/v1/completions", {**PROMPT, "stream": True}, 200),
        ("POST", "/v1/completions", {**PROMPT, "max_tokens": 0}, 200),
        ("POST", "/v1/completions", {**PROMPT, "n": 99}, 400),
        ("POST", "/v1/completions", {**PROMPT, "model": "nobody"}, 404),
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/v1/models", None, 200),
        ("GET", "/health", None, 200),
    ],
)
def test_a_request_id_comes_back_and_is_made_where_there_is_none(http, method, path, body, status):
    mine = http.request(method, path, json=body, headers={"x-request-id": "my-id-7"})
    assert (mine.status_code, mine.headers["x-request-id"]) == (status, "my-id-7")
    first, second = (http.request(method, path, json=body) for _ in range(2))
    assert first.headers["x-request-id"] and first.headers["x-request-id"] != second.headers["x-request-id"]


def test_an_answer_says_which_policies_placed_it(http):
    assert int(http.post("/v1/completions", json=PROMPT).headers["x-penstock-policy-generation"]) >= 1


def test_errors_have_one_shape(http):
    for response in (
        http.post("/v1/completions", content=b"{"),
        http.post("/v1/completions", json={**PROMPT, "n": 0}),
        http.post("/v1/completions", json={**PROMPT, "suffix": "x"}),
        http.post("/v1/completions", json={**PROMPT, "model": "nobody"}),
        http.get("/nowhere"),
        http.delete("/health"),
    ):
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_framed_as_documented(http, path, n):
    body = {**PROMPT, "messages": [{"role": "user", "content": "Count to three."}], "stream": True, "n": n}
    body["stream_options"] = {"include_usage": True}
    with http.stream("POST", path, json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        events = Events(response)
    events.check_frame()
    chunks = events.chunks()
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * (len(chunks) - 1) + [0]
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * n
    for index in range(n):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["length"]


def test_a_stream_that_fails_ends_with_one_error_and_done(http):
    body = {**PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 2}
    with http.stream("POST", "/v1/completions", json=body, headers={"x-request-timeout-ms": "1500"}) as response:
        events = Events(response)
    events.check_frame()
    assert len(events.errors()) == 1
    assert "error" in events.chunks()[-1], "nothing but [DONE] comes after it"
