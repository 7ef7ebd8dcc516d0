"""What decides first, what outlives a restart, and what happens where components cannot run."""

import os
import shutil
import signal
import time
from pathlib import Path

import httpx
import pytest

from policies import COMPONENTS, needs_components, policy, write_set
from server import MODEL_NAME, Server, run_to_end

PROMPT = {"model": MODEL_NAME, "prompt": "One, two,", "max_tokens": 12, "temperature": 0}
SMALL = ("--kv-blocks", 600)


def shown(server):
    return httpx.get(f"{server.admin_url()}/policies").json()


def complete(server):
    answer = httpx.post(f"{server.url}/v1/completions", json=PROMPT, timeout=60)
    assert answer.status_code == 200, answer.text


def stop(server):
    assert server.stop() == 0, server.log()


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@needs_components
def test_what_was_put_in_force_comes_back_with_its_memory_and_its_predecessor(tmp_path, state):
    server = Server(tmp_path / "one", *SMALL, "--state-dir", state)
    shipped = shown(server)["digest"]
    assert "no saved policy state" in server.log()
    mine = write_set(tmp_path, fairness="fuel-base = 300000", routing="parameters = { wait-max-us = 7 }")
    code, out, err = policy(server, "activate", str(mine))
    assert code == 0, err
    digest = out.split()[-1]
    for _ in range(3):
        complete(server)
    # A snapshot is due after a second.
    time.sleep(1.5)
    stop(server)
    # The next server has nothing but the folder: neither the set's file nor its components.
    for file in tmp_path.glob("*.wasm"):
        file.unlink()
    mine.unlink()
    server = Server(tmp_path / "two", *SMALL, "--state-dir", state)
    after = shown(server)
    assert after["digest"] == digest and after["by"] == "admin" and after["generation"] == 1
    assert after["seats"][1]["parameters"] == {"wait-max-us": 7}
    assert "in force when the last run ended, by admin" in server.log()
    deadline = time.monotonic() + 10
    resumed = []
    while not resumed and time.monotonic() < deadline:
        resumed = [event for event in shown(server)["history"] if event["event"] == "resumed" and event["seat"] == "fairness"]
    gateway = [event for event in resumed if event["machine"] == "gateway"]
    assert gateway and "given back" in gateway[0]["reason"], resumed
    # The counters of the one flow that was served: 26 bytes a flow, by its page.
    assert int(gateway[0]["reason"].split(" bytes")[0].split()[-1]) >= 26, gateway
    complete(server)
    code, out, err = policy(server, "rollback")
    assert code == 0 and shipped in out, err
    complete(server)
    stop(server)


@needs_components
def test_a_crash_loses_nothing_that_was_decided(tmp_path, state):
    server = Server(tmp_path / "one", *SMALL, "--state-dir", state)
    code, out, err = policy(server, "activate", str(write_set(tmp_path, overload="fuel-base = 40000")))
    assert code == 0, err
    server.signal(signal.SIGKILL)
    server.wait()
    server = Server(tmp_path / "two", *SMALL, "--state-dir", state)
    assert shown(server)["digest"] == out.split()[-1]
    stop(server)


@needs_components
def test_what_is_named_comes_first_and_is_remembered_and_the_shipped_set_has_a_name(tmp_path, state):
    server = Server(tmp_path / "one", *SMALL, "--state-dir", state)
    shipped = shown(server)["digest"]
    stop(server)
    server = Server(tmp_path / "two", *SMALL, "--state-dir", state, "--policies", "native")
    native = shown(server)
    assert native["by"] == "start" and all(seat["kind"] == "native" for seat in native["seats"])
    stop(server)
    server = Server(tmp_path / "three", *SMALL, "--state-dir", state)
    assert shown(server)["digest"] == native["digest"]
    stop(server)
    _, out, _ = run_to_end("config", "--state-dir", state)
    assert f"# first policy set: {native['digest']} (in force when the last run ended, by start)" in out
    _, out, _ = run_to_end("config", "--state-dir", state, "--policies", "shipped")
    assert f"# first policy set: {shipped} (" in out
    server = Server(tmp_path / "four", *SMALL, "--state-dir", state, "--policies", "shipped")
    assert shown(server)["digest"] == shipped and shown(server)["by"] == "start"
    stop(server)


@needs_components
@pytest.mark.parametrize("file", ["policies", "states", "components"])
def test_a_damaged_state_is_said_and_costs_no_start(tmp_path, state, file):
    server = Server(tmp_path / "one", *SMALL, "--state-dir", state)
    shipped = shown(server)["digest"]
    code, out, err = policy(server, "activate", str(write_set(tmp_path, eviction="fuel-base = 30000")))
    assert code == 0, err
    complete(server)
    time.sleep(1.5)
    stop(server)
    damaged = state / file
    for path in damaged.iterdir() if damaged.is_dir() else [damaged]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    server = Server(tmp_path / "two", *SMALL, "--state-dir", state)
    assert "damaged" in server.log()
    assert any(event["event"] == "not-resumed" and "damaged" in event["reason"] for event in shown(server)["history"])
    assert shown(server)["digest"] == (out.split()[-1] if file == "states" else shipped)
    complete(server)
    stop(server)


