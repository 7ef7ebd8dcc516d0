"""Components that break every rule are handed to a server under load, by the way operators use: none stays, none costs a request."""

import hashlib
import threading
import time

import httpx
import pytest

from policies import HOSTILE, SEATS, needs_components, needs_hostile, policy
from server import MODEL_NAME, Background, Server

STREAMS = 16
# Wherever it is tried or used, each of these must be noticed.
COMMON = [
    "imports-a-clock",
    "traps-in-configure",
    "traps",
    "loops",
    "grows-for-ever",
    "lists-a-billion",
    "traps-in-observe",
    "traps-in-save",
    "loops-in-save",
    # These do well while they are tried, and fail once they decide.
    "late-traps",
    "late-loops",
    "late-traps-in-save",
]
NONSENSE = {
    "admission": "names-a-class-that-is-not",
    "routing": "ranks-a-row-that-is-not",
    "fairness": "ranks-a-row-twice",
    "eviction": "prices-too-many",
    "overload": "climbs-above-the-ladder",
}
# State goes from a policy to its successor of the same name; these cannot take it.
RESTORES = ["traps-in-restore", "loops-in-restore"]

pytestmark = [needs_components, needs_hostile]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    # A pool that is short, so that something is evicted and somebody yields.
    server = Server(tmp_path_factory.mktemp("hostile"), "--kv-blocks", 96)
    yield server
    assert server.stop() == 0, server.log()


class Streams:
    """`STREAMS` requests at a time, for ever; every answer must be the one that the same request got before."""

    def __init__(self, server):
        self.expected, self.answered = {}, 0
        self.lock = threading.Lock()
        self.threads = [Background(lambda stop, number=number: self.run(server, number, stop)) for number in range(STREAMS)]

    def run(self, server, number, stop):
        body = {
            "model": MODEL_NAME,
            "prompt": f"Stream {number} asks for a story about a mill and a river.",
            "max_tokens": 8 + 4 * (number % 4),
            "temperature": 1,
            "seed": number,
        }
        with httpx.Client(base_url=server.url, timeout=120) as http:
            while not stop.is_set():
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                text = answer.json()["choices"][0]["text"]
                with self.lock:
                    assert self.expected.setdefault(number, text) == text, "policies decide where and when, never what"
                    self.answered += 1

    def wait_for(self, more):
        until = self.answered + more
        deadline = time.monotonic() + 60
        while self.answered < until:
            alive = [thread for thread in self.threads if thread.thread.is_alive()]
            assert len(alive) == STREAMS and time.monotonic() < deadline, f"{len(alive)} streams, {self.answered} answers"
            time.sleep(0.05)

    def end(self):
        for thread in self.threads:
            thread.stop.set()
        for thread in self.threads:
            thread.end(120)


@pytest.fixture(scope="module")
def streams(server):
    streams = Streams(server)
    streams.wait_for(STREAMS)
    yield streams
    streams.end()
    server.wait_until_idle()


def listed(server):
    return httpx.get(f"{server.admin_url()}/policies", timeout=30).json()


def hand_over(server, seat, name):
    """Loads and activates one. Its set's digest where it got into force, else None and why not."""
    admin = server.admin_url()
    component = (HOSTILE / f"{seat}-{name}.wasm").read_bytes()
    digest = hashlib.sha256(component).hexdigest()
    put = httpx.put(f"{admin}/policies/components/{digest}", content=component, timeout=60)
    if put.status_code != 200:
        assert put.status_code == 422, put.text
        return None, put.json()["error"]["message"]
    document = {seat: {"policy": f"sha256:{digest}"}}
    bad = httpx.post(f"{admin}/policies", json=document).json()["digest"]
    activated = httpx.post(f"{admin}/policies/{bad}/activate", timeout=60)
    if activated.status_code == 200:
        return bad, None
    assert activated.status_code == 422, activated.text
    why = activated.json()["error"]["message"]
    refused = [event for event in listed(server)["history"] if event["event"] == "refused" and event["set"] == bad]
    assert refused and refused[-1]["reason"] == why and seat in why, (refused, why)
    return None, why


def wait_until_it_is_gone(server, streams, bad):
    deadline = time.monotonic() + 90
    while listed(server)["digest"] == bad:
        assert time.monotonic() < deadline, f"{bad} stays in force: {listed(server)['history'][-8:]}"
        streams.wait_for(1)


@pytest.mark.parametrize("seat", SEATS)
def test_none_stays_and_each_is_named_with_its_reason(server, streams, seat, figure):
    good = listed(server)["digest"]
    refused, ended = 0, 0
    for name in [*COMMON, NONSENSE[seat], f"late-{NONSENSE[seat]}"]:
        bad, why = hand_over(server, seat, name)
        if bad is None:
            refused += 1
            assert why, name
        else:
            ended += 1
            wait_until_it_is_gone(server, streams, bad)
            after = listed(server)
            [entry] = [entry for entry in after["sets"] if entry["digest"] == bad]
            assert entry["state"] == "quarantined" and seat in entry["reason"], (name, entry)
            failed = [event for event in after["history"] if event["event"] == "failed" and event["set"] == bad]
            assert failed and failed[-1]["seat"] == seat and failed[-1]["reason"], (name, after["history"])
            code, out, _ = policy(server, "inspect", bad[:16])
            assert code == 0 and "failed too often" in out, (name, out)
            code, out, _ = policy(server, "list")
            assert code == 0 and f"set {bad[:12]}  quarantined" in out, (name, out)
        assert listed(server)["digest"] == good, name
        streams.wait_for(2)
    figure(f"hostile {seat}: {refused} refused before they decided anything, {ended} ended by quarantine, {streams.answered} answers so far")
    # The log says by whom each was answered for.
    code, out, err = policy(server, "log", "-n", "50")
    assert code == 0 and out, err


@pytest.mark.parametrize("seat", SEATS)
def test_a_successor_that_cannot_take_the_state_is_refused(server, streams, seat):
    good = listed(server)["digest"]
    harmless, why = hand_over(server, seat, "keeps-every-rule")
    assert harmless, why
    # A snapshot is due a second after it was asked; what was never asked has nothing to hand over.
    deadline = time.monotonic() + 30
    question = {"fairness": "order"}.get(seat, seat)
    asked = []
    while not asked:
        log = httpx.get(f"{server.admin_url()}/policies/log?n=200&question={question}").json()["decisions"]
        asked = [decision for decision in log if decision["policy"] == "hostile"]
        assert time.monotonic() < deadline, f"{seat} is never asked"
        streams.wait_for(1)
    time.sleep(1.5)
    streams.wait_for(4)
    for name in RESTORES:
        bad, why = hand_over(server, seat, name)
        assert bad is None and "restore" in why, (name, why)
        assert listed(server)["digest"] == harmless
    code, out, err = policy(server, "rollback")
    assert code == 0 and good in out, err
