"""Starts and ends processes of each role, and reads what they show of themselves."""

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx

MODEL_NAME = "demo"
START_LIMIT_S = 90
STOP_LIMIT_S = 45


def toml_value(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + " }"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def toml_text(sections):
    """Sections of plain keys, as `penstock.toml` has them."""
    lines = []
    for name, keys in sections.items():
        lines.append(f"[{name}]")
        lines += [f'"{key}" = {toml_value(value)}' for key, value in keys.items()]
    return "\n".join(lines) + "\n"


def command(*args):
    return [os.environ["PENSTOCK_BIN"], *map(str, args)]


def run_to_end(*args, env=None, limit_s=60):
    """Runs the binary until it ends by itself. Returns (exit code, stdout, stderr)."""
    done = subprocess.run(
        command(*args),
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


class Process:
    """A running role of the binary. Ended by SIGTERM to its own process id, and by SIGKILL to the same one when it does not end in time."""

    ROLE = "serve"
    FLAGS = ("--listen", "{address}:0")

    def __init__(
        self, folder: Path, *args, config=None, keys=None, model=None, env=None, wait=True, before=(), address="127.0.0.1"
    ):
        """`before` runs the binary, in another network for instance; `address` is where it is asked for probes there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.address = folder, address
        self.log_path = folder / "log"
        self.keys_path = folder / "keys.toml"
        sections = {name: dict(section) for name, section in (config or {}).items()}
        if keys is not None:
            self.keys_path.write_text(keys)
            sections.setdefault("server", {})["keys"] = self.keys_path
        config_path = folder / "penstock.toml"
        config_path.write_text(toml_text(sections))
        model = model or os.environ["PENSTOCK_DEMO_MODEL"]
        flags = ["--config", config_path, "--model", model, "--served-model-name", MODEL_NAME]
        flags += [flag.format(address=address) for flag in self.FLAGS]
        self.log_file = open(self.log_path, "wb")
        self.process = subprocess.Popen(
            [*before, *command(self.ROLE, *flags, *args)],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self.log_file,
            stderr=self.log_file,
        )
        try:
            self._wait_until_it_listens()
            if wait:
                self.wait_for_health()
        except BaseException:
            self.kill()
            raise

    def _wait_until_it_listens(self):
        raise NotImplementedError

    def _wait_for_address(self, pattern):
        """The port in the first line that fits."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log())
            if found:
                return int(found.group(1))
            if self.process.poll() is not None:
                raise RuntimeError(f"the process ended with {self.process.returncode}:\n{self.log()}")
            time.sleep(0.05)
        raise RuntimeError(f"the process did not start in {START_LIMIT_S} s:\n{self.log()}")

    def wait_for_health(self):
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                return
            if self.process.poll() is not None:
                raise RuntimeError(f"the process ended with {self.process.returncode}:\n{self.log()}")
            time.sleep(0.05)
        raise RuntimeError(f"the process is not healthy:\n{self.log()}")

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        return self.log_path.read_text(errors="replace")

    def admin_url(self):
        address = re.search(r'admin="?(127\.0\.0\.1:\d+)', self.log())
        assert address, self.log()
        return f"http://{address.group(1)}"

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self, limit_s=STOP_LIMIT_S):
        return self.process.wait(limit_s)

    def stop(self):
        """SIGTERM, then the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill()
        self.log_file.close()
        return self.process.returncode

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.log_file.close()

    def wait_for_log(self, text, limit_s=20):
        deadline = time.monotonic() + limit_s
        while text not in self.log():
            assert time.monotonic() < deadline, f"{text!r} is not in the log:\n{self.log()}"
            time.sleep(0.05)

    def lines(self):
        """The log without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log()).splitlines()

    def kv_blocks(self):
        """Blocks of each replica's pool, as the log says when the server is ready."""
        return int(re.search(r" kv_blocks=(\d+) kv_dtype=", self.log()).group(1))

    def rss_kib(self):
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1))

    def metrics(self):
        return Metrics(httpx.get(f"{self.url}/metrics", timeout=20).text)

    def wait_until_idle(self, limit_s=30):
        """Waits until nothing runs, waits or is held for a client; the proof that all came back is that this ends."""
        deadline = time.monotonic() + limit_s
        while True:
            busy = self.metrics().busy()
            if not busy:
                return
            assert time.monotonic() < deadline, f"does not come to rest: {busy}\n{self.log()[-3000:]}"
            time.sleep(0.05)


class Server(Process):
    """Everything in one."""

    def _wait_until_it_listens(self):
        self.port = self._wait_for_address(r"serves \S+ on http://127\.0\.0\.1:(\d+)")
        self.url = f"http://127.0.0.1:{self.port}"


