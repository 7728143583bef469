"""What a comparison says of differences, and what it refuses to say."""

import io
import json
import re

import pytest
from runs import real_run

from kvsim.explain.certainty import Comparison, Pair, Verdict
from kvsim.report import make_console, render_comparison, value_words
from kvsim.report.compare import (
    certain_table,
    comparison_record,
    finding_words,
    interval_words,
    method_words,
    ranking_words,
)
from kvsim.report.files import Results
from kvsim.report.pages.compare import build_comparison
from kvsim.results.numerals import SPACE
from kvsim.results.summary import summarise

TTFT, USAGE = "p99_ttft_ms", "kv_cache_usage_mean"
VALUES = {
    TTFT: ((2000.0, 2200.0), (1000.0, 1100.0), (2050.0, 2160.0)),
    "num_preemptions": ((10, 12), (10, 12), (30, 36)),
    USAGE: ((0.5, 0.5), (0.6, 0.6), (0.5, 0.5)),
    "prefix_cache_hit_rate": ((None, None), (0.3, 0.4), (None, None)),
}


def verdict(finding, difference, low, high):
    return Verdict(finding, difference, low, high, 0.01, 0.02)


VERDICTS = {
    Pair(TTFT, 0, 1): verdict("significant", -1050.0, -1200.0, -900.0),
    Pair(TTFT, 0, 2): verdict("insignificant", 5.0, -90.0, 100.0),
    Pair(TTFT, 1, 2): verdict("significant", 1055.0, 900.0, 1200.0),
    Pair("num_preemptions", 0, 1): verdict("same", 0.0, 0.0, 0.0),
    Pair("num_preemptions", 0, 2): verdict("significant", 22.0, 20.0, 24.0),
    Pair("num_preemptions", 1, 2): verdict("significant", 22.0, 20.0, 24.0),
    Pair(USAGE, 0, 1): verdict("significant", 0.1, 0.09, 0.11),
    Pair(USAGE, 0, 2): verdict("equal", 0.0, -0.001, 0.001),
}
SEEDS = Comparison(
    *(("A", "B", "C"), "seeds", ("lengths", "arrivals"), (4, 5), 8, 0.05, 0.01, VALUES, VERDICTS)
)
REPLAY = SEEDS._replace(method="stretches", redrawn=(), seeds=(), planned=0)


def plain(text):
    return re.sub(r"<[^>]*>", " ", text).replace(SPACE, " ")


def words(key, first, other):
    pair = Pair(key, first, other)
    return finding_words(SEEDS, pair, VERDICTS[pair]).replace(SPACE, " ")


def test_every_finding_has_its_words():
    assert words(TTFT, 0, 1) == "B is better than A by 1.05 s (−1.20 s … −900 ms)"
    assert words("num_preemptions", 0, 2) == "C is worse than A by 22 (+20 … +24)"
    assert words(USAGE, 0, 1).startswith("B is higher than A by 10.0 points")
    assert words(TTFT, 0, 2) == "no significant difference (−90.0 ms … +100 ms)"
    assert words("num_preemptions", 0, 1) == "no difference"
    assert words(USAGE, 0, 2).startswith("no difference of more than 1.0 %")


def test_what_cannot_be_told_apart_is_not_ranked():
    assert ranking_words(SEEDS, TTFT) == "B, A ≈ C"
    assert ranking_words(SEEDS, "num_preemptions") == "A ≈ B, C"
    assert ranking_words(SEEDS, USAGE) == ""  # neither direction is better
    assert ranking_words(SEEDS, "prefix_cache_hit_rate") == ""  # undefined in A


def test_a_row_judges_by_the_verdict_not_by_the_values():
    rows = {row.metric.key: row for row in certain_table(SEEDS)}
    assert [rows[TTFT].judge(i) for i in (0, 1)] == ["better", "insignificant"]
    assert [rows["num_preemptions"].judge(i) for i in (0, 1)] == ["same", "worse"]
    assert rows[USAGE].judge(0) == "different"
    assert rows["prefix_cache_hit_rate"].judge(0) == "different"
    assert value_words(rows["num_preemptions"], 2) == "33 ± 4"
    assert interval_words(rows["num_preemptions"], 0) == ""
    assert interval_words(rows["num_preemptions"], 1) == "+20 … +24"


