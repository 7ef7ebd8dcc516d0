"""What decides can be seen, changed and put back while requests run, and only by those who may."""

import hashlib
import time

import httpx
import pytest

from policies import COMPONENTS, HOSTILE, SEATS, needs_components, needs_hostile, policy, write_set
from server import MODEL_NAME, Server

PROMPT = {"model": MODEL_NAME, "prompt": "One, two,", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("policies"), "--kv-blocks", 600)
    yield server
    assert server.stop() == 0, server.log()


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("native"), "--kv-blocks", 600, "--policies", "native")
    yield server
    assert server.stop() == 0, server.log()


def complete(server):
    answer = httpx.post(f"{server.url}/v1/completions", json=PROMPT, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.headers["x-penstock-policy-generation"]


@needs_components
def test_the_shipped_components_decide_unless_told_and_the_server_says_so(server):
    shown = httpx.get(f"{server.admin_url()}/policies").json()
    assert [(seat["seat"], seat["kind"]) for seat in shown["seats"]] == [(seat, "wasm") for seat in SEATS]
    assert shown["generation"] == 1 and shown["replicas"] == [{"replica": 0, "generation": 1}]
    assert shown["by"] == "shipped"
    assert complete(server)[1] == "1"
    [line] = [line for line in server.log().splitlines() if "decided by:" in line]
    for seat, name in SEATS.items():
        digest = hashlib.sha256((COMPONENTS / f"{name}.wasm").read_bytes()).hexdigest()
        assert f"{seat} {name.removeprefix(seat + '-')} {digest[:12]}" in line, line
    assert f"generation 1, set {shown['digest'][:12]} (the shipped set" in line


@needs_components
def test_the_configuration_in_force_has_the_set_with_its_seats(server):
    shown = httpx.get(f"{server.admin_url()}/policies").json()
    config = httpx.get(f"{server.admin_url()}/config").text
    assert f"# policy set in force: {shown['digest']} (generation {shown['generation']}, by {shown['by']})" in config
    for seat in shown["seats"]:
        [line] = [line for line in config.splitlines() if line.startswith(f"#   {seat['seat']}: wasm {seat['policy']} ")]
        assert f"sha256:{seat['component']}" in line and f"fuel-base {seat['fuel_base']}" in line, line
        assert "parameters {" in line, line


def test_native_seats_the_native_defaults(native):
    shown = httpx.get(f"{native.admin_url()}/policies").json()
    assert [(seat["seat"], seat["kind"]) for seat in shown["seats"]] == [(seat, "native") for seat in SEATS]
    assert shown["generation"] == 1 and shown["replicas"] == [{"replica": 0, "generation": 1}]
    assert complete(native)[1] == "1"
    assert httpx.post(f"{native.admin_url()}/policies/rollback").status_code == 409


def test_what_cannot_serve_is_refused_by_name_and_changes_nothing(server):
    admin = server.admin_url()
    before = httpx.get(f"{admin}/policies").json()["digest"]
    junk = b"\0asm junk"
    refused = httpx.put(f"{admin}/policies/components/{hashlib.sha256(junk).hexdigest()}", content=junk)
    assert refused.status_code == 422 and refused.json()["error"]["code"] == "policy_refused"
    refused = httpx.put(f"{admin}/policies/components/{'0' * 64}", content=junk)
    assert "digest" in refused.json()["error"]["message"]
    for document, part in [
        ({"routing": {"policy": "native:nonsense"}}, "routing.policy"),
        ({"router": {"policy": "native:overlap-load"}}, "no such seat"),
        ({"routing": {"policy": "native:overlap-load", "fuel": 1}}, "routing.fuel"),
    ]:
        refused = httpx.post(f"{admin}/policies", json=document)
        assert refused.status_code == 422 and part in refused.json()["error"]["message"], refused.text
    missing = httpx.post(f"{admin}/policies", json={"routing": {"policy": f"sha256:{'1' * 64}"}}).json()["digest"]
    refused = httpx.post(f"{admin}/policies/{missing}/activate")
    assert refused.status_code == 422 and "not loaded" in refused.json()["error"]["message"], refused.text
    assert httpx.post(f"{admin}/policies/{'2' * 64}/activate").status_code == 404
    shown = httpx.get(f"{admin}/policies").json()
    assert shown["digest"] == before and shown["generation"] == 1
    assert any(event["event"] == "refused" and event["set"] == missing for event in shown["history"])


def test_only_this_machine_and_no_web_page_may_ask(server):
    admin = server.admin_url()
    assert httpx.get(f"{admin}/policies", headers={"host": "penstock.example"}).status_code == 403
    assert httpx.post(f"{admin}/policies/rollback", headers={"origin": "http://penstock.example"}).status_code == 403


def test_one_native_policy_takes_the_place_of_another_and_gives_it_back(server):
    admin = server.admin_url()
    text, _ = complete(server)
    first = httpx.get(f"{admin}/policies").json()
    digest = httpx.post(f"{admin}/policies", json={"routing": {"policy": "native:best-credit"}}).json()["digest"]
    generation = httpx.post(f"{admin}/policies/{digest}/activate").json()["generation"]
    assert generation > first["generation"]
    assert complete(server) == (text, str(generation))
    shown = httpx.get(f"{admin}/policies").json()
    assert shown["seats"][1]["policy"] == "best-credit" and shown["replicas"][0]["generation"] == generation
    code, out, err = policy(server, "rollback")
    assert code == 0 and first["digest"] in out, err
    assert complete(server) == (text, str(generation + 1))


def test_the_log_and_the_story_of_a_request(server):
    complete(server)
    time.sleep(0.3)
    log = httpx.get(f"{server.admin_url()}/policies/log?n=200").json()["decisions"]
    request = [decision["request"] for decision in log if decision["question"] == "routing"][-1]
    code, out, err = policy(server, "explain", request)
    assert code == 0, err
    assert "asked whether it may enter" in out and "to admit it" in out and "which of 1 replicas" in out
    code, out, _ = policy(server, "log", "-n", "5", "--question", "admission")
    assert code == 0 and 1 <= len(out.splitlines()) <= 5
    assert policy(server, "explain", "7")[0] != 0


def test_a_token_is_wanted_where_one_is_set(tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    server = Server(tmp_path / "server", "--kv-blocks", 600, "--admin-token-file", token)
    admin = server.admin_url()
    assert httpx.get(f"{admin}/policies").status_code == 401
    assert httpx.get(f"{admin}/policies", headers={"authorization": "Bearer 0123456789abcdef"}).status_code == 401
    assert httpx.get(f"{admin}/health").status_code == 200
    assert policy(server, "list")[0] != 0
    code, out, err = policy(server, "--admin-token-file", token, "list")
    assert code == 0 and "fairness" in out, err
    assert server.stop() == 0


@needs_components
def test_components_are_loaded_put_in_force_inspected_and_rolled_back(server, tmp_path):
    text, _ = complete(server)
    path = write_set(tmp_path)
    code, out, err = policy(server, "activate", str(path))
    assert code == 0, err
    digest = out.split()[-1]
    assert complete(server)[0] == text, "policies decide where and when, never what"
    code, out, err = policy(server, "list")
    assert code == 0 and all(seat in out for seat in SEATS), err
    assert out.count(" wasm ") == 5, out
    code, out, err = policy(server, "inspect", digest[:12])
    assert code == 0 and '"declares"' in out and "waiting" in out, err
    metrics = httpx.get(f"{server.admin_url()}/metrics").text
    assert 'penstock_policy_call_duration_seconds_count{decision="routing"' in metrics
    code, _, err = policy(server, "rollback")
    assert code == 0, err
    assert complete(server)[0] == text


@needs_components
def test_a_watched_folder_changes_what_decides_and_a_broken_one_changes_nothing(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    server = Server(tmp_path / "server", "--kv-blocks", 600, "--policy-dir", folder)
    admin = server.admin_url()

    def wait_for(holds):
        deadline = time.monotonic() + 30
        while not holds(httpx.get(f"{admin}/policies").json()):
            assert time.monotonic() < deadline, httpx.get(f"{admin}/policies").text
            time.sleep(0.1)

    path = write_set(folder)
    wait_for(lambda shown: all(seat["kind"] == "wasm" for seat in shown["seats"]))
    good = httpx.get(f"{admin}/policies").json()["digest"]
    path.write_text("[routing]\npolicy = 3\n")
    wait_for(lambda shown: any(event["event"] == "refused" and event["by"] == "folder" for event in shown["history"]))
    assert httpx.get(f"{admin}/policies").json()["digest"] == good
    assert complete(server)[0]
    assert server.stop() == 0


@needs_hostile
def test_a_policy_that_fails_too_often_gives_way_to_the_last_good_set(server):
    admin = server.admin_url()
    good = httpx.get(f"{admin}/policies").json()["digest"]
    component = (HOSTILE / "routing-traps-in-observe.wasm").read_bytes()
    digest = hashlib.sha256(component).hexdigest()
    assert httpx.put(f"{admin}/policies/components/{digest}", content=component).status_code == 200
    bad = httpx.post(f"{admin}/policies", json={"routing": {"policy": f"sha256:{digest}"}}).json()["digest"]
    assert httpx.post(f"{admin}/policies/{bad}/activate").status_code == 200
    deadline = time.monotonic() + 30
    while httpx.get(f"{admin}/policies").json()["digest"] != good:
        assert complete(server)[0], "no request fails for it"
        assert time.monotonic() < deadline
    shown = httpx.get(f"{admin}/policies").json()
    assert shown["by"] == "quarantine"
    [entry] = [entry for entry in shown["sets"] if entry["digest"] == bad]
    assert entry["state"] == "quarantined" and "routing" in entry["reason"]
    metrics = httpx.get(f"{admin}/metrics").text
    assert 'penstock_policy_rollbacks_total{cause="quarantine"' in metrics
    assert 'penstock_policy_quarantines_total{decision="routing"' in metrics