@needs_components
def test_one_server_uses_a_folder_at_a_time(tmp_path, state):
    first = Server(tmp_path / "one", *SMALL, "--state-dir", state)
    second = Server(tmp_path / "two", *SMALL, "--state-dir", state)
    assert "another server uses it" in second.log() and shown(second)["kept_in"] is None
    complete(second)
    stop(second)
    assert shown(first)["kept_in"] == str(state)
    stop(first)


def test_a_set_that_is_named_must_serve(tmp_path):
    path = tmp_path / "set.toml"
    for text, part in [
        ('[routing]\npolicy = "native:nonsense"\n', "routing.policy"),
        ('[routing]\npolicy = "file:none.wasm"\n', "none.wasm"),
        (f'[routing]\npolicy = "sha256:{"1" * 64}"\n', "not loaded"),
    ]:
        path.write_text(text)
        flags = ["--listen", "127.0.0.1:0", "--model", os.environ["PENSTOCK_DEMO_MODEL"], *SMALL, "--policies", path]
        code, _, said = run_to_end("serve", *flags)
        assert code == 1 and part in said and str(path) in said and "--policies native" in said, said


@needs_components
def test_a_folder_whose_set_is_broken_leaves_the_shipped_one(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "policies.toml").write_text("[routing]\npolicy = 3\n")
    server = Server(tmp_path / "server", *SMALL, "--policy-dir", folder)
    assert shown(server)["by"] == "shipped"
    assert any(event["event"] == "refused" and "routing.policy" in event["reason"] for event in shown(server)["history"])
    stop(server)


def through(tmp_path, monkeypatch, line, binary=None):
    """Starts the server by a script whose first line is `line`."""
    script = tmp_path / "penstock-by-script"
    script.write_text(f'#!/bin/sh\n{line}\nexec {binary or os.environ["PENSTOCK_BIN"]} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PENSTOCK_BIN", str(script))


@needs_components
def test_without_addresses_for_components_the_native_defaults_serve_and_say_why(tmp_path, state, monkeypatch):
    server = Server(tmp_path / "one", *SMALL, "--state-dir", state)
    code, out, err = policy(server, "activate", str(write_set(tmp_path, admission="fuel-base = 30000")))
    assert code == 0, err
    stop(server)
    with monkeypatch.context() as limited:
        through(tmp_path, limited, "ulimit -v 16000000")
        server = Server(tmp_path / "two", *SMALL, "--state-dir", state)
        [line] = [line for line in server.log().splitlines() if "NATIVE DEFAULTS DECIDE" in line]
        assert "wasm engine does not start" in line and "ulimit -v unlimited" in line
        assert all(seat["kind"] == "native" for seat in shown(server)["seats"])
        code, text, _ = policy(server, "list")
        assert code == 0 and "ulimit -v unlimited" in text
        complete(server)
        stop(server)
        named = COMPONENTS / "policies.toml"
        flags = ["--listen", "127.0.0.1:0", "--model", os.environ["PENSTOCK_DEMO_MODEL"], *SMALL]
        code, _, said = run_to_end("serve", *flags, "--policies", named)
        assert code == 1 and str(named) in said and "ulimit -v unlimited" in said, said
    # What was in force is not forgotten for it.
    server = Server(tmp_path / "three", *SMALL, "--state-dir", state)
    assert shown(server)["digest"] == out.split()[-1]
    stop(server)


def test_without_components_the_native_defaults_serve_and_say_why(tmp_path, monkeypatch):
    alone = tmp_path / "bin" / "penstock"
    alone.parent.mkdir()
    shutil.copy2(os.environ["PENSTOCK_BIN"], alone)
    monkeypatch.setenv("PENSTOCK_BIN", str(alone))
    server = Server(tmp_path / "server", *SMALL)
    [line] = [line for line in server.log().splitlines() if "NATIVE DEFAULTS DECIDE" in line]
    assert "cargo xtask policies" in line
    assert all(seat["kind"] == "native" for seat in shown(server)["seats"])
    complete(server)
    stop(server)


@needs_components
def test_the_shipped_set_is_found_beside_the_binary(tmp_path, monkeypatch):
    alone = tmp_path / "penstock"
    shutil.copy2(os.environ["PENSTOCK_BIN"], alone)
    shutil.copytree(COMPONENTS, tmp_path / "policies")
    monkeypatch.setenv("PENSTOCK_BIN", str(alone))
    _, out, _ = run_to_end("config")
    assert f"({Path(tmp_path).resolve() / 'policies' / 'policies.toml'})" in out
