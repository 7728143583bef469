"""Policies that see the future say so, and nobody else does."""

from typing import Any

import oracles_outside
import pytest
from worlds import config, trace

import kvsim
from kvsim.report import verdict

LOAD = trace((0, 8, 3), (0, 8, 20), (0, 8, 4))
SMALL = {"num_gpu_blocks_override": 9, "max_model_len": 32}


def run(**settings: Any) -> kvsim.Result:
    table = config(**SMALL, **settings)
    if "engine" in settings:
        del table["disable_async_output_proc"]  # Who names a class has chosen.
    return kvsim.simulate(LOAD, table)


@pytest.mark.parametrize(
    ("settings", "who"),
    [
        ({"victim": "oracles_outside:LongestLeft"}, "victim: oracles_outside:LongestLeft"),
        (
            {
                "enable_prefix_caching": True,
                "block_manager_args": {"eviction": "oracles_outside:NeverAgain"},
            },
            "eviction: oracles_outside:NeverAgain",
        ),
        ({"engine": "oracles_outside:Prophet"}, "engine: oracles_outside:Prophet"),
    ],
)
def test_an_oracle_is_named_in_summary_and_report(settings: dict[str, Any], who: str) -> None:
    oracles_outside.seen.clear()
    result = run(**settings)
    assert result.summary["meta"]["oracles"] == [who]
    assert any(who in remark.text and "ORACLE" in remark.text for remark in verdict(result.summary))
    assert oracles_outside.seen
    assert result.requests["status"] == ["completed"] * 3


def test_without_one_nothing_is_said() -> None:
    result = run(victim="head")
    assert result.summary["meta"]["oracles"] == []
    assert not any("ORACLE" in remark.text for remark in verdict(result.summary))


def test_an_oracle_decides_by_what_is_to_come() -> None:
    """r1 has most to say, so it gives way, though it is not the tail."""
    assert list(run(victim="oracles_outside:LongestLeft").requests["num_preemptions"]) == [0, 1, 0]
    assert list(run().requests["num_preemptions"]) == [0, 0, 1]
