"""What a sweep calls best, on figures made for the rule: limits, ranks, equals, trade-offs."""

import math

import pytest

from kvsim.search.sweep import TTFT, Plan, Planned, Traced, choose, pareto, sweep_table
from kvsim.search.sweep_page import heat_maps


def record(ttft, throughput, memory=100, kind="finished", reason=""):
    figures = {
        "completed": 9,
        "failed": 0,
        "p99_ttft_ms": ttft,
        "p99_tpot_ms": 10.0 + ttft / 1000,
        "output_throughput": throughput,
        "request_throughput": throughput,
        "num_preemptions": 3,
    }
    return {
        "key": "k",
        "kvsim_version": "0",
        "outcome": {"kind": kind, "explanation": reason},
        "engine": {"kv_cache_bytes": memory},
        "time_source": {"kind": "estimated", "source": "a guess"},
        "figures": {} if kind != "finished" else figures,
    }


def sweep(rows, slo=None):
    """A plan and its records, of (settings, seed, record)."""
    points = [Planned(settings, seed, str(i)) for i, (settings, seed, _) in enumerate(rows)]
    trace = Traced("load.jsonl", "native", "0", 9)
    base = {"engine": "e", "model": "m", "hardware": "h", "watermark": None}
    plan = Plan("0", trace=trace, base=base, points=points, slo=slo)
    return plan, [record for *_, record in rows]


def test_the_best_meet_all_on_every_seed_and_are_farthest_from_limits():
    rows = [
        ({"n": 1}, 0, record(500, 1)),
        ({"n": 1}, 1, record(2500, 1)),
        ({"n": 2}, 0, record(1000, 1)),
        ({"n": 2}, 1, record(1500, 1)),
        ({"n": 3}, 0, record(100, 1)),
        ({"n": 3}, 1, record(200, 1)),
        ({"n": 4}, 0, record(1, 1)),
        ({"n": 4}, 1, record(1, 1, kind="deadlock", reason="stuck")),
    ]
    chosen = choose(*sweep(rows, "p99_ttft<2s"))
    assert best(chosen) == [3, 2]
    assert [c.met for c in chosen.configurations] == [1, 2, 2, 1]
    assert chosen.configurations[1].figures["p99_ttft_ms"] == 1250
    assert chosen.configurations[1].load == 0.75
    assert chosen.configurations[3].outcome == "deadlock"
    assert chosen.configurations[3].figures == {}
    assert chosen.verdict[0].text.startswith("2 of 4")


def best(chosen):
    """The numbers of the ranked configurations, best first."""
    return [place.first.number for place in chosen.best]


def test_goodput_ranks_first_then_memory_then_distance_from_the_limits():
    by_rate = [({"request_rate": r}, 0, record(100 * r, 10 * r)) for r in (1, 5, 30)]
    assert best(choose(*sweep(by_rate, "p99_ttft<2s"))) == [2, 1]
    by_pool = [({"x": b}, 0, record(4000 / b, 1, memory=b)) for b in (9, 1, 3)]
    assert best(choose(*sweep(by_pool, "p99_ttft<2s"))) == [3, 1]
    # 1 % less goodput counts as equal, and so does 1 % more memory; 2 % does not.
    rows = [
        ({"x": 1}, 0, record(500, 100.0, memory=1000)),
        ({"x": 2}, 0, record(900, 99.5, memory=500)),
        ({"x": 3}, 0, record(100, 98.0, memory=100)),
        ({"x": 4}, 0, record(300, 99.2, memory=504)),
    ]
    assert best(choose(*sweep(rows, "p99_ttft<2s"))) == [4, 2, 1, 3]


def test_goodput_is_that_of_the_settings_where_they_have_one():
    rows = [({"x": x}, 0, record(100, 10.0)) for x in (1, 2)]
    for (_, _, each), good in zip(rows, (3.0, 9.0), strict=True):
        each["figures"]["request_goodput"] = good
    chosen = choose(*sweep(rows, "p99_ttft<2s"))
    assert best(chosen) == [2, 1]
    assert "request goodput" in chosen.rule


def test_configurations_with_equal_figures_share_a_place():
    rows = [
        ({"max_num_seqs": n, "victim": v}, 0, record(100 if n > 9 else 900, 5))
        for n in (9, 64, 128)
        for v in ("a", "b")
    ]
    chosen = choose(*sweep(rows, "p99_ttft<2s"))
    assert [place.settings for place in chosen.best] == [
        {"max_num_seqs": "64 or 128", "victim": "a or b"},
        {"max_num_seqs": "9", "victim": "a or b"},
    ]
    assert chosen.verdict[0].text.startswith("6 of 6")
    assert "max_num_seqs 64 or 128 · victim a or b" in chosen.verdict[1].text
    chosen = choose(*sweep(rows[:-1]))  # the last combination is not there
    assert [place.settings for place in chosen.best] == [
        {"max_num_seqs": "64 or others", "victim": "a or others"}
    ]


def test_nothing_that_meets_them_names_the_nearest():
    rows = [({"n": n}, 0, record(100 * n, 900)) for n in (1, 2, 3)]
    chosen = choose(*sweep(rows, "p99_ttft<50ms"))
    assert chosen.best == []
    assert "100\u00a0%" in chosen.verdict[1].text or "100 %" in chosen.verdict[1].text


def test_a_pareto_front_is_what_nothing_beats():
    rows = [({"i": i}, 0, record(ttft, rate)) for i, (ttft, rate) in enumerate(POINTS)]
    chosen = choose(*sweep(rows))
    front = pareto(chosen.configurations, TTFT, chosen.metrics[2])
    expected = [
        (a, b)
        for a, b in POINTS
        if not any((c < a and d >= b) or (c <= a and d > b) for c, d in POINTS)
    ]
    found = [(c.figures["p99_ttft_ms"], c.figures["output_throughput"]) for c in front]
    assert found == sorted(set(expected))
    assert [place.first for place in chosen.best] == front


def test_a_difference_too_small_to_matter_beats_nothing():
    figures = [(100, 50.0), (100.4, 50.4), (103, 50.45), (104, 60.0), (104.5, 70.0)]
    rows = [({"i": i}, 0, record(ttft, rate)) for i, (ttft, rate) in enumerate(figures)]
    chosen = choose(*sweep(rows))
    assert best(chosen) == [1, 2, 5]
    assert "differences below 1 % do not count" in chosen.rule


POINTS = [(100 + 3 * (37 * i % 61), round(50 * math.sin(i) + 60, 3)) for i in range(40)] + [
    (100, 80.0)
] * 2


def test_words_that_look_like_numbers_are_words_in_the_table():
    rows = [({"vllm_version": each}, 0, record(1, 1)) for each in ("0.1", "0.10")]
    table = sweep_table(*sweep(rows))
    assert table.column("vllm_version").to_pylist() == ["0.1", "0.10"]


@pytest.mark.parametrize(("slo", "colour"), [("preemptions<=3", "good"), ("preemptions<3", "bad")])
def test_a_map_has_the_colour_of_the_objective_at_its_limit(slo, colour):
    rows = [({"a": a, "b": b}, 0, record(1, 1)) for a in (1, 2) for b in (1, 2)]
    text = str(heat_maps(choose(*sweep(rows, slo)), ("a", "b")))
    assert text.count(f"--colour: var(--{colour})") == 4
