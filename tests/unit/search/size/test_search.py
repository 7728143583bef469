"""Searches on made-up figures, where the truth is known, and against a whole grid of runs."""

import math
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import long

from kvsim.errors import ConfigError
from kvsim.run.simulation import simulate
from kvsim.search import runner
from kvsim.search.size import (
    CLOSE,
    Bounds,
    Knob,
    Laboratory,
    answer,
    boundary,
    find_beside,
    find_best,
    find_boundary,
    find_cliff,
    lasting_answer,
    make_knob,
    sharpen,
    slope,
)
from kvsim.search.size_verdict import verdict
from kvsim.search.slo import parse_slo
from kvsim.search.store import Store
from kvsim.search.sweep import TTFT, joined
from kvsim.settings.config import make_config, to_table
from kvsim.workload.spec import Workload, make_trace

SLO = parse_slo("p99_ttft<100ms")
LADDER = (10, 15, 22, 33, 50, 75, 110, 160, 240, 360, 540, 800)


def record(ttft_ms):
    kind = "finished" if ttft_ms < math.inf else "deadlock"
    figures = {"completed": 1, "failed": 0, "p99_ttft_ms": ttft_ms} if ttft_ms < math.inf else {}
    return {
        "outcome": {"kind": kind, "explanation": "stuck"},
        "engine": {"kv_cache_bytes": 1},
        "figures": figures,
    }


class MadeUp(Laboratory):
    """A laboratory whose p99 TTFT is a function of (value, seed); counts what it is asked."""

    def look(self, values):
        fresh = [value for value in dict.fromkeys(values) if value not in self.tried]
        self.asked = [*getattr(self, "asked", ()), *fresh]
        runs = [
            ({"n": value}, record(self.ttft(value, seed))) for value in fresh for seed in self.seeds
        ]
        self.tried |= {c.settings["n"]: c for c in joined(runs, self.objectives)}

    def ttft(self, value, seed):
        return self.base(value, seed)


class MadeUpByLength(MadeUp):
    """One whose load matters: its p99 TTFT is a function of (value, number of requests)."""

    def ttft(self, value, seed):
        return self.base.ttft_ms(value, len(self.trace.rows))


def made_up(ttft_ms, goal="least", seeds=1):
    knob = Knob("n", goal, LADDER, round, "blocks", LADDER[0], LADDER[-1])
    return MadeUp(None, ttft_ms, knob, SLO, range(seeds), None)


@given(st.integers(11, 800), st.sampled_from(["least", "most"]))
def test_a_threshold_is_found_to_the_last_block(threshold, goal):
    def ttft(value, seed):
        inside = value >= threshold if goal == "least" else value <= threshold
        return 50.0 if inside else 500.0

    lab = made_up(ttft, goal)
    assert find_boundary(lab) == threshold
    assert len(lab.asked) == len(set(lab.asked)) <= 45


@given(st.integers(20, 400), st.floats(0.5, 2), st.sampled_from(["least", "most"]))
def test_an_answer_that_does_not_last_is_moved_in_few_runs(start, moved, goal):
    """To the next one that does, up to 1 % or one unit."""
    threshold = start * (moved if goal == "least" else 1 / moved)

    def ttft(value, seed):
        inside = value >= threshold if goal == "least" else value <= threshold
        return 50.0 if inside else 500.0

    lab = made_up(ttft, goal)
    lab.knob = lab.knob._replace(grain=1.0)
    found = find_beside(lab, start)
    assert lab.tried[found].meets
    assert len(lab.asked) <= 14
    if (start >= threshold) == (goal == "least"):
        assert lab.asked == [start]
    else:
        assert abs(found - threshold) <= max(0.01 * start, 1.0)


@given(st.sets(st.integers(10, 800), max_size=300), st.sampled_from(["least", "most"]))
def test_whatever_holds_where_the_answer_is_safe_on_all_that_was_tried(bad, goal):
    lab = made_up(lambda value, seed: 500.0 if value in bad else 50.0, goal)
    found = find_boundary(lab)
    if found is None:
        assert not lab.tried[LADDER[-1 if goal == "least" else 0]].meets
        return
    safe = [v for v in lab.tried if (v >= found if goal == "least" else v <= found)]
    assert not bad & set(safe)
    beyond = found - 1 if goal == "least" else found + 1
    assert beyond in bad or not LADDER[0] <= beyond <= LADDER[-1]


