"""Results of `vllm bench serve --save-detailed`, as its client would write them of a simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvsim.against.matched import Change, with_change
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload.spec import Workload, make_trace

SETTINGS: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100",
    "engine": "vllm-v1",
    "async_scheduling": False,
    "max_model_len": 4096,
}
LOAD = {"request_rate": 20.0, "seed": 3}


def serve(change: Change, requests: int = 120, **settings: Any) -> Result:
    """A run on a machine whose steps take a changed time."""
    trace = make_trace(
        Workload("random", requests=requests, input_len=800, output_len=120, range_ratio=0.7), 1
    )
    config = make_config({**SETTINGS, **LOAD, **settings})
    return simulate(trace, config, parts_of=with_change(change))


def bench_result(result: Result, later_s: float = 0.0) -> dict[str, Any]:
    """What the client saw. Every token comes at the end of a step; `later_s` is its network.

    Only for runs without preemption and without asynchronous scheduling.
    """
    requests, ends = result.requests, result.steps["end_ns"]
    lists: dict[str, list[Any]] = {
        key: [] for key in ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors")
    }
    for place in range(len(requests["id"])):
        arrival, first, last = (
            int(requests[name][place]) for name in ("arrival_ns", "first_token_ns", "finish_ns")
        )
        tokens = ends[(ends >= first) & (ends <= last)]
        assert len(tokens) == requests["output_tokens"][place]
        lists["input_lens"].append(int(requests["input_length"][place]))
        lists["output_lens"].append(len(tokens))
        lists["start_times"].append(1000 + arrival / 1e9)
        lists["ttfts"].append((first - arrival) / 1e9 + later_s)
        lists["itls"].append((np.diff(tokens) / 1e9).tolist())
        lists["errors"].append("")
    return {
        "tokenizer_id": "m",
        "model_id": "meta-llama/Llama-3.1-8B-Instruct",
        "request_rate": LOAD["request_rate"],
        "max_concurrency": None,
        "request_throughput": 1.0,
        **lists,
    }


def write(folder: Path, result: dict[str, Any]) -> str:
    """The path of the file."""
    path = folder / "result.json"
    path.write_text(json.dumps(result))
    return str(path)
