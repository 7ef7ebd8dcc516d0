"""Processes of a cluster killed at random moments, and networks that swallow, under 16 streams: each client gets one end, nobody keeps anything."""

import concurrent.futures
import json
import os
import random
import time
import uuid

import httpx
import pytest

from cluster import STREAMS, Cluster, Stream, all_of, answers, begun_by, in_folder, long_prompt, wait_until
from proxy import Proxy
from server import Server

KILLS = 30 if os.environ.get("PENSTOCK_TEST_FAULTS") else 2
TOKENS = 140
LEASE_S = 2
CONFIG = {
    "replicas": {"handoff_tokens_min": 48, "chunk_tokens": 64},
    "cluster": {"session_lease_ms": LEASE_S * 1000, "redial_ms": 200},
    "discovery": {"lease_ms": 3000},
    "handoff": {"waiting_ms": 3000, "transfer_ms": 8000},
}
# Leases of session and hand-off, the waits of its end, and time for a slow machine.
BOUND_S = 45


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process answers to some prompts."""
    server = Server(tmp_path_factory.mktemp("alone"), "--replicas", "1", "--policies", "native")
    yield lambda prompt: answers(all_of(server, TOKENS, prompt=prompt))
    server.stop()


@pytest.fixture(scope="module")
def expected(alone):
    return alone(long_prompt)


def strikes(name, alone):
    """When to strike, in seconds after the first stream began (in prefill, in hand-offs, in decode), and what the streams then ask: prompts that
    no cache has seen, and the right answers."""
    dice = random.Random(name)
    for which in range(KILLS):
        prompt = begun_by(f"{name} {which}")
        yield dice.uniform(0.05, 1.5), prompt, alone(prompt)


def measured(what, **figures):
    """Times of a run, for whoever wants to see them: a line of JSON in the file that PENSTOCK_TEST_FIGURES names."""
    path = os.environ.get("PENSTOCK_TEST_FIGURES")
    if path:
        with open(path, "a", encoding="utf-8") as out:
            out.write(json.dumps({"what": what, **{name: round(value, 3) for name, value in figures.items()}}) + "\n")


class Scene:
    """One gateway, one worker that prefills, two that decode; etcd or a folder to find each other."""

    def __init__(self, cluster, where, migrations=0):
        self.cluster, self.where = cluster, where
        self.config = {**CONFIG, "limits": {"migrations_max": migrations}}
        self.workers = {}
        for name, role in (("prefill", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")):
            self.start(name, role)
        self.gateway = self.start_gateway()

    def start(self, name, role):
        config = {name: keys for name, keys in self.config.items() if name != "limits"}
        self.workers[name] = self.cluster.worker(name, "--role", role, *self.where, config=config)

    def start_gateway(self):
        state = self.cluster.folder / "state"
        gateway = self.cluster.gateway("gate", *self.where, "--state-dir", state, config=self.config)
        gateway.wait_for_workers(3)
        return gateway

    def streams(self, pool, prompt=long_prompt):
        return [pool.submit(Stream, self.gateway, number, TOKENS, prompt=prompt) for number in range(STREAMS)]

    def assert_all_came_back(self):
        self.gateway.wait_until_idle(BOUND_S)
        for name, worker in self.workers.items():
            held = lambda: worker.metrics().held()  # noqa: B023, E731
            wait_until(f"blocks of {name} come back", lambda: not any(held().values()), BOUND_S)  # noqa: B023


def assert_one_end_each(ended, expected):
    """How many are whole. What is not is the beginning of the answer, and says that it may be sent again."""
    assert [stream.ends() for stream in ended] == [1] * len(ended), [stream.__dict__ for stream in ended]
    whole = 0
    for stream, right in zip(ended, expected, strict=True):
        if stream.reasons:
            assert stream.answer() == right
            whole += 1
        else:
            error = stream.errors[0] if stream.errors else stream.refused[1]
            assert error["code"], error
            assert right[0].startswith(stream.text)
            assert right[1][: len(stream.tokens)] == stream.tokens
    return whole


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


@pytest.mark.parametrize("victim", ["prefill", "decode-0"])
def test_a_killed_worker(cluster, tmp_path, alone, expected, victim):
    scene = Scene(cluster, in_folder(tmp_path))
    role = victim.split("-")[0]
    for moment, prompt, right in strikes(victim, alone):
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = scene.streams(pool, prompt)
            time.sleep(moment)
            struck = time.monotonic()
            scene.workers.pop(victim).kill()
            wait_until(
                "the gateway knows",
                lambda: scene.gateway.cluster()[0].get(victim, {}).get("connection") != "connected",
                BOUND_S,
            )
            detected = time.monotonic() - struck
            ended = [stream.result() for stream in streams]
            last = time.monotonic() - struck
        whole = assert_one_end_each(ended, right)
        assert whole > 0 or role == "decode"
        scene.assert_all_came_back()
        recovered = time.monotonic() - struck
        # Nobody but the killed worker is missed: what is left serves.
        assert Stream(scene.gateway, 5, TOKENS, prompt=prompt).answer() == right[5]
        measured(f"kill {role}", moment=moment, detected=detected, last_end=last, recovered=recovered, whole=whole)
        scene.start(victim, role)
        scene.gateway.wait_for_workers(3)
    assert answers(all_of(scene.gateway, TOKENS, prompt=long_prompt)) == expected


def test_a_killed_decode_worker_loses_no_stream_with_migration(cluster, tmp_path, alone):
    scene = Scene(cluster, in_folder(tmp_path), migrations=3)
    for moment, prompt, right in strikes("migration", alone):
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = scene.streams(pool, prompt)
            time.sleep(moment)
            struck = time.monotonic()
            scene.workers.pop("decode-0").kill()
            assert answers([stream.result() for stream in streams]) == right
            last = time.monotonic() - struck
        scene.assert_all_came_back()
        measured("kill decode, migration on", moment=moment, last_end=last, recovered=time.monotonic() - struck)
        scene.start("decode-0", "decode")
        scene.gateway.wait_for_workers(3)


def test_a_killed_gateway(cluster, tmp_path, alone, expected):
    scene = Scene(cluster, in_folder(tmp_path))
    for moment, prompt, answers_due in strikes("gateway", alone):
        key = str(uuid.uuid4())
        with concurrent.futures.ThreadPoolExecutor(STREAMS + 1) as pool:
            body = {"model": "demo", "prompt": prompt(5), "max_tokens": 400, "ignore_eos": True, "temperature": 0}
            call = lambda timeout=60: httpx.post(  # noqa: E731
                f"{scene.gateway.url}/v1/completions", json=body, headers={"Idempotency-Key": key}, timeout=timeout
            )
            keyed = pool.submit(call)
            # It has been taken, so that it can be interrupted.
            wait_until("it is taken", lambda: scene.gateway.metrics().sum("penstock_requests_in_flight") > 0)
            streams = scene.streams(pool, prompt)
            time.sleep(moment)
            struck = time.monotonic()
            scene.gateway.kill()
            # A closed socket, or an end that came before it.
            for stream, right in zip(streams, answers_due, strict=True):
                failure = stream.exception()
                if failure is None:
                    assert stream.result().ends() == 1 and stream.result().answer() == right
                else:
                    assert isinstance(failure, httpx.HTTPError), failure
            assert isinstance(keyed.exception(), httpx.HTTPError) or keyed.result().status_code == 200
            closed = time.monotonic() - struck
        was_whole = keyed.exception() is None
        # Workers end what it left, whether or not another one comes.
        for name, worker in scene.workers.items():
            gone = lambda: worker.metrics().sum("penstock_gateways") == 0  # noqa: B023, E731
            wait_until(f"{name} knows", gone, BOUND_S)
        detected = time.monotonic() - struck
        scene.gateway = scene.start_gateway()
        scene.assert_all_came_back()
        recovered = time.monotonic() - struck
        if not was_whole:
            # The same call again: the first answer says that the other was interrupted, the second one is the work.
            interrupted = call()
            assert interrupted.status_code in (409, 503), interrupted.text
            assert interrupted.json()["error"]["code"], interrupted.text
        assert call().status_code == 200
        assert answers(all_of(scene.gateway, TOKENS, prompt=long_prompt)) == expected
        measured("kill gateway", moment=moment, closed=closed, detected=detected, recovered=recovered)


def test_a_killed_etcd(cluster, etcd, alone, expected):
    scene = Scene(cluster, ("--discovery", f"etcd:{etcd.url}"))
    for moment, prompt, right in strikes("etcd", alone):
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = scene.streams(pool, prompt)
            time.sleep(moment)
            struck = time.monotonic()
            etcd.kill()
            assert answers([stream.result() for stream in streams]) == right
        wait_until("the gateway knows", lambda: not scene.gateway.cluster()[1]["fresh"], BOUND_S)
        detected = time.monotonic() - struck
        scene.assert_all_came_back()
        etcd.start()
        back = time.monotonic()
        wait_until("it is heard again", lambda: scene.gateway.cluster()[1]["fresh"], BOUND_S)
        measured("kill etcd", moment=moment, detected=detected, heard_again=time.monotonic() - back)
    assert answers(all_of(scene.gateway, TOKENS, prompt=long_prompt)) == expected


def test_networks_between_gateway_and_worker(cluster, tmp_path, expected):
    """A stall within the lease is nothing but a wait; one beyond it is a lost worker, which comes back."""
    config = {name: keys for name, keys in CONFIG.items() if name != "discovery"}
    workers = [cluster.worker(name, config=config) for name in ("one", "two")]
    proxy = Proxy(workers[0].control)
    named = ("--worker", proxy.address, "--worker", workers[1].control)
    gateway = cluster.gateway("gate", *named, config=config)
    gateway.wait_for_workers(2)
    for fault, seconds in (("cut", 0), ("stall", 1), ("slow", 0), ("stall", 8)):
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(Stream, gateway, number, TOKENS, prompt=long_prompt) for number in range(STREAMS)]
            time.sleep(0.5)
            struck = time.monotonic()
            if fault == "cut":
                proxy.cut()
            elif fault == "slow":
                proxy.bytes_per_s = 256 << 10
            else:
                proxy.stall()
                time.sleep(seconds)
                proxy.go_on()
            ended = [stream.result() for stream in streams]
        proxy.bytes_per_s = None
        whole = assert_one_end_each(ended, expected)
        if seconds <= 1:
            assert whole == STREAMS, (fault, seconds)
        gateway.wait_for_workers(2)
        gateway.wait_until_idle(BOUND_S)
        for worker in workers:
            wait_until("blocks come back", lambda: not any(worker.metrics().held().values()))  # noqa: B023
        measured(f"{fault} {seconds} s", last_end=time.monotonic() - struck, whole=whole)
    assert answers(all_of(gateway, TOKENS, prompt=long_prompt)) == expected
    proxy.close()


def test_a_drain_with_migration_hands_every_stream_on(cluster, tmp_path, expected):
    scene = Scene(cluster, in_folder(tmp_path), migrations=1)
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        streams = scene.streams(pool)
        running = lambda name: scene.workers[name].metrics().sum("vllm:num_requests_running")  # noqa: E731
        decoders = ("decode-0", "decode-1")
        wait_until("one has work", lambda: max(map(running, decoders)) >= 3)
        name = max(decoders, key=running)
        leaving = scene.workers[name]
        begun = time.monotonic()
        assert leaving.stop() == 0
        left = time.monotonic() - begun
        assert answers([stream.result() for stream in streams]) == expected
    assert scene.gateway.metrics().sum("penstock_migrations_total", cause="drain", outcome="moved") > 0
    assert "cancelled=0" in "\n".join(leaving.lines())
    measured("drain with migration", left=left)
    scene.workers.pop(name)
    scene.assert_all_came_back()