def test_every_seed_must_hold():
    lab = made_up(lambda value, seed: 50.0 if value >= 100 + 20 * seed else 500.0, seeds=3)
    assert find_boundary(lab) == 140
    assert lab.tried[139].met == 2


def test_nothing_that_holds_is_no_answer():
    lab = made_up(lambda value, seed: 500.0)
    assert find_boundary(lab) is None
    found = answer(lab, ())
    assert not found.meets
    first = verdict(lab, found)[0].text
    assert "No n from 10 to 800" in first
    assert "5 times a limit" in first


@given(st.integers(12, 700))
def test_the_best_of_a_valley_is_found_closely(best):
    lab = made_up(lambda value, seed: 20 + 60 * abs(math.log(value / best)), "best")
    assert find_best(lab) == pytest.approx(best, rel=0.07, abs=1)


def test_what_cannot_be_told_from_the_best_is_said():
    lab = made_up(lambda value, seed: 50.0 if value < 300 else 90.0, "best", seeds=5)
    found = answer(lab, ("arrivals",))
    assert found.as_good
    assert max(found.as_good) < 300
    assert "No significant difference" in verdict(lab, found)[1].text


@given(st.integers(30, 600), st.floats(2.5, 50))
def test_a_cliff_is_found_with_its_edges_and_height(edge, times):
    lab = made_up(lambda value, seed: (40.0 if value >= edge else 40.0 * times) / value**0.1)
    lab.look(LADDER)
    sharpen(lab, TTFT)
    cliff = find_cliff(lab.ascending, TTFT)
    assert cliff.beyond < edge <= cliff.safe
    assert cliff.safe - cliff.beyond <= max(CLOSE * cliff.safe, 1)
    assert cliff.times == pytest.approx(times, rel=0.02)


def test_a_gentle_slope_is_no_cliff():
    lab = made_up(lambda value, seed: 1e5 / value**1.5)
    lab.look(LADDER)
    sharpen(lab, TTFT)
    assert find_cliff(lab.ascending, TTFT) is None
    lab.look([95, 100, 105])
    assert slope(lab.ascending, 100, TTFT) == pytest.approx(-1.5, rel=1e-6)


def test_a_cliff_is_said_with_its_distance():
    lab = made_up(lambda value, seed: 60.0 if value >= 300 else 240.0 if value >= 200 else 960.0)
    found = answer(lab, ())
    assert found.value == 300
    (cliff,) = found.cliffs
    assert cliff.times == pytest.approx(4)
    said = " ".join(remark.text for remark in verdict(lab, found)).replace("\u00a0", " ")
    assert "TTFT p99 is 4.0 times as high: 240 ms instead of 60.0 ms." in said


# -- real runs ----------------------------------------------------------------------------------

LOAD = make_trace(Workload("random", requests=16, input_len=100, output_len=60, range_ratio=0.5), 5)
BASE = make_config({"max_model_len": 256, "num_gpu_blocks_override": 160, "request_rate": 400.0})


def laboratory(folder, name, slo, base=BASE):
    knob = make_knob(name, LOAD, to_table(base), Bounds())
    return Laboratory(LOAD, base, knob, parse_slo(slo), range(2), Store(folder), jobs=1)


@long
@pytest.mark.parametrize("slo", ["p99_ttft<150ms", "p99_ttft<300ms,preemptions<1"])
def test_the_least_pool_is_that_of_a_whole_grid(tmp_path, slo):
    """The reference is dull: every pool from the fewest blocks to the most, run one by one."""
    objectives = parse_slo(slo)
    holds = {}
    for blocks in range(16, 161):
        summaries = (
            simulate(
                LOAD, msgspec.structs.replace(BASE, num_gpu_blocks_override=blocks, seed=seed)
            ).summary
            for seed in (0, 1)
        )
        holds[blocks] = all(
            s["failed"] == 0 and all(o.met(s) for o in objectives.each) for s in summaries
        )
    expected = 1 + max(blocks for blocks, good in holds.items() if not good)
    lab = laboratory(tmp_path, "num_gpu_blocks", slo)
    assert find_boundary(lab) == expected
    for blocks, configuration in lab.tried.items():
        assert configuration.meets == holds[blocks]


