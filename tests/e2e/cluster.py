"""Clusters of processes, the streams that are asked of them, and what all of them may say."""

import concurrent.futures
import json
import time

import httpx

from server import MODEL_NAME, Gateway, Worker

STREAMS = 16
TOKEN = "0123456789abcdef0123456789abcdef"


def prompt(number):
    stem = "The keeper of the reservoir writes down the level of the water each morning, and the weather. "
    return f"Day {number if number % 3 else 0}. " + stem * (1 + number % 4) + f"On day {number} he wrote:"


def long_prompt(number):
    """Long enough to be handed off, but for every fourth; every third begins like another one."""
    stem = "The keeper of the reservoir writes down the level of the water each morning, and the weather. "
    start = f"Day {number if number % 3 else 0}. "
    return start + stem * (1 if number % 4 == 0 else 4 + number % 5) + f"On day {number} he wrote:"


def begun_by(words):
    """The same behind words that no cache has seen."""
    return lambda number: f"After {words}. {long_prompt(number)}"


def asked(number, tokens=None, prompt=prompt):
    tokens = tokens or 12 + number % 20
    body = {"model": MODEL_NAME, "prompt": prompt(number), "max_tokens": tokens, "stream": True, "ignore_eos": True}
    if number % 2:
        return {**body, "temperature": 0}
    return {**body, "temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.3, "seed": number, "logprobs": 2}


class Stream:
    """One answer: text, tokens with their log-probabilities, and how it ended. Ends are counted."""

    def __init__(self, server, number, tokens=None, started=None, prompt=prompt):
        self.text, self.tokens, self.reasons, self.errors, self.refused = "", [], [], [], None
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=asked(number, tokens, prompt), timeout=120
        ) as answer:
            if answer.status_code != 200:
                self.refused = (answer.status_code, json.loads(answer.read())["error"])
                return
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.errors.append(chunk["error"])
                for choice in chunk.get("choices", []):
                    self.text += choice["text"]
                    if choice["text"] and started is not None:
                        started.release()
                        started = None
                    if choice.get("logprobs"):
                        logprobs = choice["logprobs"]
                        self.tokens += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
                    if choice.get("finish_reason"):
                        self.reasons.append(choice["finish_reason"])

    def answer(self):
        return self.text, self.tokens, self.reasons

    def ends(self):
        return len(self.reasons) + len(self.errors) + (self.refused is not None)


def all_of(server, tokens=None, prompt=prompt):
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: Stream(server, number, tokens, prompt=prompt), range(STREAMS)))


def answers(streams):
    assert all(stream.ends() == 1 and stream.reasons for stream in streams), [stream.__dict__ for stream in streams]
    return [stream.answer() for stream in streams]


class Cluster:
    """Processes that are ended together, the gateways last."""

    def __init__(self, folder):
        self.folder, self.all = folder, []

    def _add(self, kind, name, *args, **more):
        folder = self.folder / f"{name}-{len(self.all)}"
        process = kind(folder, "--name", name, *args, **more)
        self.all.append(process)
        return process

    def worker(self, name, *args, **more):
        return self._add(Worker, name, *args, **more)

    def gateway(self, name, *args, **more):
        return self._add(Gateway, name, "--policies", "native", *args, **{"wait": False, **more})

    def end(self):
        for process in self.all:
            process.stop()


def in_folder(tmp_path):
    folder = tmp_path / "discovery"
    folder.mkdir(exist_ok=True)
    return ("--discovery", f"folder:{folder}")


def record_of(tmp_path, name):
    """What a worker says of itself in the folder; none before it does and after it has left."""
    try:
        return json.loads((tmp_path / "discovery" / f"{name}.json").read_text().splitlines()[1])
    except (FileNotFoundError, IndexError):
        return None


def wait_until(what, fits, limit_s=30):
    deadline = time.monotonic() + limit_s
    while not fits():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
