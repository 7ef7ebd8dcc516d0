"""What the files of this folder share: servers, clients, and the place where figures are printed."""

import os
import resource
import shutil
import tempfile

import httpx
import pytest
from openai import OpenAI

from server import Etcd, Server

FIGURES = []


def pytest_configure():
    """What every server started from here inherits."""
    # Thousands of connections need as many descriptors.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # A cache of their own: nothing is written to the user's.
    os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="penstock-e2e-")


def pytest_unconfigure():
    shutil.rmtree(os.environ.pop("PENSTOCK_CACHE"), ignore_errors=True)


def pytest_collection_modifyitems(items):
    for name in ("PENSTOCK_BIN", "PENSTOCK_DEMO_MODEL"):
        path = os.environ.get(name)
        if not path or not os.path.exists(path):
            skip = pytest.mark.skip(reason=f"{name} does not name a file; `cargo xtask test` sets it")
            for item in items:
                item.add_marker(skip)
            return


def pytest_terminal_summary(terminalreporter):
    for line in FIGURES:
        terminalreporter.write_line(f"figure: {line}")


@pytest.fixture
def figure():
    """Call it with a line of measured values: it is printed at the end and never judged."""
    return FIGURES.append


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One server with defaults, shared by all tests that leave it as they found it."""
    server = Server(tmp_path_factory.mktemp("shared"), "--replicas", "1")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def etcd(tmp_path):
    if Etcd.program() is None:
        pytest.skip("there is no etcd; `cargo xtask etcd` fetches one on Debian, or set PENSTOCK_ETCD")
    etcd = Etcd(tmp_path / "etcd")
    yield etcd
    etcd.kill()
