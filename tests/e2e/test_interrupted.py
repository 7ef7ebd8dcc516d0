"""A server that is killed leaves keys behind: their retries are told so once, and computed anew then."""

import threading
import time

import httpx
import pytest

from server import MODEL_NAME, Server

SECRET = "Zanzibar quokkas adore marmalade"
LONG = {"model": MODEL_NAME, "prompt": SECRET, "max_tokens": 3_000, "temperature": 1, "ignore_eos": True, "stream": True}
SHORT = {"model": MODEL_NAME, "prompt": SECRET, "max_tokens": 4, "temperature": 1}
STREAMS = 6


def start(tmp_path, life):
    config = {"policy": {"state_dir": tmp_path / "state"}, "replicas": {"kv_blocks": 2_000}}
    return Server(tmp_path / f"life-{life}", config=config)


def post(server, key, body):
    return httpx.post(f"{server.url}/v1/completions", json=body, headers={"Idempotency-Key": key}, timeout=60)


def stream_until_cut(server, key, seen):
    """Reads a stream until its connection goes, which is what the test is about."""
    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG, headers={"Idempotency-Key": key}, timeout=60
        ) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: "):
                    seen[key] = line
        seen[f"{key} ended"] = True
    except httpx.TransportError:
        pass


def run_streams(server, keys):
    seen = {}
    threads = [threading.Thread(target=stream_until_cut, args=(server, key, seen)) for key in keys]
    [thread.start() for thread in threads]
    deadline = time.monotonic() + 60
    while not all(key in seen for key in keys):
        assert time.monotonic() < deadline, f"only {sorted(seen)} have begun"
        time.sleep(0.02)
    return seen, threads


def is_interrupted(answer):
    return answer.status_code == 503 and answer.json()["error"]["code"] == "request_interrupted"


def test_keys_that_were_in_flight_are_known_to_the_next_life(tmp_path):
    keys = [f"{SECRET} {number}" for number in range(STREAMS)]
    server = start(tmp_path, 1)
    assert post(server, "whole", SHORT).status_code == 200
    assert post(server, "wrong", {**SHORT, "max_tokens": -1}).status_code == 400
    seen, threads = run_streams(server, keys)
    server.kill()
    [thread.join() for thread in threads]
    assert not any(f"{key} ended" in seen for key in keys), "every client got a closed socket"

    kept = (tmp_path / "state" / "calls").read_bytes()
    assert kept and SECRET.encode() not in kept and b"whole" not in kept
    assert (tmp_path / "state" / "calls").stat().st_mode & 0o077 == 0
    # A record that was being written, as a machine that loses power leaves it.
    (tmp_path / "state" / "calls").write_bytes(kept + b"\x01\x00torn")

    server = start(tmp_path, 2)
    try:
        # Ended before: nothing is known of it, as of any key that was forgotten.
        answer = post(server, "whole", SHORT)
        assert answer.status_code == 200 and "x-penstock-idempotent-replay" not in answer.headers
        assert post(server, "wrong", SHORT).status_code == 200
        conflict = post(server, keys[0], {**LONG, "max_tokens": 7})
        assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")
        told = [post(server, key, LONG) for key in keys[:3]]
        assert all(is_interrupted(answer) for answer in told), [answer.text for answer in told]
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in told)
        assert told[0].json()["error"]["type"] == "server_error"
        # Said once: the key is free, for whatever it is used for now.
        answer = post(server, keys[0], SHORT)
        assert answer.status_code == 200, answer.text
        again = post(server, keys[0], SHORT)
        assert again.content == answer.content and again.headers["x-penstock-idempotent-replay"] == "true"
        # The second life is killed as well, with one key that the first had left and one of its own.
        seen, threads = run_streams(server, ["own"])
    finally:
        server.kill()
    [thread.join() for thread in threads]

    server = start(tmp_path, 3)
    try:
        assert is_interrupted(post(server, "own", LONG))
        assert is_interrupted(post(server, keys[3], LONG)), "nobody has asked for it before"
        assert post(server, keys[1], SHORT).status_code == 200, "it was told to the second life's client"
        seen, threads = run_streams(server, ["drained"])
        server.process.terminate()
        assert server.wait() == 0
        [thread.join() for thread in threads]
    finally:
        server.kill()

    # An orderly end leaves nothing behind: each client has got its end.
    server = start(tmp_path, 4)
    try:
        assert post(server, "drained", SHORT).status_code == 200
        assert is_interrupted(post(server, keys[5], LONG)), "of the first life"
    finally:
        server.stop()


def test_without_a_state_folder_nothing_is_known(tmp_path):
    config = {"policy": {"state_dir": "off"}}
    server = Server(tmp_path / "one", config=config)
    seen, threads = run_streams(server, ["cut"])
    server.kill()
    [thread.join() for thread in threads]
    assert "cut" in seen
    server = Server(tmp_path / "two", config=config)
    try:
        assert post(server, "cut", SHORT).status_code == 200
    finally:
        server.stop()


@pytest.mark.parametrize("content", [b"", b"PNSTKEYS\x63\x00\x00\x00", b"\x00" * 5_000])
def test_a_damaged_file_costs_its_content_and_no_start(tmp_path, content):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "calls").write_bytes(content)
    server = start(tmp_path, 1)
    try:
        assert post(server, "any", SHORT).status_code == 200
        server.wait_for_log("calls of the last life cannot be read")
    finally:
        server.stop()
