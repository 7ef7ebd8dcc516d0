"""What the prefix cache takes in and lets go is told on vLLM's wire: heard by libzmq, read by msgpack, and checked by plain SHA-256."""

import hashlib
import socket
import struct
import time

import httpx
import msgpack
import pytest
import zmq

from server import MODEL_NAME, Server

BLOCK_TOKENS = 16
KV_BLOCKS = 48
TOPIC = "kv@here@demo"
END = (-1).to_bytes(8, "big", signed=True)
LIMIT_S = 60


def free_ports(count):
    """A row of ports that nobody has."""
    for start in range(21_000, 60_000, 17):
        sockets = []
        try:
            for port in range(start, start + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return start
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise RuntimeError("no free ports")


def start(folder, with_tokens, replicas=1):
    port = free_ports(2 * replicas)
    config = {
        "kv_events": {
            "publish": f"127.0.0.1:{port}",
            "replay": f"127.0.0.1:{port + replicas}",
            "topic": TOPIC,
            "with_tokens": with_tokens,
        },
        "replicas": {"kv_blocks": KV_BLOCKS, "block_size_tokens": BLOCK_TOKENS, "count": replicas},
    }
    return Server(folder, config=config), port, port + replicas


class Listener:
    """A subscriber of libzmq and what it knows by now."""

    def __init__(self, publish, replay):
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(f"tcp://127.0.0.1:{publish}")
        self.sub.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self.replay = self.context.socket(zmq.REQ)
        self.replay.setsockopt(zmq.RCVTIMEO, LIMIT_S * 1000)
        self.replay_address = f"tcp://127.0.0.1:{replay}"
        self.next = 0
        self.blocks = {}
        self.stored = self.removed = self.cleared = 0
        self.raw = b""

    def close(self):
        self.context.destroy(linger=0)

    def take(self, frames):
        topic, seq, payload = frames
        assert topic == TOPIC.encode()
        seq = int.from_bytes(seq, "big")
        if seq < self.next:
            return
        assert seq == self.next, "a batch is missing"
        self.next += 1
        self.raw += payload
        ts, events, rank = msgpack.unpackb(payload)
        assert abs(ts - time.time()) < 3600 and rank == 0
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self.blocks.clear()
                self.cleared += 1
            elif kind == "BlockRemoved":
                assert event["medium"] == "GPU"
                for block in event["block_hashes"]:
                    del self.blocks[block]
                    self.removed += 1
            else:
                assert kind == "BlockStored" and event["block_size"] == BLOCK_TOKENS and event["medium"] == "GPU"
                parent, tokens = event["parent_block_hash"], event["token_ids"]
                for place, block in enumerate(event["block_hashes"]):
                    own = tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
                    assert parent is None or parent in self.blocks, "what it hangs on is there"
                    self.blocks[block] = (parent, own)
                    parent = block
                    self.stored += 1
                assert len(tokens) in (0, BLOCK_TOKENS * len(event["block_hashes"]))

    def catch_up(self):
        """Everything that is kept from the next number on, as vLLM's users ask for it, then whatever has come live."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, LIMIT_S * 1000)
        dealer.connect(self.replay_address)
        dealer.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            empty, topic, seq, payload = dealer.recv_multipart()
            assert empty == b""
            if seq == END:
                break
            self.take([topic, seq, payload])
        dealer.close(linger=0)
        while self.sub.poll(50):
            self.take(self.sub.recv_multipart())

    def until(self, holds, what):
        deadline = time.monotonic() + LIMIT_S
        self.catch_up()
        while not holds():
            assert time.monotonic() < deadline, f"{what} did not come: {len(self.blocks)} blocks"
            time.sleep(0.05)
            self.catch_up()


def complete(server, tokens, max_tokens=1):
    body = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def prompt(which, blocks):
    return [1_000 + (which * 7_919 + place * 31) % 40_000 for place in range(blocks * BLOCK_TOKENS + 3)]


def child(parent, tokens):
    """Name of a block by the documented rule: SHA-256 over the one before and its tokens, 16 bytes of it."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()[:16]


def cached(server):
    page = httpx.get(f"{server.url}/metrics", timeout=30).text
    found = [line for line in page.splitlines() if line.startswith("penstock_kv_blocks{") and 'state="cached"' in line]
    return int(float(found[0].rsplit(" ", 1)[1]))


def metric(server, name):
    page = httpx.get(f"{server.url}/metrics", timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


def test_a_subscriber_knows_what_is_cached(tmp_path):
    server, publish, replay = start(tmp_path, with_tokens=True)
    listener = Listener(publish, replay)
    try:
        first = prompt(1, 6)
        complete(server, first)
        listener.until(lambda: len(listener.blocks) == 6, "the first prompt")
        # The tokens are those that were sent, each block is named by the one before it and its tokens.
        chain = list(listener.blocks.items())
        assert [tokens for _, (_, tokens) in chain] == [
            first[at : at + BLOCK_TOKENS] for at in range(0, 6 * BLOCK_TOKENS, BLOCK_TOKENS)
        ]
        assert chain[0][1][0] is None and len({name for name, _ in chain}) == 6
        for (before, _), (name, (parent, tokens)) in zip(chain, chain[1:]):
            assert parent == before and name == child(before, tokens)
        stored = listener.stored
        usage = complete(server, first)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK_TOKENS
        listener.catch_up()
        assert listener.stored == stored, "what is there is not told again"
        # Much more than the pool holds: blocks leave, and what is left is what the server says is left.
        for which in range(2, 16):
            complete(server, prompt(which, 6), max_tokens=20)
        listener.until(lambda: listener.removed > 0 and len(listener.blocks) == cached(server), "an equal count")
        assert 0 < len(listener.blocks) <= KV_BLOCKS
        assert metric(server, "penstock_kv_event_subscribers") == 1
        assert metric(server, "penstock_kv_event_drops_total") == 0
        assert metric(server, "penstock_kv_event_batches_total") >= listener.next
    finally:
        listener.close()
        server.stop()


def test_tokens_stay_here_unless_asked_for(tmp_path):
    server, publish, replay = start(tmp_path, with_tokens=False)
    listener = Listener(publish, replay)
    try:
        tokens = prompt(4, 5)
        complete(server, tokens)
        listener.until(lambda: len(listener.blocks) == 5, "the prompt")
        assert all(own == [] for _, own in listener.blocks.values())
        packed = b"".join(msgpack.packb(token) for token in tokens[:4])
        assert packed not in listener.raw
    finally:
        listener.close()
        server.stop()


def test_nothing_is_published_unless_told_and_wrong_addresses_end_the_start(tmp_path):
    with pytest.raises(RuntimeError, match="set expose"):
        Server(tmp_path / "open", config={"kv_events": {"publish": "0.0.0.0:5557"}})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=str(port)):
            Server(tmp_path / "taken", config={"kv_events": {"publish": f"127.0.0.1:{port}"}})
    server = Server(tmp_path / "silent")
    try:
        assert "KV events are published" not in server.log()
    finally:
        server.stop()
