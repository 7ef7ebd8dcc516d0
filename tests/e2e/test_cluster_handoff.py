"""Prefill and decode in processes of their own: tokens are those of one process, whatever carries the KV, and whatever happens to what carries it."""

import concurrent.futures
import os
import shutil
import subprocess
import time

import httpx
import pytest

from cluster import STREAMS, TOKEN, Cluster, Stream, all_of, answers, begun_by, in_folder, long_prompt, wait_until
from proxy import Proxy
from server import Server, free_port

# Long prompts are handed off, short ones are not; waits are short, so that what fails is over soon.
HANDOFF = {
    "replicas": {"handoff_tokens_min": 48, "chunk_tokens": 64},
    "handoff": {"waiting_ms": 3000, "transfer_ms": 8000},
}
KINDS = ("tcp", "memfd")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("alone"), "--replicas", "1", "--policies", "native")
    try:
        return answers(all_of(server, prompt=long_prompt))
    finally:
        server.stop()


FAULTS = ("stall", "slow", "cut")


@pytest.fixture(scope="module")
def unheard(tmp_path_factory):
    """What one process answers to prompts of each fault's own."""
    server = Server(tmp_path_factory.mktemp("unheard"), "--replicas", "1", "--policies", "native")
    try:
        return {fault: answers(all_of(server, prompt=begun_by(fault))) for fault in FAULTS}
    finally:
        server.stop()


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


def with_transfer(**transfer):
    return {**HANDOFF, "transfer": transfer}


def pair(cluster, where, config=None, prefill=(), decode=()):
    config = config or HANDOFF
    workers = [
        cluster.worker("prefill", "--role", "prefill", *where, *prefill, config=config),
        cluster.worker("decode", "--role", "decode", *where, *decode, config=config),
    ]
    gateway = cluster.gateway("gate", *where, config=config)
    gateway.wait_for_workers(2)
    return (gateway, *workers)


def handed_off(gateway):
    return gateway.metrics().sum("penstock_handoffs_total", end="handed_off")


def assert_all_came_back(gateway, *workers):
    gateway.wait_until_idle()
    for worker in workers:
        held = lambda: worker.metrics().held()  # noqa: B023, E731
        wait_until(f"blocks of {worker.folder.name} come back", lambda: not any(held().values()))  # noqa: B023


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_process(cluster, tmp_path, expected, kind, figure):
    config = with_transfer(kinds=[kind])
    gateway, prefill, decode = pair(cluster, in_folder(tmp_path), config)
    ways = lambda: httpx.get(f"{prefill.admin_url()}/replicas").json()["transfers"]  # noqa: E731
    wait_until("they have found a way", lambda: [way["transport"] for way in ways()] == [kind])
    assert prefill.metrics().sum("penstock_kv_transport_peers", kind=kind) == 1
    assert answers(all_of(gateway, prompt=long_prompt)) == expected
    handed = handed_off(gateway)
    assert handed >= STREAMS // 2, gateway.log()[-3000:]
    moved = prefill.metrics().sum("penstock_kv_transfer_bytes_total")
    assert moved > 0
    # Once more, with what both caches hold by now.
    assert answers(all_of(gateway, prompt=long_prompt)) == expected
    assert_all_came_back(gateway, prefill, decode)
    # A prefilling worker that leaves costs nothing: the decoding one takes whole requests.
    assert prefill.stop() == 0
    gateway.wait_for_workers(1)
    assert answers(all_of(gateway, prompt=long_prompt)) == expected
    figure(f"hand-offs between processes by {kind}: {handed:.0f} of {STREAMS} cold requests, {moved / 2**20:.1f} MiB moved")


def proxied(cluster, where, refuses=False):
    """Prefill and decode by TCP, with a proxy before the one that is written to. Gateway, workers, proxy."""
    port = free_port()
    proxy = Proxy(f"127.0.0.1:{port}")
    proxy.refuses = refuses
    decode = with_transfer(kinds=["tcp"], tcp_listen=f"127.0.0.1:{port}", tcp_advertise=proxy.address)
    workers = [
        cluster.worker("prefill", "--role", "prefill", *where, config=with_transfer(kinds=["tcp"])),
        cluster.worker("decode", "--role", "decode", *where, config=decode),
    ]
    gateway = cluster.gateway("gate", *where, config=HANDOFF)
    gateway.wait_for_workers(2)
    return gateway, workers, proxy


