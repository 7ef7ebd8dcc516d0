"""Prompts computed at one replica and decoded at another: what clients get is what one replica gives."""

import concurrent.futures
import re

import httpx
import pytest

from server import MODEL_NAME, Server, run_to_end

STREAMS = 16


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A server of one replica, and one of three: one computes prompts, two decode."""
    folder = tmp_path_factory.mktemp("handoff")
    whole = Server(folder / "whole", "--replicas", "1")
    try:
        config = {"replicas": {"prefill": 1, "decode": 2, "handoff_tokens_min": 48, "chunk_tokens": 64}}
        parted = Server(folder / "parted", config=config)
    except BaseException:
        whole.stop()
        raise
    yield whole, parted
    parted.stop()
    whole.stop()


def prompt(number):
    """Long enough to be handed off, but for every fourth; every third begins like another one."""
    stem = "The keeper of the reservoir writes down the level of the water each morning, and the weather. "
    start = f"Day {number if number % 3 else 0}. "
    return start + stem * (1 if number % 4 == 0 else 4 + number % 5) + f"On day {number} he wrote:"


def asked(number):
    body = {"model": MODEL_NAME, "prompt": prompt(number), "max_tokens": 12 + number % 20, "stream": True}
    if number % 2:
        return {**body, "temperature": 0}
    return {**body, "temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.3, "seed": number, "logprobs": 2}


def stream(server, number):
    """Text, tokens with their log-probabilities, and the reason for the end."""
    text, tokens, reasons = "", [], []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked(number), timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in httpx.Response(200, content=line[6:]).json()["choices"]:
                text += choice["text"]
                if choice.get("logprobs"):
                    tokens += zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)
                if choice.get("finish_reason"):
                    reasons.append(choice["finish_reason"])
    return text, tokens, reasons


def all_of(server):
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: stream(server, number), range(STREAMS)))


def metric(server, name):
    page = httpx.get(f"{server.url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}[^\n]* ([0-9.e+]+)$", page, re.MULTILINE))


def test_sixteen_streams_get_the_texts_of_one_replica(both, figure):
    whole, parted = both
    expected = all_of(whole)
    assert all(text and reasons for text, _, reasons in expected)
    cold = all_of(parted)
    assert cold == expected
    handed = metric(parted, 'penstock_handoffs_total{end="handed_off"')
    assert handed >= STREAMS // 2, "most of them were handed off"
    # Once more, with what both caches hold by now.
    assert all_of(parted) == expected
    assert metric(parted, "penstock_handoffs_running") == 0
    moved = metric(parted, "penstock_kv_transfer_bytes_total")
    assert moved > 0 and metric(whole, "penstock_kv_transfer_bytes_total") == 0
    figure(f"hand-offs: {handed:.0f} of {STREAMS} cold requests, {moved / 2**20:.1f} MiB moved")


def test_a_client_that_leaves_gives_everything_back(both):
    _, parted = both
    for number in range(1, 12, 2):
        body = {**asked(number), "prompt": f"Leaving {number}. " + prompt(number), "max_tokens": 400}
        url = f"{parted.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            if number % 3:
                next(answer.iter_lines())
    parted.wait_until_idle()
    assert stream(parted, 1)[2], "it still serves"


def test_a_journal_of_hand_offs_comes_out_again(tmp_path):
    config = {"replicas": {"prefill": 1, "decode": 1, "handoff_tokens_min": 48}}
    server = Server(tmp_path / "server", "--policies", "native", "--journal", tmp_path / "journal", config=config)
    try:
        texts = all_of(server)
        handed = metric(server, 'penstock_handoffs_total{end="handed_off"')
    finally:
        server.stop()
    assert all(text for text, _, _ in texts) and handed > 0
    code, out, err = run_to_end("verify", tmp_path / "journal")
    assert code == 0, out + err
