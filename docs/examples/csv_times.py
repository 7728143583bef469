r"""A cost model of one's own: measured step times from a CSV.

    PYTHONPATH=docs/examples kvsim run --trace traces/chat.jsonl --num-prompts 20 --model small \
        --hardware cpu --set cost.model=csv_times:CsvTimes --set cost.path=docs/examples/steps.csv

Each line of the file is a measured step: those of the shipped profile `cpu-small`, of a small model
on one CPU core. A step costs what the nearest line says, by the logarithms of its three counts.
Here the mean TPOT is 32.0 ms.
"""

import csv
import math
from pathlib import Path
from typing import Any

from kvsim.core.plan import Plan

COUNTS = ("prompt_tokens", "sequences", "context_tokens")


class CsvTimes:
    """The time of the nearest measured step."""

    kind = "measured"

    def __init__(self, path: str) -> None:
        with Path(path).open(newline="") as file:
            lines = list(csv.DictReader(file))
        if not lines:
            raise ValueError(f"path: {path} has no measured step; give one in each line")
        self._steps = [
            (_place(*(float(line[count]) for count in COUNTS)), float(line["us"])) for line in lines
        ]
        self.source = f"measured: {len(lines)} steps of {Path(path).name}"

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        prompt_tokens = sum(new for new, _ in plan.chunks)
        here = _place(prompt_tokens, plan.decode_seqs, plan.context_tokens)
        return round(1000 * min(self._steps, key=lambda step: math.dist(step[0], here))[1])

    def describe(self) -> dict[str, Any]:
        """For the provenance of a result."""
        return {"kind": self.kind, "source": self.source}


def _place(*counts: float) -> tuple[float, ...]:
    return tuple(math.log2(1 + count) for count in counts)
