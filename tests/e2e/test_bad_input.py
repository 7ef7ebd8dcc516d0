"""Bad requests of every kind: a clear error, and the process lives."""

import os
import signal
import socket
import time

import httpx
import pytest

from keys import bearer, key_file
from server import MODEL_NAME, Server
from wire import connect, exchange, parse_head, post_bytes, read_to_end

KEY = "sk-e2e-Zx81-never-in-a-log"
SECRET_PROMPT = "the heron counts nineteen violet keys"
HEADERS_TIMEOUT_MS = 1_500
BODY_TIMEOUT_MS = 1_500


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A server with short timeouts and a key file, at the most talkative log level."""
    config = {"http": {"headers_timeout_ms": HEADERS_TIMEOUT_MS, "body_timeout_ms": BODY_TIMEOUT_MS}}
    folder = tmp_path_factory.mktemp("strict")
    server = Server(folder, config=config, keys=key_file(("one", KEY, {})), env={"PENSTOCK_LOG": "trace"})
    yield server
    server.stop()


@pytest.fixture(scope="module")
def caller(strict):
    with httpx.Client(base_url=strict.url, timeout=30, headers=bearer(KEY)) as client:
        yield client


def is_error(response, status, param=None, code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"] and error["code"]
    assert "x-request-id" in response.headers
    if param:
        assert error["param"] == param, error
    if code:
        assert error["code"] == code, error
    return error


def chat_body(**fields):
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}


# --- bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b'{"model": "demo", "messages": [}',
        b'{"model": "demo"} trailing',
        b"\xff\xfe{}",
        b"\x00" * 64,
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"model": "demo", "temperature": NaN}',
        b'{"model": "demo", "temperature": 1e999}',
        b'{"model": "demo", "prompt": "\\ud800"}',
    ],
    ids=lambda body: f"{len(body)}-bytes-{body[:12]!r}",
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_malformed_json_is_a_400(caller, path, body):
    error = is_error(caller.post(path, content=body), 400, code="malformed_request")
    assert "JSON" in error["message"]


@pytest.mark.parametrize(
    "field, value",
    [
        ("messages", None),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [1]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "king", "content": "hi"}]),
        ("messages", [{"content": "hi"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("model", 7),
        ("model", None),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "8"),
        ("max_tokens", 10**30),
        ("max_tokens", 10**6),
        ("max_completion_tokens", -5),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 9),
        ("n", 10**12),
        ("n", [1]),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 2000]),
        ("stop", {"a": 1}),
        ("seed", 1.5),
        ("logprobs", "yes"),
        ("top_logprobs", 21),
        ("top_logprobs", 3),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {"5": 1000}),
        ("logit_bias", {str(at): 1 for at in range(2000)}),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("ignore_eos", 1),
        ("priority", "high"),
        ("priority", 2**40),
        ("stop_token_ids", [1] * 65),
        ("stop_token_ids", [10**9]),
        ("penstock", {"retention": 101}),
        ("penstock", 3),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_value_is_a_400_that_names_its_field(caller, field, value):
    error = is_error(caller.post("/v1/chat/completions", json=chat_body(**{field: value})), 400)
    assert error["param"].startswith(("max_tokens" if field == "max_completion_tokens" and value == 10**6 else field)), error


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [], {}, [1.5], [-1], [10**9], [[]], [["x"]], ["x", 5], ["x"] * 33, [None], "", [""]],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_prompt_is_a_400(caller, prompt):
    is_error(caller.post("/v1/completions", json={"model": MODEL_NAME, "prompt": prompt}), 400, param="prompt")


@pytest.mark.parametrize(
    "field, value",
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("best_of", 2),
        ("use_beam_search", True),
        ("suffix", "end"),
        ("audio", {"voice": "x"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}]),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_known_and_not_built_is_a_422_and_never_ignored(caller, field, value):
    error = is_error(caller.post("/v1/chat/completions", json=chat_body(**{field: value})), 422, code="unsupported_value")
    assert error["param"].startswith(field)


def test_unknown_fields_are_ignored(caller):
    body = chat_body(user="someone", metadata={"a": 1}, store=False, a_field_of_tomorrow={"x": [1]})
    assert caller.post("/v1/chat/completions", json=body).status_code == 200


def test_an_unknown_model_and_an_unknown_path_are_404(caller):
    error = is_error(caller.post("/v1/chat/completions", json=chat_body(model="gpt-99")), 404, "model", "model_not_found")
    assert MODEL_NAME in error["message"]
    is_error(caller.get("/v1/nothing"), 404, code="not_found")
    is_error(caller.get("/v1/models/gpt-99"), 404, code="model_not_found")
    is_error(caller.get("/v1/chat/completions"), 405)


# --- sizes and times


@pytest.mark.parametrize(
    "prompt",
    ["word " * 9_000, "x" * 4_000_000, list(range(100, 9_300)), ["ok", "word " * 9_000]],
    ids=["text", "4-MB-without-a-space", "ids", "one-of-two"],
)
def test_a_prompt_that_never_fits_is_a_400(caller, prompt):
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1}
    is_error(caller.post("/v1/completions", json=body), 400, code="context_length_exceeded")


def test_a_prompt_and_an_answer_that_do_not_fit_together_are_a_400(caller):
    body = {"model": MODEL_NAME, "prompt": "hi", "max_tokens": 8192}
    is_error(caller.post("/v1/completions", json=body), 400, "max_tokens", "context_length_exceeded")


def test_a_declared_body_of_100_mb_is_refused_before_it_is_sent(strict):
    head = post_bytes("/v1/chat/completions", b"", key=KEY).replace(b"Content-Length: 0", b"Content-Length: 104857600")
    status, _, rest = parse_head(exchange(strict.port, head))
    assert status == 413 and b"body_too_large" in rest


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_mb_that_is_sent_all_the_same_is_a_413(strict, chunked):
    piece = b" " * (1 << 20)
    before = strict.rss_kib()
    with connect(strict.port) as link:
        head = post_bytes("/v1/chat/completions", b"", key=KEY)
        how = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 104857600"
        link.sendall(head.replace(b"Content-Length: 0", how))
        sent = 0
        try:
            while sent < 100:
                link.sendall(b"100000\r\n" + piece + b"\r\n" if chunked else piece)
                sent += 1
        except ConnectionError:
            pass
        # A reset may overtake the answer; what counts is that no more was read.
        answer = read_to_end(link)
    assert sent < 100, "the server read it all"
    if answer:
        assert parse_head(answer)[0] == 413
    assert strict.rss_kib() - before < 64 << 10


def test_headers_that_trickle_in_are_cut_off(strict):
    with connect(strict.port) as link:
        link.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        start = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - start < 20:
                link.sendall(b"x-slow: 1\r\n"[: 1 + int(time.monotonic() * 7) % 3])
                time.sleep(0.1)
                link.settimeout(0.01)
                try:
                    if link.recv(4096) == b"":
                        raise ConnectionError("closed")
                except TimeoutError:
                    pass
                link.settimeout(10)


def test_a_body_that_trickles_in_is_a_408(strict):
    request = post_bytes("/v1/completions", {"model": MODEL_NAME, "prompt": "hi", "max_tokens": 1}, key=KEY)
    with connect(strict.port) as link:
        link.sendall(request[:-10])
        answer = b""
        for byte in request[-10:]:
            link.settimeout(0.4)
            try:
                answer += link.recv(4096)
                break
            except TimeoutError:
                link.sendall(bytes([byte]))
        answer += read_to_end(link)
    status, headers, rest = parse_head(answer)
    assert (status, headers["connection"]) == (408, "close") and b"upload_timeout" in rest


def test_a_body_that_breaks_off_harms_nobody(strict):
    request = post_bytes("/v1/completions", {"model": MODEL_NAME, "prompt": "hi"}, key=KEY)
    with connect(strict.port) as link:
        link.sendall(request[:-10])
        link.shutdown(socket.SHUT_WR)
        read_to_end(link)
    strict.wait_until_idle()


def test_a_refusal_ahead_of_the_body_leaves_the_connection_usable(strict):
    body = {"model": MODEL_NAME, "prompt": "hi", "max_tokens": 1}
    refused, good = (post_bytes("/v1/completions", body, key=key) for key in ("sk-wrong", KEY))
    head_end = refused.index(b"\r\n\r\n") + 4
    with connect(strict.port) as link:
        link.sendall(refused[:head_end])
        time.sleep(0.2)
        link.sendall(refused[head_end:])
        assert link.recv(4096).startswith(b"HTTP/1.1 401")
        link.sendall(good)
        assert link.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "name, value, status",
    [
        ("x-request-timeout-ms", "soon", 400),
        ("x-request-timeout-ms", "0", 400),
        ("x-request-timeout-ms", "-5", 400),
        ("x-request-timeout-ms", "99999999999999999999", 400),
        ("x-slo-ttft-ms", "1.5", 400),
        ("x-slo-tpot-ms", "", 400),
        ("x-request-id", "x" * 300, 400),
        ("Idempotency-Key", "y" * 300, 400),
        ("x-penstock-session", "z" * 300, 400),
        ("x-llm-d-inference-objective", "nobody-configured-this", 400),
        ("x-llm-d-inference-fairness-id", "w" * 300, 400),
        ("traceparent", "garbage", 200),
    ],
)
def test_bad_headers_are_named(caller, name, value, status):
    response = caller.post("/v1/chat/completions", json=chat_body(), headers={name: value})
    if status == 200:
        assert response.status_code == 200
    else:
        is_error(response, 400, param=name.lower())


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x-%d: 1\r\n" % at for at in range(500)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nx-long: " + b"v" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(64),
    ],
    ids=["garbage", "version", "length", "two-lengths", "many-headers", "long-header", "long-path", "tls"],
)
def test_broken_http_is_refused(strict, request_bytes):
    answer = exchange(strict.port, request_bytes)
    assert answer == b"" or parse_head(answer)[0] in (400, 414, 431), answer[:200]


# --- what must not be seen


def test_prompts_and_keys_are_in_no_log_and_no_metric(strict, caller):
    good = {"model": MODEL_NAME, "prompt": SECRET_PROMPT, "max_tokens": 4, "echo": True}
    assert caller.post("/v1/completions", json=good).status_code == 200
    messages = [{"role": "user", "content": SECRET_PROMPT}]
    assert caller.post("/v1/chat/completions", json=chat_body(messages=messages)).status_code == 200
    # And on every way to an error.
    refused = [
        caller.post("/v1/completions", content=f'{{"prompt": "{SECRET_PROMPT}" oops'.encode()),
        caller.post("/v1/completions", json={**good, "n": 99}),
        caller.post("/v1/completions", json={**good, "prompt": SECRET_PROMPT + " x" * 9000}),
        caller.post("/v1/chat/completions", json=chat_body(messages=[{"role": SECRET_PROMPT, "content": "x"}])),
        caller.post("/v1/completions", json=good, headers=bearer(KEY + "-wrong")),
        caller.post("/v1/completions", json=good, headers={"Authorization": KEY}),
    ]
    for response in refused:
        assert response.status_code in (400, 401)
        assert "heron" not in response.text and KEY not in response.text
    with pytest.raises(httpx.ReadTimeout):
        caller.post("/v1/completions", json={**good, "max_tokens": 4000, "ignore_eos": True}, timeout=0.3)
    strict.wait_until_idle()
    strict.signal(signal.SIGHUP)
    strict.wait_for_log("key file")
    log, metrics = strict.log(), strict.metrics().text
    assert "trace" in log.lower() or "DEBUG" in log, "the level was the most talkative one"
    for hidden in ("heron", "violet keys", KEY, key_file(("one", KEY, {})).split('"')[3]):
        assert hidden not in log, hidden
        assert hidden not in metrics, hidden


def test_a_log_in_a_file_has_no_colours(strict):
    assert "\x1b[" not in strict.log()


# --- the key file


def test_a_broken_key_file_keeps_the_last_good_one(strict, caller):
    good = strict.keys_path.read_text()
    try:
        strict.keys_path.write_text(good + "[[tenant]]\nname = 5\n")
        strict.signal(signal.SIGHUP)
        strict.wait_for_log("the last good one stays in force")
        assert caller.get("/v1/models").status_code == 200
        strict.keys_path.write_text(good + key_file(("two", "sk-second", {})))
        strict.signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while httpx.get(f"{strict.url}/v1/models", headers=bearer("sk-second")).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # A key that is gone from the file is gone from the server.
        strict.keys_path.write_text(key_file(("two", "sk-second", {})))
        strict.signal(signal.SIGHUP)
        while caller.get("/v1/models").status_code != 401:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        strict.keys_path.write_text(good)
        strict.signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while caller.get("/v1/models").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_process_has_lived_through_all_of_it(strict, caller):
    strict.wait_until_idle()
    assert caller.post("/v1/chat/completions", json=chat_body()).status_code == 200
    assert "panicked" not in strict.log()
