"""A small world to validate in: a trace under pressure, a profile, a recording of known times."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from kvsim.against.validate.errors import with_profile
from kvsim.against.validate.measure import Pairs, Times, record
from kvsim.against.validate.setup import RECORDED, THREE, prepare
from kvsim.core.plan import Plan
from kvsim.cost import Cost
from kvsim.machine import LinkTimes
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config
from kvsim.workload import open_trace

SWAP = {"cross": {"d2h": [10.0, 5.0], "h2d": [20.0, 7.0]}}

PROFILE: dict[str, Any] = {
    "schema": "kvsim.profile/1",
    "source": "measured",
    "created": "2026-01-01",
    "device": {"name": "made up"},
    "model": {
        "name": "tiny",
        "layers": 2,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 128,
        "vocab": 512,
        "dtype": "float32",
        "kv_dtype": "float32",
        "tp": 1,
    },
    "engine": {
        "block_size": 16,
        "graph": False,
        "kv_layout": "cross",
        "capture_sizes": [],
        "decode_kernel": "decode_v2",
    },
    "error": {"trusted": True, "why": []},
    "fit": {
        "dense": {"tokens": [1, 256], "us": [300.0, 900.0]},
        "head": {"samples": [1, 32], "us": [50.0, 100.0]},
        "prefill": {"q": [1, 256], "ctx": [0, 256], "us": [[20, 40], [200, 400]]},
        "decode_v2": {"n": [1, 32], "ctx": [1, 256], "us": [[20, 30], [300, 500]]},
        "step": [100.0, 1.0, 5.0],
        "swap": SWAP,
    },
}

SETTINGS: dict[str, Any] = {
    "engine": "vllm-0.6.3",
    "model": "tiny",
    "dtype": "float32",
    "block_size": 16,
    "num_gpu_blocks_override": 24,
    "num_cpu_blocks_override": 24,
    "max_model_len": 208,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 256,
}


def write_trace(folder: Path, requests: int = 40) -> Path:
    """Prompts over three shared beginnings, faster than the pool can take them."""
    random, now_s = Random(3), 0.0
    lines = [json.dumps({"kvsim_trace": 1})]
    for _ in range(requests):
        now_s += random.expovariate(1 / 0.004)
        row = {
            "arrival_s": round(now_s, 4),
            "input_length": random.randint(40, 140),
            "output_length": random.randint(8, 40),
            "prefix": [[f"system {random.randrange(3)}", 32]],
        }
        lines.append(json.dumps(row))
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_profile(folder: Path, **changes: Any) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps({**PROFILE, **changes}))
    return path


class Priced:
    """Times of a cost model and a link, each multiplied by what `factor` returns."""

    def __init__(
        self, cost: Cost, link: LinkTimes, factor: Callable[[], float] = lambda: 1.0
    ) -> None:
        self._cost, self._link, self._factor = cost, link, factor

    def step_ns(self, plan: Plan) -> int:
        return round(self._cost.step_ns(plan) * self._factor())

    def swap_out_ns(self, pairs: Pairs) -> int:
        return round(self._link.transfer_ns(len(pairs)) * self._factor())

    swap_in_ns = swap_out_ns


def recording(
    trace: Path,
    profile: Path,
    *factors: Callable[[], float],
    policies: tuple[str, ...] = THREE,
    **settings: Any,
) -> dict[str, Any]:
    """What an engine would be recorded as whose times are those of the profile, times a factor.

    A factor for each of the runs `real`, `repeat` and `replay`.
    """
    opened = open_trace(str(trace))
    setup = prepare(opened, make_config({**SETTINGS, **settings}), policies)
    run = -1

    def executor(policy: dict[str, Any]) -> Times:
        nonlocal run
        run += 1
        parts = assemble(with_profile(policy["config"], str(profile), PROFILE["engine"], SWAP))
        return Priced(parts.cost, parts.link, factors[run % len(factors)])

    return {
        "schema": RECORDED,
        "kvsim_version": "test",
        "device": PROFILE["device"],
        "software": {"torch": "none"},
        "model": PROFILE["model"],
        "engine": PROFILE["engine"],
        "setup": setup,
        "policies": list(record(setup, opened, executor)),
    }
