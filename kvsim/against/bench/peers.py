"""Measures another simulator on the same requests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from kvsim.against.bench.processes import Whole, spent
from kvsim.against.bench.settings import Case
from kvsim.errors import ConfigError, check_choice
from kvsim.workload.formats.mooncake import DEFAULT_BLOCK_SIZE

PEERS = {"aisimulate": ("dynamo._core", "ai-dynamo-runtime==1.6.1")}
"""Name → what has to be importable, and the package that brings it."""

_BACKENDS = {"sglang": "sglang"}
"""An engine of kvsim's → the peer's nearest; `vllm` for all others."""
_LIMITS = ("block_size", "max_num_seqs", "max_num_batched_tokens")


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One run of another simulator."""

    core_s: float
    """CPU time of its replay, reading the trace included."""
    whole: Whole


def check_peer(name: str, python: str) -> None:
    """Raise `ConfigError` unless a Python can run this peer."""
    check_choice("--peer", name, PEERS)
    module, package = PEERS[name]
    try:
        subprocess.run([python, "-c", f"import {module}"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(
            f"--peer {name}: {python} cannot import {module}; give --peer-python PATH, a Python"
            f" after `pip install {package}`"
        ) from None


def measure_peer(name: str, python: str, case: Case, path: str) -> Peer:
    """One run of a peer with the limits of a case and its prefix cache on.

    `path`: the requests, as `write_requests` writes them. Call it in a fresh process.
    """
    script = Path(__file__).with_name(f"{name}.py")
    args = json.dumps(_engine_args(case.table))
    whole, out = spent(python, str(script), path, args, str(DEFAULT_BLOCK_SIZE))
    return Peer(core_s=float(out.splitlines()[-1]), whole=whole)


def _engine_args(settings: dict[str, Any]) -> dict[str, Any]:
    limits = {key: settings[key] for key in _LIMITS}
    return {
        **limits,
        "backend": _BACKENDS.get(settings["engine"], "vllm"),
        "num_gpu_blocks": settings["num_gpu_blocks_override"],
        "enable_prefix_caching": True,
    }
