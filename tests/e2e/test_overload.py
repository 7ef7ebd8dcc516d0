"""Clients that vanish, clients that read a byte a second, and bursts beyond every limit: nobody else waits, and all comes back.

Five rounds on one server with small limits. A well-behaved stream runs beside each of them.
"""

import asyncio
import json
import random
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from keys import bearer, key_file
from server import MODEL_NAME, Background, Server
from wire import parse_head, post_bytes

ROUNDS = 5
VANISHING = 200
SLOW = 50
BURST = 2_000
SEND_TIMEOUT_MS = 2_000

CONFIG = {
    "http": {
        "send_timeout_ms": SEND_TIMEOUT_MS,
        "send_buffer_bytes": 4096,
        "stream_buffer_bytes": 8192,
        "requests_max": 400,
        # Long: two thousand clients in one program take their time.
        "headers_timeout_ms": 30_000,
    },
    "limits": {"queue_requests_max": 64, "queue_tokens_max": 20_000, "quota_window_ms": 3_600_000},
}
KEYS = [("crowd", "sk-crowd", {}), ("good", "sk-good", {}), ("poor", "sk-poor", {"tokens_per_window_max": 1})]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overload")
    server = Server(folder, "--kv-blocks", 2048, config=CONFIG, keys=key_file(*KEYS))
    yield server
    server.stop()


class GoodStream:
    """Reads a long answer as fast as it comes and counts its tokens."""

    def __init__(self, server):
        self.server = server
        self.tokens = 0
        self.longest_gap_s = 0.0
        self.errors = []
        self.work = Background(self.run)
        self.wait_for(1)

    def run(self, stop):
        body = {"model": MODEL_NAME, "prompt": "Once upon a time", "max_tokens": 7000, "ignore_eos": True, "stream": True}
        url = f"{self.server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=bearer("sk-good"), timeout=60) as response:
            assert response.status_code == 200
            last = time.monotonic()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    self.longest_gap_s = max(self.longest_gap_s, now - last)
                    last = now
                    self.tokens += 1
                    if "error" in json.loads(line[6:]):
                        self.errors.append(line)
                if stop.is_set():
                    return

    def wait_for(self, more, limit_s=60):
        goal, deadline = self.tokens + more, time.monotonic() + limit_s
        while self.tokens < goal:
            assert self.work.thread.is_alive(), self.work.failure or "the stream is over"
            assert time.monotonic() < deadline, "the well-behaved stream gets no tokens"
            time.sleep(0.005)

    def end(self):
        self.work.end()
        assert self.errors == []


def completion(max_tokens, stream, key="sk-crowd", **fields):
    body = {"model": MODEL_NAME, "prompt": "The sea was calm and", "max_tokens": max_tokens, "stream": stream, **fields}
    return post_bytes("/v1/completions", body, key=key)


async def open_link(port, receive_buffer=None):
    link = socket.socket()
    if receive_buffer:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    link.setblocking(False)
    await asyncio.get_running_loop().sock_connect(link, ("127.0.0.1", port))
    return link


async def vanish(port, dice):
    """Leaves at a random point, in an orderly way or with a reset."""
    loop = asyncio.get_running_loop()
    request = completion(dice.randint(20, 400), dice.random() < 0.7, ignore_eos=True, n=dice.choice([1, 1, 2, 4]))
    link = await open_link(port)
    try:
        point = dice.choice(["headers", "body", "waiting", "reading", "reading"])
        head_end = request.index(b"\r\n\r\n") + 4
        ends = {"headers": (1, head_end - 1), "body": (head_end, len(request) - 1)}
        sent = dice.randint(*ends[point]) if point in ends else len(request)
        await loop.sock_sendall(link, request[:sent])
        await asyncio.sleep(dice.random() * 0.3)
        if point == "reading":
            for _ in range(dice.randint(1, 6)):
                try:
                    if not await asyncio.wait_for(loop.sock_recv(link, 2048), 2):
                        break
                except (asyncio.TimeoutError, ConnectionError):
                    break
        if dice.random() < 0.5:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        link.close()


async def read_slowly(port, cut_off):
    """A byte a second of a long answer with many log-probabilities, until the server has enough of it."""
    loop = asyncio.get_running_loop()
    link = await open_link(port, receive_buffer=2048)
    try:
        await loop.sock_sendall(link, completion(600, True, ignore_eos=True, logprobs=20))
        first = await loop.sock_recv(link, 12)
        if not first.startswith(b"HTTP/1.1 200"):
            return
        while not cut_off.is_set():
            await asyncio.sleep(1)
            if not await loop.sock_recv(link, 1):
                return
    except ConnectionError:
        return
    finally:
        link.close()