def test_the_method_is_said():
    said = " ".join(method_words(SEEDS)).replace(SPACE, " ")
    assert "2 seeds, the same for every run" in said
    assert "lengths and arrivals" in said
    assert "Stopped before the planned 8" in said
    assert "95.0 % confidence" in said
    failed = SEEDS._replace(unfinished=(("B", 5, "swap-space-exhausted"),))
    assert "B did not finish seed 5: swap space exhausted." in " ".join(method_words(failed))
    replayed = " ".join(method_words(REPLAY))
    assert "Nothing in these runs is random" in replayed
    drawn = SEEDS._replace(redrawn=("kernel times, within the errors of their profile",))
    assert "Fewer than 5 seeds" not in said
    assert "Fewer than 5 seeds" in " ".join(method_words(SEEDS._replace(planned=4)))
    assert "does not average out" in " ".join(method_words(drawn))


def test_the_record_is_json_with_everything_in_it():
    record = json.loads(json.dumps(comparison_record(SEEDS)))
    assert record["seeds"] == [4, 5] and record["confidence"] == 0.95
    figure = record["figures"][TTFT]
    assert figure["runs"]["B"] == {
        "mean": 1050.0,
        "std": pytest.approx(70.7, abs=0.1),
        "values": [1000.0, 1100.0],
    }
    [told] = [d for d in figure["differences"] if (d["first"], d["other"]) == ("A", "B")]
    assert (told["finding"], told["low"], told["high"]) == ("significant", -1200.0, -900.0)


@pytest.fixture(scope="module")
def runs():
    made = []
    for name, blocks in (("A", 480), ("B", 960), ("C", 480)):
        steps, requests, gaps, meta = real_run(rate=8, blocks=blocks)
        made.append((name, Results(summarise(steps, requests, gaps, meta), requests, steps)))
    return made


def test_the_terminal_breaks_no_figure_in_narrow_windows(runs):
    console = make_console(io.StringIO(), width=64)
    render_comparison([(name, run.summary) for name, run in runs], console, SEEDS)
    lines = console.file.getvalue().replace(SPACE, " ").splitlines()
    assert all(len(line) <= 64 and not re.search(r"\w…", line) for line in lines)
    table = [line for line in lines if "TTFT p99" in line and ":" not in line]
    shown = " ".join(table)
    rows = {row.metric.key: row for row in certain_table(SEEDS)}
    assert len(table) > 1
    for i in range(3):
        assert value_words(rows["p99_ttft_ms"], i).replace(SPACE, " ") in shown


@pytest.mark.parametrize("comparison", [SEEDS, REPLAY])
def test_terminal_and_page_say_it_all(runs, comparison):
    console = make_console(io.StringIO(), width=140)
    render_comparison([(name, run.summary) for name, run in runs], console, comparison)
    shown = " ".join(console.file.getvalue().replace(SPACE, " ").split())
    page = build_comparison(runs, comparison)
    assert page == build_comparison(runs, comparison)
    for text in (shown, " ".join(plain(page).split())):
        assert "B is better than A by 1.05 s (−1.20 s … −900 ms)" in text
        assert "no significant difference (−90.0 ms … +100 ms)" in text
        assert "B, A ≈ C" in text
    assert "another seed would give" not in page
    [figures] = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    [drawn] = [f for f in json.loads(figures) if f["id"] == "intervals"]
    assert [trace["name"] for trace in drawn["data"]] == ["B", "C"]
    assert drawn["data"][0]["marker"]["symbol"][0] == "circle"
    assert drawn["data"][1]["marker"]["symbol"][0] == "circle-open"
    assert drawn["data"][0]["x"][0] == pytest.approx(-50)
    assert drawn["data"][0]["error_x"]["array"][0] == pytest.approx(100 * 150 / 2100, rel=1e-3)