def test_what_a_network_does_to_kv_is_mended(cluster, tmp_path, expected, unheard):
    gateway, workers, proxy = proxied(cluster, in_folder(tmp_path))
    proxy.spoil = 3
    assert answers(all_of(gateway, prompt=long_prompt)) == expected
    assert proxy.spoiled == 3 and proxy.bytes > 1 << 20
    assert_all_came_back(gateway, *workers)
    # A network that swallows everything for a while, then one that is slow, then one that ends connections.
    for fault, right in unheard.items():
        before = proxy.bytes
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            new = begun_by(fault)
            streams = [pool.submit(Stream, gateway, number, prompt=new) for number in range(STREAMS)]
            # In the middle of what travels.
            wait_until("KV travels", lambda: proxy.bytes - before > 1 << 20)  # noqa: B023
            if fault == "stall":
                proxy.stall()
                time.sleep(4)
                proxy.go_on()
            elif fault == "slow":
                proxy.bytes_per_s = 2 << 20
            else:
                proxy.bytes_per_s = None
                proxy.cut()
            assert answers([stream.result() for stream in streams]) == right, fault
        assert_all_came_back(gateway, *workers)
    proxy.close()


def test_a_network_that_never_comes_back_costs_time_and_no_answer(cluster, tmp_path, expected):
    gateway, workers, proxy = proxied(cluster, in_folder(tmp_path), refuses=True)
    # Nothing can be handed over: what was prefilled is decoded where it is, or computed anew.
    assert answers(all_of(gateway, prompt=long_prompt)) == expected
    assert handed_off(gateway) == 0
    assert_all_came_back(gateway, *workers)
    proxy.close()


def test_leases_that_differ_hand_nothing_off_and_answer_all_the_same(cluster, tmp_path, expected):
    """Both ends must agree on everything in the envelope; one that does not is refused typed, and the request goes the whole path."""
    where = in_folder(tmp_path)
    other = {**HANDOFF, "handoff": {**HANDOFF["handoff"], "write_lease_ms": 1300}}
    workers = [
        cluster.worker("prefill", "--role", "prefill", *where, config=HANDOFF),
        cluster.worker("decode", "--role", "decode", *where, config=other),
    ]
    gateway = cluster.gateway("gate", *where, config=HANDOFF)
    gateway.wait_for_workers(2)
    assert answers(all_of(gateway, prompt=long_prompt)) == expected
    assert handed_off(gateway) == 0
    assert_all_came_back(gateway, *workers)


NAMESPACE, WIRE = "penstock-there", "penstock-wire"
HERE, THERE = "10.77.0.1", "10.77.0.2"


@pytest.fixture
def network():
    """Another network namespace and a wire to it: two hosts, as far as the processes can tell."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip (Debian: iproute2)")
    commands = [
        f"ip netns add {NAMESPACE}",
        f"ip link add {WIRE} type veth peer name eth0 netns {NAMESPACE}",
        f"ip addr add {HERE}/24 dev {WIRE}",
        f"ip link set {WIRE} up",
        f"ip -n {NAMESPACE} addr add {THERE}/24 dev eth0",
        f"ip -n {NAMESPACE} link set eth0 up",
        f"ip -n {NAMESPACE} link set lo up",
    ]
    # Its end of the wire goes with it, and so does the other one.
    clean = lambda: subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)  # noqa: E731
    clean()
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no network namespaces here: {command}: {done.stderr.strip()}")
        yield
    finally:
        clean()


def test_two_hosts(cluster, tmp_path, expected, network):
    """Gateway and prefill on one host, decode on the other: control, tokens and KV cross the wire between them."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    where = (*in_folder(tmp_path), "--token-file", token)
    workers = []
    for name, address, before in (
        ("prefill", HERE, ()),
        ("decode", THERE, ("ip", "netns", "exec", NAMESPACE)),
    ):
        config = with_transfer(kinds=["tcp"], tcp_listen=f"{address}:0")
        workers.append(cluster.worker(name, "--role", name, *where, config=config, before=before, address=address))
    gateway = cluster.gateway("gate", *where, config=HANDOFF)
    gateway.wait_for_workers(2)
    assert answers(all_of(gateway, prompt=long_prompt)) == expected
    assert handed_off(gateway) >= 6
    assert workers[0].metrics().sum("penstock_kv_transport_peers", kind="tcp") == 1
    assert_all_came_back(gateway, *workers)