def test_no_run_is_repeated(tmp_path, monkeypatch):
    runs = []
    real = runner.run_point
    monkeypatch.setattr(
        runner, "run_point", lambda task, *rest: runs.append(task.key) or real(task, *rest)
    )
    first = answer(laboratory(tmp_path, "num_gpu_blocks", "p99_ttft<150ms"), ("arrivals",))
    made = len(runs)
    assert made == len(set(runs)) > 20
    again = answer(laboratory(tmp_path, "num_gpu_blocks", "p99_ttft<150ms"), ("arrivals",))
    assert len(runs) == made
    assert again == first


def test_the_highest_rate_holds_and_the_next_one_does_not(tmp_path):
    small = msgspec.structs.replace(BASE, num_gpu_blocks_override=60)
    lab = laboratory(tmp_path, "request_rate", "p99_ttft<150ms", small)
    found = find_boundary(lab)
    good, bad = boundary(lab)
    assert found == good
    assert good < bad
    assert lab.knob.between(good, bad) is None
    assert lab.tried[good].met == 2
    assert lab.tried[bad].met < 2


def test_a_base_that_is_refused_is_an_error_not_an_answer(tmp_path):
    base = msgspec.structs.replace(BASE, num_gpu_blocks_override=8)
    lab = laboratory(tmp_path, "watermark", "p99_ttft<150ms", base)
    with pytest.raises(ConfigError, match="max_model_len"):
        find_best(lab)


@pytest.mark.parametrize(
    ("seeds", "varies", "words"),
    [
        (1, (), "nothing is drawn at random"),
        (1, ("arrivals",), "chance is unknown"),
        (14, ("arrivals",), "at least 80.7\u00a0% of all seeds, with 95.0\u00a0% confidence"),
    ],
)
def test_what_is_said_of_chance(seeds, varies, words):
    lab = made_up(lambda value, seed: 50.0 if value > 99 else 500.0, seeds=seeds)
    assert words in verdict(lab, answer(lab, varies))[-1].text


@pytest.mark.parametrize(
    ("goal", "start", "lasts", "broken", "value"),
    [
        ("least", 100, 150, range(140, 160), 160),
        ("most", 400, 300, range(290, 310), 289),
        ("least", 100, 150, range(140, 801), None),
        ("most", 400, 300, range(10, 310), None),
    ],
)
def test_an_answer_that_a_longer_load_moves_holds_on_both(goal, start, lasts, broken, value):
    """The first that lasts breaks the objectives on the shorter load: the answer is beyond it."""

    def ttft(n, requests):
        limit = lasts if requests == 16 else start
        bad = n < limit if goal == "least" else n > limit
        return 500.0 if bad or (requests == 4 and n in broken) else 50.0

    trace = make_trace(Workload("random", requests=1, input_len=4, output_len=4), 1)
    base = SimpleNamespace(ttft_ms=ttft, num_prompts=None)
    knob = Knob("n", goal, LADDER, round, "blocks", LADDER[0], LADDER[-1], grows=True, grain=1)
    lab, found = lasting_answer(MadeUpByLength(trace, base, knob, SLO, range(2), None), ())
    text = "\n".join(remark.text for remark in verdict(lab, found)).replace("\u00a0", " ")
    assert found.kept == value
    if value is not None:
        assert found.held == 16
        assert f"{value} blocks" in text
        return
    bad = max(lab.tried) if goal == "least" else min(lab.tried)
    further = "--to above 800" if goal == "least" else "--from below 10"
    assert f"is sure to keep TTFT p99 < 100 ms with 4 requests. Set {further} to look" in text
    assert f"With {bad} blocks, the objectives hold on 0 of 2 seeds." in text
    assert f"By chance they hold at {next(v for v, c in lab.ascending if c.meets)}" in text


def test_without_an_answer_lucky_values_are_named():
    lab = made_up(lambda value, seed: 500.0 if value < 300 or value == 800 else 50.0)
    lab.base.num_prompts, lab.trace = None, SimpleNamespace(rows=[None])
    found = answer(lab, ())
    assert found.kept is None
    first, second, lucky, *_ = (text.replace("\u00a0", " ") for text, _ in verdict(lab, found))
    assert first == "No n from 10 to 800 is sure to keep TTFT p99 < 100 ms with 1 request."
    assert second == "With 800 blocks, the objectives do not hold."
    assert lucky == "By chance they hold at 301, 309, 325, 360, 540, 657."


def test_a_lucky_value_is_named():
    lab = made_up(lambda value, seed: 50.0 if value >= 300 or value == 33 else 500.0)
    found = answer(lab, ())
    assert found.value == 300
    assert any("By chance they hold at 33" in text for text, _ in verdict(lab, found))
