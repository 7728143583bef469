"""Three real runs, priced by the kernel times of their GPUs: the page's figures, with bounds.

Bounds of replays are what they reach, rounded up. Nothing is fitted except where a test says so.
"""

import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest
from marks import long, whole
from places import ROOT
from shared import SHARED, needs_shared

from kvsim.cost.profile import Tail

FOLDER = SHARED / "groundtruth"
SCRIPT = ROOT / "docs" / "site" / "real_runs.py"

pytestmark = needs_shared("groundtruth/rtxpro6000-qwen3-32b")


@cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_runs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["real_runs"] = module
    sys.path.insert(0, str(SCRIPT.parent))  # It imports its neighbour.
    spec.loader.exec_module(module)
    return module


@cache
def bench(place: int) -> Any:
    return script().Bench(script().RUNS[place], FOLDER)


@pytest.mark.parametrize(("place", "bound"), [(0, 0.8), (1, 10), (2, 1.4)])
def test_with_nothing_fitted(place: int, bound: float) -> None:
    """The two GPUs are connected by the link that the publisher states."""
    run = bench(place)
    errors = run.errors(run.profile)
    assert len(errors) == 12
    assert max(map(abs, errors.values())) < bound, errors


def test_uneven_batches_are_priced_where_measured_ones_say_so() -> None:
    tails = [bench(place).profile.fit.tail for place in range(3)]
    assert [isinstance(tail, Tail) and tail.used for tail in tails] == [False, True, True]
    assert bench(1).worst(script().with_tail(bench(1).profile, False)) > 15


@pytest.mark.parametrize(
    ("place", "alone_ns", "share_ns", "seqs"),
    [(0, 31.3, 4.3, 26), (1, 21.8, 2.7, 38), (2, 20.1, 1.3, 76)],
)
def test_the_rates_are_those_of_the_gpu(
    place: int, alone_ns: float, share_ns: float, seqs: int
) -> None:
    tail = bench(place).profile.fit.tail
    assert tail.alone_ns == pytest.approx(alone_ns, abs=0.1)
    assert tail.share_ns == pytest.approx(share_ns, abs=0.05)
    assert tail.unsplit_seqs == seqs


@pytest.mark.parametrize("place", [1, 2])
def test_uneven_decode_launches_that_do_not_split(place: int) -> None:
    """Rows that no table was made from."""
    errors = bench(place).profile.error["uneven"]
    assert errors["decodes"]["median_percent"] < 3
    assert errors["decodes"]["p95_percent"] < 7
    assert errors["decodes, even"]["p95_percent"] > 15
    assert errors["with prompts"]["median_percent"] < 3
    assert errors["with prompts"]["p95_percent"] < 20 < errors["with prompts, even"]["p95_percent"]


def test_two_gpus_without_all_reduces_are_far_off() -> None:
    run = bench(2)
    assert run.profile.source == "estimated"
    assert run.worst(script().with_link(run.profile, None)) > 40
    assert run.worst(run.regressed) < 0.8


CONSTANTS = (
    ({"linear_factor"}, 0.468, 0.4),
    ({"linear_factor", "prompt_step_us"}, 0.0, 2),
    ({"linear_factor", "prompt_step_us"}, 0.077, 0.9),
)
"""Which are taken, how many seconds late the first step is, and the greatest error."""


@long
@whole
def test_constants_of_the_first_requests_hold_for_the_others_and_the_page_is_fresh() -> None:
    benches = [bench(place) for place in range(3)]
    for run, (constants, late_s, bound) in zip(benches, CONSTANTS, strict=True):
        found = run.fitted
        assert set(found["constants"]) == constants
        assert found["start_s"] == pytest.approx(late_s, abs=1e-3)
        assert (found["fitted_requests"], found["judged_requests"]) == (90, 200)
        assert max(map(abs, found["error_percent"].values())) < bound
    assert script().written(benches) in script().PAGE.read_text(encoding="utf-8")


@long
@needs_shared("groundtruth/public")
def test_public_runs_and_their_page() -> None:
    """Saturated runs on A100 and H200, and steady ones on H100, are met."""
    public = script().public_runs
    table = public.written(FOLDER / "public")
    assert table in script().PAGE.read_text(encoding="utf-8")
    head, _, *lines = table.splitlines()
    names = [name.strip() for name in head.split("|")]
    rows = [dict(zip(names, map(str.strip, line.split("|")), strict=True)) for line in lines]
    saturated = [
        abs(int(row["duration"]))
        for row in rows
        if row["load"].startswith("saturated") and row["duration"] and "h100" not in row["run"]
    ]
    assert sorted(saturated) == [5, 8, 8, 10, 15]
    chats = [row for row in rows if row["front end"]]
    found = [abs(int(row["TTFT"])) for row in chats if "Qwen3-14B, h100" not in row["run"]]
    assert sorted(found) == [3, 5, 5, 11, 20]
    steady = [row for row in rows if "x H100" in row["run"] and row["load"] == "steady"]
    assert len(steady) == 9
    assert all(abs(int(row["TPOT"])) <= 10 for row in steady)
    assert len(rows) == 23
