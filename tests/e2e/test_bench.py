"""`penstock bench` against the real server: what it says must be what the server says of the same requests."""

import json

import httpx
import pytest

from server import run_to_end


def metric(server, name):
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


@pytest.mark.parametrize("load", [["--streams", "4"], ["--rate", "50"]], ids=["closed", "open"])
def test_counts_are_those_of_the_server(server, tmp_path, load, figure):
    before = {name: metric(server, name) for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")}
    flags = ["--requests", "12", "--warmup", "0", "--output-tokens", "9", "--prompt-words", "20", "--save", tmp_path]
    code, out, err = run_to_end("bench", "--url", server.url, "--json", *flags, *load)
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["completed"], summary["failed"]) == (12, 0)
    assert summary["total_output_tokens"] == 12 * 9
    assert summary["output_tokens_from"] == "usage"
    after = {name: metric(server, name) for name in before}
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 12 * 9
    assert after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"] == summary["total_input_tokens"]
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(12))
    assert all(line["ttft_ms"] <= line["e2el_ms"] for line in lines)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    figure(f"penstock bench {' '.join(load)}: {summary['output_throughput']:.0f} tok/s")


def test_a_shared_beginning_is_found_in_the_cache(server):
    flags = ["--requests", "6", "--streams", "1", "--warmup", "1", "--output-tokens", "2", "--shared-words", "100", "--prompt-words", "4"]
    code, out, err = run_to_end("bench", "--url", server.url, "--json", *flags)
    assert code == 0, err
    summary = json.loads(out)
    # A hundred words are six blocks of 16 tokens at the least; the warm-up has put them there.
    assert summary["total_cached_tokens"] >= 6 * 6 * 16


def test_a_refusal_is_named(server):
    code, out, err = run_to_end("bench", "--url", server.url, "--model", "no-such-model", "--requests", "2", "--warmup", "0")
    assert code == 1
    assert "2 refused" in out
    assert "no request was answered" in err


def test_nobody_there_is_said_with_a_remedy():
    code, _, err = run_to_end("bench", "--url", "http://127.0.0.1:9", "--requests", "1")
    assert code == 1
    assert "nothing answers at http://127.0.0.1:9" in err and "penstock serve" in err


def test_help_teaches_by_example():
    code, out, _ = run_to_end("bench", "--help")
    assert code == 0
    assert "penstock bench --rate 4" in out
