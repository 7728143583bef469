"""What is said of the figures of a summary."""

from collections.abc import Mapping
from typing import Any

from worlds import config, trace

from kvsim.results.metrics import METRICS
from kvsim.run.simulation import simulate


def has(summary: Mapping[str, Any], key: str) -> bool:
    table, _, rest = key.partition(".")
    return table in summary and (not rest or rest in summary[table])


def test_figures_of_every_run_are_those_of_one_without_features() -> None:
    summary = simulate(trace((0, 9, 3)), config()).summary
    assert {each.key for each in METRICS if each.always} == {
        each.key for each in METRICS if has(summary, each.key)
    }


def test_percentiles_and_maxima_are_decided_by_few_values() -> None:
    extreme = {each.key for each in METRICS if each.extreme}
    assert {"p50_ttft_ms", "p99_e2el_ms", "kv_cache_usage_max"} <= extreme
    for key in extreme:
        assert any(digits in key for digits in ("p50", "p90", "p99", "max")), key
