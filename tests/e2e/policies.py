"""What tests of policies share: where components are, and how sets of them are written."""

import os
from pathlib import Path

import pytest

from server import run_to_end

COMPONENTS = Path(os.environ.get("PENSTOCK_POLICIES") or Path(__file__).parents[2] / "target" / "policies")
HOSTILE = Path(os.environ.get("PENSTOCK_HOSTILE") or "nowhere")
SEATS = {
    "admission": "admission-queue-quota",
    "routing": "routing-load-overlap",
    "fairness": "fairness-vtc",
    "eviction": "eviction-gdsf",
    "overload": "overload-degrade-ladder",
}
needs_components = pytest.mark.skipif(
    not all((COMPONENTS / f"{name}.wasm").exists() for name in SEATS.values()),
    reason="no policy components are built; `cargo xtask policies` builds them",
)
needs_hostile = pytest.mark.skipif(
    not (HOSTILE / "routing-traps.wasm").is_file(),
    reason="PENSTOCK_HOSTILE names no folder of hostile components; `cargo xtask test` sets it",
)


def policy(server, *args):
    """`penstock policy` against that server: exit code, output, errors."""
    return run_to_end("policy", "--admin", server.admin_url(), *args)


def write_set(folder, **seats):
    """A set of the shipped components, beside its components; `seats` has more lines of a seat."""
    for name in SEATS.values():
        (folder / f"{name}.wasm").write_bytes((COMPONENTS / f"{name}.wasm").read_bytes())
    lines = [f'[{seat}]\npolicy = "file:{name}.wasm"\n{seats.get(seat, "")}\n' for seat, name in SEATS.items()]
    path = folder / "policies.toml"
    path.write_text("\n".join(lines))
    return path
