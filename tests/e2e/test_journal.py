"""What the machines did is on disk, comes out again, tells nothing that a client wrote, and can be asked about request by request."""

import json
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import httpx
import pytest

from server import MODEL_NAME, Server, run_to_end

COMPONENTS = Path(os.environ.get("PENSTOCK_POLICIES", Path(__file__).parents[2] / "target" / "policies"))
HOSTILE = Path(os.environ.get("PENSTOCK_HOSTILE", "-"))
SECRET = "Zanzibar quokkas adore marmalade"


def complete(server, number, **more):
    body = {"model": MODEL_NAME, "prompt": f"{SECRET}, said {number}", "max_tokens": 12, "temperature": 0, **more}
    answer = httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"x-request-id": f"journal-{number}"}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def load(server, requests=24, streams=8):
    """Some requests at once. Their texts."""
    texts, numbers, lock = [], iter(range(requests)), threading.Lock()

    def run():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            texts.append(complete(server, number)["choices"][0]["text"])

    threads = [threading.Thread(target=run) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == requests
    return texts


def policy(server, *args):
    code, out, err = run_to_end("policy", "--admin", server.admin_url(), *args)
    assert code == 0, err
    return out


def verify(folder, *args, code=0):
    found, out, err = run_to_end("verify", folder, *args, limit_s=120)
    assert found == code, out + err
    return out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The journal of a run under load, with swaps and, where there are components, with one that traps."""
    folder = tmp_path_factory.mktemp("journal")
    server = Server(folder / "server", "--journal", folder / "journal", "--kv-blocks", 300)
    texts = load(server)
    explained = policy(server, "explain", "journal-3")
    another = folder / "another.json"
    another.write_text(json.dumps({"routing": {"policy": "native:best-credit"}}))
    policy(server, "activate", another)
    texts += load(server)
    traps = HOSTILE / "routing-traps-in-observe.wasm"
    components = sorted(COMPONENTS.glob("*.wasm"))
    for name, path in [("shipped", COMPONENTS / "routing-load-overlap.wasm"), ("traps", traps)]:
        if path.is_file():
            document = folder / f"{name}.toml"
            shutil.copy(path, folder / path.name)
            document.write_text(f'[routing]\npolicy = "file:{path.name}"\n')
            policy(server, "activate", document)
            texts += load(server)
    log = policy(server, "log", "-n", "4")
    if traps.is_file():
        assert "the native default answered instead: " in policy(server, "explain", "journal-3")
    metrics = server.metrics()
    assert server.stop() == 0, server.log()
    return folder, texts, log, explained, metrics, len(components)


def test_everything_comes_out_again(recorded, figure):
    folder, texts, _, _, metrics, components = recorded
    out = verify(folder / "journal", "--components", folder)
    assert "2 segments: 2 complete, 0 broken off, 0 damaged" in out and "verified: everything" in out, out
    assert "0 different" in out
    if components:
        assert "not at hand" not in out, out
        # Without the components the recorded answers stand, and that is said.
        out = verify(folder / "journal")
        assert "verified: everything" in out
    written = metrics.sum("penstock_journal_bytes_total")
    figure(f"journal: {written / len(texts):.0f} bytes a request of about 10 tokens in and 12 out")


def test_nothing_that_a_client_wrote_is_in_it(recorded):
    folder, texts, *_ = recorded
    paths = list((folder / "journal").iterdir())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)
    written = b"".join(path.read_bytes() for path in paths)
    for text in [SECRET, *SECRET.split(), "journal-3", *[text[:16] for text in texts if len(text) >= 16]]:
        assert text.encode() not in written, text


def test_a_request_is_told_from_beginning_to_end(recorded):
    _, _, log, explained, _, _ = recorded
    assert len(log.splitlines()) == 4
    said = [line for line in explained.splitlines()]
    for part in ["arrived:", "(admission, generation", "it was told:", "let in", "(routing, generation", "row 0 of 1 replicas",
                 "(order, generation", "handed to replica 0", "first token", "ended: "]:
        assert any(part in line for line in said), (part, explained)
    assert "of up to 12 tokens" in explained and "12 output tokens" in explained
    order = [next(at for at, line in enumerate(said) if part in line) for part in ["arrived:", "let in", "handed to", "ended: "]]
    assert order == sorted(order), explained


def test_damage_is_named(recorded, tmp_path):
    folder, *_ = recorded
    for path in (folder / "journal").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        copy = tmp_path / path.name
        copy.write_bytes(data)
        out = verify(copy, code=3)
        assert "DAMAGED" in out, out
        copy.write_bytes(path.read_bytes()[:-30])
        out = verify(copy)
        assert "broken off" in out and "record" in out, out
    (tmp_path / "other.journal").write_bytes(b"something else")
    assert "DAMAGED" in verify(tmp_path / "other.journal", code=3)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run_to_end("verify", empty)[0] == 1


def test_a_server_that_is_killed_leaves_a_journal_that_holds_as_far_as_it_goes(tmp_path):
    journal = tmp_path / "journal"
    # A small pool: a segment opens with the books of all blocks, and is at least as long again.
    config = {"journal": {"segment_bytes": 65536}, "replicas": {"kv_blocks": 2048}}
    server = Server(tmp_path / "server", "--journal", journal, config=config)
    load(server, requests=40)
    stop = threading.Event()

    def on():
        number = 0
        while not stop.is_set():
            try:
                complete(server, number, max_tokens=64)
            except httpx.HTTPError:
                return
            number += 1

    threads = [threading.Thread(target=on) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    server.kill()
    stop.set()
    for thread in threads:
        thread.join()
    out = verify(journal)
    cut = [line for line in out.splitlines() if "its writer was gone" in line]
    last = {}
    for path in sorted(journal.iterdir()):
        last["gateway" if "-gateway-" in path.name else "replica"] = path.name
    assert {line.split(":")[0] for line in cut} <= set(last.values()), out
    assert len(cut) == 2 and all("after record" in line or "inside record" in line for line in cut), out
    assert "verified: everything" in out
    assert len(list(journal.iterdir())) > 2, "more than one segment a machine"


def test_a_disk_that_takes_nothing_does_not_stop_the_server(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    server = Server(tmp_path / "server", "--journal", in_the_way)
    complete(server, 1)
    server.wait_for_log("the journal cannot be written")
    assert server.metrics().sum("penstock_journal_errors_total") >= 1
    assert server.stop() == 0


def test_what_cannot_be_told_says_why(server):
    admin = server.admin_url()
    complete(server, "once")
    for request, part in [("nobody-knows", "x-request-id"), ("18446744073709551615", "the last one of this server")]:
        code, _, err = run_to_end("policy", "--admin", admin, "explain", request)
        assert code == 1 and part in err, err
    found = json.loads(policy(server, "explain", "journal-once", "--json"))
    assert found["story"] and found["decisions"]
    sequence = found["decisions"][0]["sequence"]
    inputs = json.loads(policy(server, "log", "--inputs", sequence))
    assert inputs["sequence"] == sequence and inputs["request"]["request"] == found["request"]
    assert inputs["kept_for"] == "sample" and inputs["context"]
    code, _, err = run_to_end("policy", "--admin", admin, "log", "--inputs", "99999999")
    assert code == 1 and "not been decided yet" in err, err
    filtered = json.loads(policy(server, "log", "--seat", "fairness", "--json"))
    assert filtered and all(decision["question"] in ("order", "victims") for decision in filtered)
    assert json.loads(policy(server, "log", "--faults", "--json")) == []
    since = json.loads(policy(server, "log", "--machine", "gateway", "--since", sequence, "-n", 500, "--json"))
    assert since and all(decision["sequence"] > sequence for decision in since)