async def burst_one(port, statuses):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(completion(4, False).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        status, headers, rest = parse_head(await reader.read())
        code = "" if status == 200 else json.loads(rest)["error"]["code"]
        statuses[status, code] = statuses.get((status, code), 0) + 1
        if status != 200:
            assert status in (429, 503), (status, rest)
            assert 1 <= int(headers["retry-after"]) <= 60
            assert headers["x-llm-d-request-dropped-reason"] == code
    finally:
        writer.close()


def slow_clients_cut(server):
    return server.metrics().sum("penstock_slow_clients_total")


async def slow_phase(server, good):
    """Until the server has cut all slow readers off; the good stream must have got on meanwhile."""
    before, tokens = slow_clients_cut(server), good.tokens
    cut_off = asyncio.Event()
    readers = [asyncio.create_task(read_slowly(server.port, cut_off)) for _ in range(SLOW)]
    deadline = time.monotonic() + 60
    while (cut := slow_clients_cut(server) - before) < SLOW:
        assert time.monotonic() < deadline, f"{cut} of {SLOW} slow clients were cut off"
        await asyncio.sleep(0.1)
    progress = good.tokens - tokens
    cut_off.set()
    await asyncio.gather(*readers)
    return progress


def one_round(server, dice, statuses):
    good = GoodStream(server)

    async def scene():
        clock = [time.monotonic()]
        await asyncio.gather(*(vanish(server.port, dice) for _ in range(VANISHING)))
        clock.append(time.monotonic())
        progress = await slow_phase(server, good)
        clock.append(time.monotonic())
        await asyncio.gather(*(burst_one(server.port, statuses) for _ in range(BURST)))
        clock.append(time.monotonic())
        print("seconds of the phases:", [round(after - before, 1) for before, after in zip(clock, clock[1:])])
        return progress

    progress = asyncio.run(scene())
    # None of them is cut off before it stood still for the send timeout or had a full buffer, which is many tokens: steps went on.
    assert progress >= 5, "steps waited for slow clients"
    good.wait_for(5)
    good.end()
    server.wait_until_idle(60)
    return good


def refusal_times(server, count, pause_ms):
    probe = Path(__file__).with_name("refusal_probe.py")
    command = [sys.executable, str(probe), str(server.port), "sk-poor", str(count), str(pause_ms)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def quantiles(process):
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    times = sorted(json.loads(out))
    return f"p50 {times[len(times) // 2]} us, p99 {times[len(times) * 99 // 100]} us of {len(times)}"


def check_rest(server, loads_before):
    """Every gauge is where it began."""
    assert server.metrics().busy() == {}
    loads = httpx.get(f"{server.url}/v1/loads").json()
    for now, before in zip(loads["loads"], loads_before["loads"]):
        for key in ("state", "num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage"):
            assert now[key] == before[key], key
    assert loads["aggregate"]["total_running_reqs"] == loads["aggregate"]["total_waiting_reqs"] == 0


def test_five_rounds_of_rude_clients_leave_no_trace(small, figure):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    loads_before = httpx.get(f"{small.url}/v1/loads").json()
    idle = quantiles(refusal_times(small, 200, 1))
    resident, statuses, gaps, seconds = [], {}, [], time.monotonic()
    under_load = None
    for number in range(ROUNDS):
        probe = refusal_times(small, 1000, 2) if number == 0 else None
        gaps.append(one_round(small, dice, statuses).longest_gap_s)
        if probe:
            under_load = quantiles(probe)
        check_rest(small, loads_before)
        resident.append(small.rss_kib())
    seconds = time.monotonic() - seconds
    assert sum(statuses.values()) == ROUNDS * BURST
    refused = sum(count for (status, _), count in statuses.items() if status != 200)
    assert refused > BURST, statuses
    assert any(status == 200 for status, _ in statuses), "some of the burst was served"
    assert resident[4] <= resident[1] * 1.05, resident
    assert small.metrics().sum("penstock_diverged_sequences_total") == 0
    assert "panicked" not in small.log()
    figure(f"refusal of a used-up quota, seen by a client of its own: idle {idle}; under load {under_load}")
    answers = {f"{status} {code}".strip(): count for (status, code), count in sorted(statuses.items())}
    figure(f"{ROUNDS} rounds of {VANISHING} vanishing, {SLOW} slow and {BURST} burst clients: {seconds:.0f} s, burst {answers}")
    figure(
        f"beside them: longest gap of a well-behaved stream {max(gaps):.2f} s, resident MiB after each round "
        f"{[kib // 1024 for kib in resident]}"
    )