class Gateway(Server):
    """The edge before workers. Healthy once a worker is there."""

    ROLE = "gateway"

    def cluster(self):
        """What it tells operators of its workers, by name, and of discovery."""
        shown = httpx.get(f"{self.admin_url()}/replicas", timeout=10).json()["cluster"]
        return {worker["worker"]: worker for worker in shown["workers"]}, shown["discovery"]

    def wait_for_workers(self, count, limit_s=START_LIMIT_S):
        """Waits until so many are connected and have said how much they take."""
        deadline = time.monotonic() + limit_s
        while True:
            workers, _ = self.cluster()
            loads = httpx.get(f"{self.url}/v1/loads", timeout=10).json()["loads"]
            ready = sum(load["state"] == "ready" and load["max_total_num_tokens"] > 0 for load in loads)
            connected = sum(worker["connection"] == "connected" for worker in workers.values())
            if connected == count == ready:
                return
            assert time.monotonic() < deadline, f"{connected} of {count} workers: {workers}\n{self.log()[-3000:]}"
            time.sleep(0.05)


class Worker(Process):
    """One replica behind gateways. `control` is where they call it."""

    ROLE = "worker"
    FLAGS = (
        *("--listen", "{address}:0", "--control-listen", "{address}:0", "--kv-blocks", "300"),
        *("--threads", "1", "--policies", "native"),
    )

    def _wait_until_it_listens(self):
        address = re.escape(self.address)
        self.port = self._wait_for_address(rf"probes.{{0,12}}=.{{0,12}}{address}:(\d+)")
        self.url = f"http://{self.address}:{self.port}"

    @property
    def control(self):
        port = self._wait_for_address(rf"for gateways at {re.escape(self.address)}:(\d+)")
        return f"{self.address}:{port}"


class Etcd:
    """A real etcd of the test's own on loopback, which can be killed and started again."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.client, self.peer = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.client}"
        self.process = None
        self.start()

    @staticmethod
    def program():
        """`PENSTOCK_ETCD`, what `cargo xtask etcd` fetched, or one on the path."""
        fetched = Path(os.environ["PENSTOCK_BIN"]).resolve().parents[1] / "etcd/usr/bin/etcd"
        named = os.environ.get("PENSTOCK_ETCD")
        found = [named, fetched if fetched.is_file() else None, shutil.which("etcd")]
        return next((path for path in found if path), None)

    def start(self):
        peers = f"http://127.0.0.1:{self.peer}"
        self.process = subprocess.Popen(
            [
                *(self.program(), "--data-dir", self.folder / "data", "--name", "default", "--log-level", "error"),
                *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
                *("--initial-cluster", f"default={peers}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(self.folder / "log", "ab"),
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=2).json().get("health") == "true":
                    return
            except httpx.HTTPError:
                pass
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.1)

    def kill(self):
        """As `kill -9` does."""
        self.process.kill()
        self.process.wait()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Metrics:
    """One reading of `/metrics`."""

    GAUGES_AT_REST = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "penstock_requests_in_flight",
        "penstock_pending_bytes",
        "penstock_send_buffer_bytes",
        "penstock_no_progress",
    )

    def __init__(self, text):
        self.text = text
        self.series = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                self.series[key] = float(value)

    def names(self):
        return {key.split("{")[0] for key in self.series}

    def sum(self, name, **labels):
        """Over all series of that name whose labels have these values."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [
            value
            for key, value in self.series.items()
            if key.split("{")[0] == name and all(label in key for label in wanted)
        ]
        assert found or labels, f"no series of {name}"
        return sum(found)

    def held(self):
        """Blocks of KV that work holds or is promised, by how. Each of these series is there, or the name is wrong."""
        states = {state: f'state="{state}"' for state in ("active", "in_transfer")}
        found = {
            f"{state} blocks": [v for key, v in self.series.items() if key.startswith("penstock_kv_blocks{") and label in key]
            for state, label in states.items()
        }
        assert all(found.values()), f"no series of {[name for name, values in found.items() if not values]}"
        held = {name: sum(values) for name, values in found.items()}
        return {**held, "reserved blocks": self.sum("penstock_kv_reserved_blocks")}

    def busy(self):
        """What has not come back to where it began."""
        busy = {name: self.sum(name) for name in self.GAUGES_AT_REST}
        busy.update(self.held())
        return {name: value for name, value in busy.items() if value != 0}


class Background:
    """Runs `work(stop)` on a thread; a failure in it is raised at the end."""

    def __init__(self, work):
        self.stop = threading.Event()
        self.failure = None

        def run():
            try:
                work(self.stop)
            except BaseException as failure:  # noqa: BLE001 - handed to the test's thread
                self.failure = failure

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def end(self, limit_s=30):
        self.stop.set()
        self.thread.join(limit_s)
        assert not self.thread.is_alive(), "the background work does not end"
        if self.failure:
            raise self.failure
