"""Planted faults are named: the table of the documentation, with its bounds."""

import importlib.util
import sys
from functools import cache
from types import ModuleType

import pytest
from marks import long, whole
from places import ROOT

from kvsim.against.matched import matched
from kvsim.against.suspects import signs
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload import open_trace

SCRIPT = ROOT / "docs" / "site" / "planted_faults.py"


@cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted_faults", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted_faults"] = module
    spec.loader.exec_module(module)
    return module


def test_a_limit_of_the_batch_is_seen_from_outside() -> None:
    """In spite of noise; the replay has no such limit."""
    planted = script()
    trace = planted.measured(open_trace("chat"), planted.ALONE[0], 0)
    pairs = matched(trace, simulate(trace, make_config(planted.BASE)))
    found = signs(pairs, trace.rows)
    assert found is not None
    real, ours = found
    assert real.requests == 64
    assert real.share > 0.25
    assert ours.requests > 90
    assert real.tokens < ours.tokens


def test_nothing_is_seen_without_arrivals_or_times() -> None:
    planted = script()
    trace = planted.measured(open_trace("chat"), planted.ALONE[0], 0)
    pairs = matched(trace, simulate(trace, make_config(planted.BASE)))
    trace.rows[7].arrival_ns = None
    assert signs(pairs, trace.rows) is None


@long
@pytest.mark.parametrize("place", [0, 11])
def test_a_planted_fault_is_named(place: int) -> None:
    faults = script().ALONE[place]
    assert script().right(faults, script().checked(faults, place))


@long
@whole
def test_at_least_ten_of_twelve_are_named_alone() -> None:
    planted = script()
    alone = planted.written(planted.ALONE)
    assert alone in planted.PAGE.read_text(encoding="utf-8")
    assert alone.count("| yes |") >= 10


@long
@whole
def test_pairs_are_named_as_the_page_says() -> None:
    planted = script()
    assert planted.written(planted.PAIRS) in planted.PAGE.read_text(encoding="utf-8")
