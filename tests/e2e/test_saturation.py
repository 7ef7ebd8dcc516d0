"""Liveness under load: a server that has too much to do is not killed for it, and gets no traffic while nothing moves."""

import threading
import time

import httpx

from server import MODEL_NAME, Server

CLIENTS = 96


class Prober:
    """Asks both probes again and again, as a supervisor and a balancer do."""

    def __init__(self, server):
        self.server, self.live, self.health, self.faults = server, [], [], []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.thread.join()

    def run(self):
        with httpx.Client(base_url=self.server.url, timeout=30) as http:
            while not self.stopped.wait(0.02):
                try:
                    self.live.append(http.get("/live").status_code)
                    answer = http.get("/health")
                    self.health.append((answer.status_code, answer.json().get("reason")))
                except httpx.HTTPError as fault:
                    self.faults.append(repr(fault))


def until(holds, what, limit_s=120):
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)


def test_a_saturated_server_stays_alive(tmp_path):
    config = {
        "limits": {"queue_requests_max": 8, "queue_wait_ms": 2_000},
        "http": {"requests_max": 48},
        "replicas": {"kv_blocks": 400, "slots": 8},
    }
    server = Server(tmp_path, config=config)
    body = {"model": MODEL_NAME, "prompt": "One two three", "max_tokens": 400, "ignore_eos": True}
    statuses, lock, stop = [], threading.Lock(), threading.Event()

    def client():
        with httpx.Client(base_url=server.url, timeout=120) as http:
            while not stop.is_set():
                answer = http.post("/v1/completions", json=body)
                with lock:
                    statuses.append(answer.status_code)

    try:
        with Prober(server) as prober:
            clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
            [one.start() for one in clients]
            until(lambda: statuses.count(429) > CLIENTS and statuses.count(200) >= 8, "saturation")
            stop.set()
            [one.join() for one in clients]
            seen = len(prober.health)
            until(lambda: (200, None) in prober.health[seen:], "readiness")
        assert not prober.faults and len(prober.live) > 10
        assert set(prober.live) == {200}, "a full queue is no reason to be killed"
        assert set(statuses) <= {200, 429, 503, 504}
        assert {status for status, _ in prober.health} <= {200, 503}
        server.wait_until_idle()
        assert httpx.post(f"{server.url}/v1/completions", json={**body, "max_tokens": 2}, timeout=60).status_code == 200
    finally:
        server.stop()


def test_while_nothing_moves_the_server_is_not_ready_and_alive(tmp_path):
    # One step computes the whole prompt, on one thread: for some seconds nothing is said by the replica.
    config = {
        "limits": {"no_progress_ms": 1_000},
        "replicas": {"threads": 1, "step_tokens": 8_192, "chunk_tokens": 8_192, "kv_blocks": 600},
    }
    server = Server(tmp_path, config=config)
    prompt = [100 + place % 30_000 for place in range(8_000)]
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    try:
        with Prober(server) as prober:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
            assert answer.status_code == 200, answer.text
            seen = len(prober.health)
            until(lambda: (200, None) in prober.health[seen:], "readiness")
        assert not prober.faults and set(prober.live) == {200}
        assert (503, "work waits and nothing moves") in prober.health, "the balancer was told"
        assert {status for status, _ in prober.health} == {200, 503}
    finally:
        server.stop()


def test_a_server_that_drains_says_so_by_every_name(tmp_path):
    server = Server(tmp_path)
    body = {"model": MODEL_NAME, "prompt": "One", "max_tokens": 3_000, "ignore_eos": True, "stream": True}
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert server.metrics().sum("penstock_replicas", state="ready") == 1
            with http.stream("POST", "/v1/completions", json=body) as response:
                # Kept: a reader that is let go closes the stream.
                lines = response.iter_lines()
                next(lines)
                server.process.terminate()
                server.wait_for_log("asked to stop: draining")
                assert httpx.get(f"{server.url}/live").status_code == 200
                health = httpx.get(f"{server.url}/health")
                assert (health.status_code, health.json()["reason"]) == (503, "draining")
                assert httpx.get(f"{server.url}/v1/loads").json()["loads"][0]["state"] == "draining"
                metrics = server.metrics()
                assert metrics.sum("penstock_replicas", state="draining") == 1
                assert metrics.sum("penstock_replicas", state="ready") == 0
        assert server.wait() == 0
    finally:
        server.kill()
