"""Gateways and workers as processes of their own: what clients get is what one process gives."""

import concurrent.futures
import re
import signal
import threading
import time

import httpx
import pytest

from cluster import STREAMS, TOKEN, Cluster, Stream, all_of, answers, in_folder, record_of, wait_until
from keys import bearer, key_file
from server import Metrics, Server, free_port, run_to_end

KEY = "alpha-key-0123456789"


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one process answers, for the usual lengths and for long ones."""
    server = Server(tmp_path_factory.mktemp("alone"), "--replicas", "1", "--policies", "native")
    try:
        return {None: answers(all_of(server)), 120: answers(all_of(server, 120))}
    finally:
        server.stop()


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


# --- the command line


def test_help_of_the_roles_teaches():
    for role, flags in (
        ("gateway", ("--worker", "--discovery", "--token-file", "--keys")),
        ("worker", ("--role", "--control-listen", "--control-advertise", "--label", "--kv-blocks")),
    ):
        code, text, _ = run_to_end(role, "--help")
        assert code == 0 and "Examples:" in text and "SIGTERM" in text
        assert all(flag in text for flag in flags), text


def test_what_makes_no_sense_is_said_before_anything_starts():
    for args, said in (
        (("gateway",), "--worker HOST:PORT"),
        (("gateway", "--worker", "10.0.0.1:8200"), "cluster.token_file"),
        (("worker", "--control-listen", "0.0.0.0:8200"), "away from loopback the control listener needs cluster.token_file"),
        (("worker", "--discovery", "consul"), "folder:PATH"),
        (("worker", "--label", "zone"), "NAME=VALUE"),
    ):
        code, _, text = run_to_end(*args)
        assert code == 2 and said in text, text


def test_config_prints_the_flags_of_a_cluster():
    code, text, said = run_to_end(
        *("config", "--for", "worker", "--role", "decode", "--discovery", "etcd:http://127.0.0.1:1,http://127.0.0.1:2"),
        *("--label", "zone=a", "--name", "w-1"),
    )
    assert code == 0, said
    for line in (
        'role = "decode"',
        'discovery = "etcd:http://127.0.0.1:1,http://127.0.0.1:2"',
        'labels = ["zone=a"]',
        'name = "w-1"',
    ):
        assert line in text


# --- serving


def test_two_workers_answer_as_one_process_does(cluster, tmp_path, expected):
    where = in_folder(tmp_path)
    workers = [cluster.worker(name, *where) for name in ("one", "two")]
    gateway = cluster.gateway("gate", *where)
    gateway.wait_for_workers(2)
    assert answers(all_of(gateway)) == expected[None]
    # Once more, with what both caches hold by now.
    assert answers(all_of(gateway)) == expected[None]
    gateway.wait_until_idle()
    known, discovery = gateway.cluster()
    assert set(known) == {"one", "two"} and discovery["fresh"] and discovery["workers"] == 2
    for name, worker in zip(("one", "two"), workers, strict=True):
        assert known[name]["state"] == "ready" and known[name]["role"] == "unified"
        assert known[name]["address"] == worker.control and not known[name]["held"]
        # Both took part, and nothing is left at either.
        metrics = worker.metrics()
        assert metrics.sum("penstock_step_decode_rows_count") > 0
        assert metrics.sum("penstock_kv_blocks", state="active") == 0
        assert metrics.sum("penstock_worker_state", state="ready") == 1 and metrics.sum("penstock_gateways") == 1
        shown = httpx.get(f"{worker.admin_url()}/replicas").json()["worker"]
        assert shown["worker"] == name and shown["state"] == "ready" and len(shown["gateways"]) == 1
        assert shown["discovery"]["registration"] == "announced"
    assert gateway.metrics().sum("penstock_workers", standing="connected") == 2


def test_workers_that_are_named_need_no_discovery(cluster, tmp_path, expected):
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    workers = [cluster.worker(name, "--token-file", token) for name in ("one", "two")]
    named = [flag for worker in workers for flag in ("--worker", worker.control)]
    gateway = cluster.gateway("gate", "--token-file", token, *named)
    gateway.wait_for_workers(2)
    assert answers(all_of(gateway)) == expected[None]
    assert TOKEN not in gateway.log() + workers[0].log()


def test_two_gateways_before_the_same_workers(cluster, tmp_path, expected):
    where = in_folder(tmp_path)
    workers = [cluster.worker(name, *where) for name in ("one", "two")]
    gateways = [cluster.gateway(name, *where) for name in ("left", "right")]
    for gateway in gateways:
        gateway.wait_for_workers(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(all_of, gateways))
    assert [answers(streams) for streams in both] == [expected[None], expected[None]]
    # One is killed under its streams: its clients see a closed socket, the other one's see nothing.
    with concurrent.futures.ThreadPoolExecutor(2 * STREAMS) as pool:
        lost = [pool.submit(Stream, gateways[0], number, 120) for number in range(STREAMS)]
        kept = [pool.submit(Stream, gateways[1], number, 120) for number in range(STREAMS)]
        busy = lambda: gateways[0].metrics().sum("vllm:num_requests_running") > 0  # noqa: E731
        wait_until("the streams of the gateway run", busy)
        gateways[0].kill()
        assert answers([stream.result() for stream in kept]) == expected[120]
        assert sum(stream.exception() is not None for stream in lost) > 0
    gateways[1].wait_until_idle()
    for worker in workers:
        gone = lambda worker=worker: worker.metrics().sum("penstock_gateways") == 1  # noqa: E731
        wait_until("its workers have ended what the lost gateway had", gone)
        free = lambda worker=worker: worker.metrics().sum("penstock_kv_blocks", state="active") == 0  # noqa: E731
        wait_until("and given its blocks back", free)


def test_two_gateways_share_the_quotas_of_their_tenants(cluster, tmp_path):
    where = in_folder(tmp_path)
    cluster.worker("one", *where)
    config = {
        "cluster": {"share_quotas": True},
        "discovery": {"lease_ms": 4000},
        "limits": {"quota_window_ms": 2000},
    }
    keys = key_file(("alpha", KEY, {"tokens_per_window_max": 40}))
    gateways = [cluster.gateway(name, *where, config=config, keys=keys) for name in ("left", "right")]
    for gateway in gateways:
        gateway.wait_for_workers(1)
    share = lambda gateway: gateway.metrics().sum("penstock_quota_share_ratio")  # noqa: E731
    ask = lambda gateway: httpx.post(  # noqa: E731
        f"{gateway.url}/v1/completions",
        json={"model": "demo", "prompt": "water", "max_tokens": 9, "ignore_eos": True},
        headers=bearer(KEY),
        timeout=60,
    )
    if share(gateways[0]) == 0:
        refused = ask(gateways[0])
        assert refused.status_code == 429, "nothing is given out before the share is known"
    wait_until("both have their share", lambda: abs(share(gateways[0]) + share(gateways[1]) - 1) < 1e-5)
    assert 0.3 < share(gateways[0]) < 0.7
    # At each of them less than the quota, which one alone would let in.
    taken = [sum(ask(gateway).status_code == 200 for _ in range(6)) for gateway in gateways]
    assert all(0 < one <= 3 for one in taken) and sum(taken) <= 4, taken
    gateways[1].kill()
    wait_until("what the lost one had is taken over", lambda: share(gateways[0]) == 1)


def test_a_gateway_hears_of_caches_by_kv_events(cluster, tmp_path, expected):
    where = in_folder(tmp_path)
    for name in ("one", "two"):
        events = {"kv_events": {"publish": f"127.0.0.1:{free_port()}", "replay": f"127.0.0.1:{free_port()}"}}
        cluster.worker(name, *where, config=events)
    config = {"cluster": {"follow_kv_events": True}}
    gateway = cluster.gateway("gate", *where, config=config)
    gateway.wait_for_workers(2)
    wait_until("both are heard", lambda: gateway.log().count("trust=Whole") >= 2)
    assert answers(all_of(gateway)) == expected[None]
    assert answers(all_of(gateway)) == expected[None]
    # By now it knows where each prompt is cached, from the events alone.
    believed = lambda: gateway.metrics().sum("penstock_replicas_routed_by_load") == 0  # noqa: E731
    wait_until("it believes both", believed)
    stream = Stream(gateway, 7)
    assert stream.answer() == expected[None][7]


# --- what is refused


def test_a_wrong_token_is_refused_and_said(cluster, tmp_path):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(TOKEN)
    wrong.write_text(TOKEN[::-1])
    worker = cluster.worker("one", "--token-file", right)
    gateway = cluster.gateway("gate", "--token-file", wrong, "--worker", worker.control)
    gateway.wait_for_log("does not take the token")
    workers, _ = gateway.cluster()
    assert workers[worker.control]["connection"] == "failed" and "token" in workers[worker.control]["why"]
    assert gateway.metrics().sum("penstock_worker_calls_failed_total", reason="denied") > 0
    answer = httpx.get(f"{gateway.url}/health")
    assert answer.status_code == 503 and answer.json()["reason"] == "no replica is ready"
    assert TOKEN not in gateway.log() and TOKEN[::-1] not in gateway.log() + worker.log()


def test_another_model_is_refused_with_both_texts(cluster, tmp_path):
    where = in_folder(tmp_path)
    config = {"replicas": {"kv_dtype": "int8"}}
    worker = cluster.worker("other", *where, config=config)
    gateway = cluster.gateway("gate", *where)
    theirs = record_of(tmp_path, "other")["compatibility"]
    ours = re.search(r'compatibility="([^"]+)"', gateway.log()).group(1)
    assert theirs != ours and "kv int8" in theirs and "kv bf16" in ours
    gateway.wait_for_log("a worker is not called")
    workers, _ = gateway.cluster()
    assert workers["other"]["why"] == f"incompatible: {theirs} there, {ours} here"
    assert workers["other"]["connection"] == "idle"
    # Also where nobody but the worker itself can say so.
    named = cluster.gateway("named", "--worker", worker.control)
    named.wait_for_log("a worker cannot be had")
    workers, _ = named.cluster()
    assert theirs in workers[worker.control]["why"] and ours in workers[worker.control]["why"]


# --- states, ends, faults


def test_a_worker_is_known_before_it_loads_and_called_when_it_is_ready(cluster, tmp_path):
    where = in_folder(tmp_path)
    gateway = cluster.gateway("gate", *where)
    # Packing the weights takes its time.
    worker = cluster.worker("one", *where, wait=False, config={"model": {"packed_cache": "off"}})
    seen = []

    def look():
        record = record_of(tmp_path, "one")
        if record and (not seen or seen[-1] != record["state"]):
            seen.append(record["state"])
        return bool(seen) and seen[-1] == "ready"

    wait_until("it is known", lambda: record_of(tmp_path, "one") is not None)
    health = httpx.get(f"{worker.url}/health")
    if health.status_code == 503:
        assert health.json()["reason"] in ("loading", "warming")
    assert httpx.get(f"{worker.url}/live").status_code == 200
    wait_until("it becomes ready", look, 60)
    assert seen == sorted(seen, key=["loading", "warming", "ready"].index)
    said = worker.log()
    assert said.index("registered worker=one") < said.index("weights are ready") < said.index('to="ready"')
    states = re.findall(r"worker state worker=one from=\"(\w+)\" to=\"(\w+)\"", worker.log())
    assert states == [("loading", "warming"), ("warming", "ready")]
    gateway.wait_for_workers(1)
    assert record_of(tmp_path, "one")["capacity"]["blocks"] == 300


def test_a_worker_that_is_stopped_while_it_loads_leaves(cluster, tmp_path):
    worker = cluster.worker("one", *in_folder(tmp_path), wait=False)
    wait_until("it is known", lambda: record_of(tmp_path, "one") is not None)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert record_of(tmp_path, "one") is None


DRAIN_STEPS = [
    "drain: the record says draining",
    "drain: gateways are told to send nothing new",
    "drain: what ran has ended",
    "drain: computed prompts have been fetched or given up",
    "drain: the sessions are closed",
    "drain: the registration is removed",
    "stopped",
]


def test_a_drain_goes_in_order_and_loses_nothing(cluster, tmp_path, expected):
    where = in_folder(tmp_path)
    leaving, staying = (cluster.worker(name, *where) for name in ("leaving", "staying"))
    gateway = cluster.gateway("gate", *where)
    gateway.wait_for_workers(2)
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(Stream, gateway, number, 120) for number in range(STREAMS)]
        running = lambda worker: worker.metrics().sum("vllm:num_requests_running")  # noqa: E731
        wait_until("both have work", lambda: running(leaving) > 2 and running(staying) > 2)
        leaving.signal(signal.SIGTERM)
        leaving.wait_for_log("gateways are told to send nothing new")
        assert record_of(tmp_path, "leaving")["state"] == "draining" and running(leaving) > 0
        # What comes now goes to the other one, and what runs goes on.
        assert Stream(gateway, 9).answer() == expected[None][9]
        assert leaving.wait() == 0
        assert answers([stream.result() for stream in streams]) == expected[120]
    lines = leaving.lines()
    places = [next(at for at, line in enumerate(lines) if step in line) for step in DRAIN_STEPS]
    assert places == sorted(places), "\n".join(lines)
    ended = lines[places[2]]
    assert "cancelled=0" in ended, ended
    assert record_of(tmp_path, "leaving") is None
    gateway.wait_for_log("a worker is known no more")
    gateway.wait_for_workers(1)
    # The session was over before the registration went, and not the other way round.
    said = gateway.log()
    assert said.index("a worker's session is over") < said.index("a worker is known no more")


def test_a_second_signal_ends_a_worker_at_once(cluster, tmp_path):
    where = in_folder(tmp_path)
    worker = cluster.worker("one", *where, "--drain-grace", "600")
    gateway = cluster.gateway("gate", *where)
    gateway.wait_for_workers(1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        begun = threading.Semaphore(0)
        stream = pool.submit(Stream, gateway, 1, 4000, begun)
        # What has been read in part cannot be repeated: it has to end.
        assert begun.acquire(timeout=60)
        worker.signal(signal.SIGTERM)
        worker.wait_for_log("gateways are told to send nothing new")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 1
        assert "ending at once" in worker.log()
        assert stream.result().ends() == 1 and stream.result().errors


def test_a_later_life_of_a_name_ends_the_earlier_one(cluster, tmp_path, expected):
    where = in_folder(tmp_path)
    config = {"discovery": {"lease_ms": 1000}}
    first = cluster.worker("one", *where, config=config)
    gateway = cluster.gateway("gate", *where, config=config)
    gateway.wait_for_workers(1)
    second = cluster.worker("one", *where, config=config)
    assert first.wait() == 1
    assert "superseded: this process ends" in first.log() and "later than" in first.log()
    gateway.wait_for_workers(1)
    workers, _ = gateway.cluster()
    assert workers["one"]["address"] == second.control
    assert Stream(gateway, 3).answer() == expected[None][3]


def test_a_killed_worker_costs_no_client_its_end(cluster, tmp_path, expected):
    where = in_folder(tmp_path)
    config = {"discovery": {"lease_ms": 1000}}
    dying, living = (cluster.worker(name, *where, config=config) for name in ("dying", "living"))
    gateway = cluster.gateway("gate", *where, config=config)
    gateway.wait_for_workers(2)
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(Stream, gateway, number, 120) for number in range(STREAMS)]
        wait_until("some run there", lambda: dying.metrics().sum("vllm:num_requests_running") > 0)
        dying.kill()
        ended = [stream.result() for stream in streams]
    assert [stream.ends() for stream in ended] == [1] * STREAMS
    whole = 0
    for stream, right in zip(ended, expected[120], strict=True):
        if stream.reasons:
            assert stream.answer() == right
            whole += 1
        else:
            # What was said before is the beginning of the answer.
            assert stream.errors and right[0].startswith(stream.text)
    assert whole > 0
    gateway.wait_until_idle()
    wait_until("all is given back", lambda: living.metrics().sum("penstock_kv_blocks", state="active") == 0)
    # The same worker comes back as another life, and works.
    cluster.worker("dying", *where, config=config)
    gateway.wait_for_workers(2)
    assert answers(all_of(gateway)) == expected[None]


def test_a_lost_etcd_stops_nothing_that_runs(cluster, etcd, expected):
    where = ("--discovery", f"etcd:{etcd.url}")
    config = {"discovery": {"lease_ms": 3000}}
    workers = [cluster.worker(name, *where, config=config) for name in ("one", "two")]
    gateway = cluster.gateway("gate", *where, config=config)
    gateway.wait_for_workers(2)
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(Stream, gateway, number, 120) for number in range(STREAMS)]
        running = lambda: gateway.metrics().sum("vllm:num_requests_running") > 0  # noqa: E731
        wait_until("the streams run", running)
        etcd.kill()
        assert answers([stream.result() for stream in streams]) == expected[120]
    wait_until("the gateway knows", lambda: not gateway.cluster()[1]["fresh"])
    for worker in workers:
        worker.wait_for_log("the registration is not renewed")
    # Longer than a lease, nobody has left, and new work is done.
    time.sleep(4)
    known, discovery = gateway.cluster()
    assert [worker["connection"] for worker in known.values()] == ["connected"] * 2 and discovery["age_s"] > 3
    assert Metrics(httpx.get(f"{gateway.url}/metrics").text).sum("penstock_discovery_age_seconds") > 3
    assert answers(all_of(gateway)) == expected[None]
    etcd.start()
    wait_until("it is heard again", lambda: gateway.cluster()[1]["fresh"])
    for worker in workers:
        worker.wait_for_log("registered again")
    assert "a worker's session is over" not in gateway.log()
