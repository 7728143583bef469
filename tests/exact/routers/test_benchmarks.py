"""The script that repeats published comparisons of routers."""

import runpy
from collections import Counter
from typing import Any

import pytest
from marks import long
from places import ROOT

MADE: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "site" / "router_benchmarks.py"))
BOTH = [MADE["SEVENTY_THREE"], MADE["THIRTY_SEVEN"]]


@pytest.mark.parametrize("benchmark", BOTH, ids=["73", "37"])
def test_each_stage_sends_what_was_published(benchmark: Any) -> None:
    trace, stages = MADE["requests"](benchmark)
    warm_up = trace.rows[: stages[0].start]
    assert len(warm_up) == pytest.approx(benchmark.groups * benchmark.prompts, abs=1)
    assert max(Counter(row.content.segments for row in warm_up).values()) <= 2
    for (rate, duration_s), places in zip(benchmark.stages, stages, strict=True):
        rows = trace.rows[places.start : places.stop]
        assert len(rows) == rate * duration_s
        last_s = (rows[-1].arrival_ns - rows[0].arrival_ns) / 1e9
        assert last_s == pytest.approx(duration_s, rel=0.5 if benchmark.poisson else 0.2)


def test_what_was_published_breaks_down_where_it_says() -> None:
    knees = [
        [each.published.knee(benchmark.stages) for each in benchmark.contestants]
        for benchmark in BOTH
    ]
    assert knees == [[None, 40, 20, 20], [None, 6, 4, 4]]


@long
def test_routers_differ_as_published() -> None:
    precise, _, random, _ = BOTH[1].contestants
    benchmark = BOTH[1]._replace(stages=((8, 60),), contestants=(precise, random))
    knees = [each.knee(benchmark.stages) for each in MADE["measured"](benchmark)]
    assert knees == [None, 8]
