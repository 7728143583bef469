"""States the result of a validation, in words and in rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvsim.against.validate.compare import LATENCIES, SIDES, STATISTICS
from kvsim.results.numerals import MISSING, SPACE, count, seconds, show

Head = list[str]
Rows = list[list[str]]

COUNT_LABELS = {
    "preemptions": "Preemptions",
    "swapped_out_blocks": "Blocks swapped out",
    "swapped_in_blocks": "Blocks swapped in",
    "recomputed_tokens": "Tokens computed again",
    "hit_tokens": "Prompt tokens hit",
    "steps": "Steps",
    "duration_s": "Duration",
}


def share(value: float | None) -> str:
    """An unsigned error: `2.1 %`; small errors keep two figures."""
    if value is None:
        return MISSING
    digits = 2 if value < 0.00995 else 1 if value < 0.9995 else 0
    return f"{100 * value:.{digits}f}{SPACE}%"


def signed_share(value: float | None) -> str:
    """A signed error: `+2.1 %`."""
    if value is None:
        return MISSING
    return f"{'−' if value < 0 else '+'}{share(abs(value))}"


def sentence(policy: Mapping[str, Any]) -> str:
    """One sentence on one policy."""
    steps = policy["steps"]["all"]
    error, noise = steps["prediction"], steps["noise"]
    return (
        f"{policy['name']}: a step is priced within {share(error['median'])} in the median"
        f" (measuring it again: {share(noise['median'])}), {share(error['p95'])} at p95"
        f" ({share(noise['p95'])}); all steps together {signed_share(error['total'])}"
        f" ({signed_share(noise['total'])})"
    )


def error_rows(result: Mapping[str, Any]) -> tuple[Head, Rows]:
    """A row per figure, a column per policy: the error, in brackets the noise."""
    policies = result["policies"]
    every = [policy["steps"]["all"] for policy in policies]
    rows = [
        [label, *(_beside(say, each["prediction"][key], each["noise"][key]) for each in every)]
        for label, key, say in (
            ("Step, median", "median", share),
            ("Step, p95", "p95", share),
            ("All steps", "total", signed_share),
        )
    ]
    for kind in LATENCIES:
        for statistic in STATISTICS:
            figures = [policy["requests"][kind][statistic] for policy in policies]
            cells = (_beside(signed_share, each["error"], each["noise"]) for each in figures)
            rows.append([f"{kind.upper()} {statistic}", *cells])
    return ["", *(policy["name"] for policy in policies)], rows


def count_rows(result: Mapping[str, Any]) -> tuple[Head, Rows]:
    """A row per figure, a column per policy."""
    policies = result["policies"]
    rows = [
        [label, *(_trio(name, policy["counts"][name]) for policy in policies)]
        for name, label in COUNT_LABELS.items()
    ]
    return ["", *(policy["name"] for policy in policies)], rows


def latency_rows(policy: Mapping[str, Any]) -> tuple[Head, Rows]:
    """Every statistic of every latency: three sides, the error and the noise."""
    head = ["", "real", "real again", "simulated", "error", "noise"]
    rows = []
    for kind in LATENCIES:
        for statistic in STATISTICS:
            figures = policy["requests"][kind][statistic]
            times = [show(figures[side], "ms") for side in SIDES]
            errors = [signed_share(figures[key]) for key in ("error", "noise")]
            rows.append([f"{kind.upper()} {statistic}", *times, *errors])
    return head, rows


def _beside(say: Callable[[float | None], str], error: float | None, noise: float | None) -> str:
    return f"{say(error)} ({say(noise)})"


def _trio(name: str, sides: Mapping[str, float]) -> str:
    say = seconds if name == "duration_s" else count
    return " / ".join(say(sides[side]) for side in SIDES)
