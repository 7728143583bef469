import copy
import io
import re

import numpy as np
import pytest
from runs import real_run
from tiny import MS, no_run, tiny_run

from kvsim.explain.differences import pair
from kvsim.report import change_words, compare_table, make_console, render_comparison
from kvsim.report.compare import cautions, config_differences, difference_words
from kvsim.report.files import Results
from kvsim.report.pages.compare import build_comparison
from kvsim.results.numerals import SPACE, show
from kvsim.results.summary import summarise


def named(name, run):
    steps, requests, gaps, meta = run
    return name, Results(summarise(steps, requests, gaps, meta), requests, steps)


def summaries(*runs):
    return [(name, run.summary) for name, run in runs]


def row_of(rows, key):
    [row] = [row for row in rows if row.metric.key == key]
    return row


@pytest.fixture(scope="module")
def runs():
    return [named("small", real_run(rate=8)), named("large", real_run(rate=8, blocks=960))]


def test_differences_are_to_the_first_run(runs):
    rows = compare_table(summaries(*runs))
    row = row_of(rows, "output_throughput")
    small, large = (run.summary["output_throughput"] for _, run in runs)
    assert row.values == (small, large)
    assert row.difference(0) == large - small
    assert row.relative(0) == pytest.approx(large / small - 1)


def test_better_depends_on_the_figure(runs):
    rows = compare_table(summaries(*runs))
    assert row_of(rows, "output_throughput").judge(0) == "better"  # higher
    assert row_of(rows, "p99_ttft_ms").judge(0) == "better"  # lower
    assert row_of(rows, "kv_cache_usage_mean").judge(0) == "different"
    assert row_of(rows, "completed").judge(0) == "same"
    backwards = compare_table(summaries(*reversed(runs)))
    assert row_of(backwards, "p99_ttft_ms").judge(0) == "worse"


def test_up_to_one_percent_is_no_difference(runs):
    """In the table, on the page and in its sentences, whichever direction is better."""
    name, (summary, requests, steps) = runs[0]
    near = {**summary, "output_throughput": summary["output_throughput"] * 1.0099}
    near |= {"p99_ttft_ms": summary["p99_ttft_ms"] * 0.99001, "p50_ttft_ms": 1e6}
    rows = compare_table([(name, summary), ("near", near)])
    for key in ("output_throughput", "p99_ttft_ms"):
        row = row_of(rows, key)
        assert row.judge(0) == "same"
        assert difference_words(row, 0) == change_words(row, 0) == "no difference"
    assert row_of(rows, "p50_ttft_ms").judge(0) == "worse"
    page = build_comparison([runs[0], ("near", Results(near, requests, steps))])
    assert "near against small: worse in TTFT p50 +" in page
    assert "better in" not in page
    beyond = {**summary, "output_throughput": summary["output_throughput"] * 1.0101}
    rows = compare_table([(name, summary), ("beyond", beyond)])
    assert row_of(rows, "output_throughput").judge(0) == "better"


def test_shares_differ_in_points_and_nothing_relative(runs):
    row = row_of(compare_table(summaries(*runs)), "kv_cache_usage_mean")
    assert re.fullmatch(r"−\d+\.\d points", difference_words(row, 0).replace(SPACE, " "))
    assert change_words(row, 0) == difference_words(row, 0)


def test_figures_that_a_run_does_not_have_are_neither_better_nor_worse():
    cached, plain = named("a", real_run()), named("b", real_run(caching=False))
    row = row_of(compare_table(summaries(cached, plain)), "prefix_cache_hit_rate")
    assert row.judge(0) == "different"
    assert difference_words(row, 0) == ""


def test_figures_that_are_0_everywhere_are_left_out():
    rows = compare_table(summaries(*(named(name, real_run(4, rate=0.1)) for name in "ab")))
    assert "num_preemptions" not in {row.metric.key for row in rows}


def test_only_settings_that_differ_are_listed(runs):
    differing = dict(config_differences(summaries(*runs)))
    assert differing == {
        "num_gpu_blocks_override": ("480", "960"),
        "GPU blocks": ("480", "960"),
        "watermark blocks": ("4", "9"),
    }


def test_what_makes_runs_incomparable_is_said():
    one, other = named("one", tiny_run()), named("other", tiny_run())
    assert ["are the same configuration" in each for each in cautions(summaries(one, other))] == [
        True
    ]
    other[1].summary["meta"]["config"] = {"watermark": 0.5}
    assert cautions(summaries(one, other)) == []
    other[1].summary["meta"]["outcome"] = {"kind": "deadlock"}
    other[1].summary["meta"]["trace"] = {"sha256": "other"}
    other[1].summary["meta"]["cost"] = {"kind": "measured"}
    other[1].summary["completed"] = 2
    said = " ".join(cautions(summaries(one, other)))
    for word in ("deadlock", "different traces", "different sources", "different numbers"):
        assert word in said


def test_pairs_are_the_requests_that_both_completed():
    first, other = tiny_run()[1], copy.deepcopy(tiny_run()[1])
    other["first_token_ns"][0] += 7 * MS
    other["finish_ns"][0] += 7 * MS
    other["status"][2] = "rejected"
    pairs = pair(first, other)
    assert (pairs.number, pairs.only_first, pairs.only_other) == (2, 1, 0)
    assert pairs.same_arrivals
    assert list(pairs.differences_ns("ttft")) == [7 * MS, 0]
    assert list(pairs.differences_ns("e2el")) == [7 * MS, 0]


def test_different_requests_are_not_paired():
    first, other = real_run(30)[1], real_run(30, seed=1)[1]
    assert pair(first, other) is None
    for part in (slice(10), slice(10, None)):
        assert pair(first, {name: column[part] for name, column in first.items()}) is None


def test_the_order_of_rows_does_not_matter():
    first = real_run(30)[1]
    turned = {name: column[::-1] for name, column in first.items()}
    pairs = pair(first, turned)
    assert pairs.number == sum(status == "completed" for status in first["status"]) > 0
    assert not any(pairs.differences_ns(kind).any() for kind in pairs.durations_ns)


def test_parts_of_the_mean_difference_add_up(runs):
    pairs = pair(*(run.requests for _, run in runs))
    parts = sum(pairs.differences_ns(phase).sum() for phase in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(pairs.differences_ns("e2el").sum())


def test_a_run_does_not_differ_from_itself():
    one = named("one", real_run(rate=8))
    rows = compare_table(summaries(one, one))
    assert {row.judge(0) for row in rows} == {"same"}
    assert {difference_words(row, 0) for row in rows} == {"no difference"}
    page = build_comparison([one, ("again", one[1])])
    [figures] = re.findall(r'<table class="stacked">(.*?)</table>', page)
    assert set(re.findall(r'<div class="(\w+)">(.*?)</div>', figures)) == {
        ("same", "no difference")
    }
    assert "No difference in any setting." in page
    assert 'TTFT</td><td class="number">no difference' in page
    assert 'E2EL</td><td class="number">no difference' in page
    assert not re.search(r"[+−]\d", page[page.index("<body>") : page.index("</main>")])


def test_the_terminal_shows_values_and_differences(runs):
    console = make_console(io.StringIO(), width=120)
    render_comparison(summaries(*runs), console)
    text = console.file.getvalue().replace(SPACE, " ")
    assert "num_gpu_blocks_override: 480 → 960" in text
    [line] = [line for line in text.splitlines() if "TTFT p99" in line]
    assert re.search(r"−\S+ s −\S+ %", line)
    assert "ESTIMATED" in text


def test_the_terminal_keeps_to_its_width_with_many_runs(runs):
    many = [(f"run-{i}", runs[i % 2][1].summary) for i in range(8)]
    console = make_console(io.StringIO(), width=80)
    render_comparison(many, console)
    text = console.file.getvalue().replace(SPACE, " ")
    assert all(len(line) <= 80 and "…" not in line for line in text.splitlines())
    assert "num_gpu_blocks_override: 480, but 960 in run-1, 960 in run-3" in text.replace("\n", " ")
    heads = [name for name in re.findall(r"run-\d(?!\S)", text) if name != "run-0"]
    assert {f"run-{i}" for i in range(1, 8)} <= set(heads)
    p99 = [show(summary["p99_ttft_ms"], "ms").replace(SPACE, " ") for _, summary in many]
    lines = [line for line in text.splitlines() if "TTFT p99" in line]
    assert "".join(lines).count(p99[1]) == 4
    assert text.count("ESTIMATED") == 1


def test_many_runs_have_their_changes_below_the_values(runs):
    page = build_comparison([*runs, *((f"n{name}", run) for name, run in runs)])
    before, after = (show(summary["p99_ttft_ms"], "ms") for _, summary in summaries(*runs))
    [row] = re.findall(r"<tr><td>TTFT p99</td>(.*?)</tr>", page)
    rows = {row.metric.key: row for row in compare_table(summaries(*runs))}
    changes = (words(rows["p99_ttft_ms"], 0) for words in (difference_words, change_words))
    below = f'<div class="better">{", ".join(changes)}</div>'
    other = f'<td class="number">{after}{below}</td>'
    same = f'<td class="number">{before}<div class="same">no difference</div></td>'
    assert row == f'<td class="number">{before}</td>{other}{same}{other}'


def test_the_terminal_says_that_nothing_differs():
    one, other = named("one", tiny_run()), named("other", tiny_run())
    other[1].summary["meta"]["config"] = {"watermark": 0.5}
    console = make_console(io.StringIO(), width=120)
    render_comparison(summaries(one, other), console)
    assert "No difference in any figure." in console.file.getvalue()


def test_a_comparison_has_all_its_sections(runs):
    page = build_comparison([*runs, ("third", runs[0][1])])
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        *("Differences", "Why", "Settings", "All figures", "Request by request", "Latency"),
        "Over time",
    ]
    assert page == build_comparison([*runs, ("third", runs[0][1])])


@pytest.mark.parametrize("other", [no_run(), real_run(3, longest=1)])
def test_runs_without_common_requests_can_be_compared(other):
    for pages in ([tiny_run(), other], [other, tiny_run()], [other, other]):
        page = build_comparison([named(f"<b>{i}", run) for i, run in enumerate(pages)])
        assert "<b>" not in page[page.index("<body>") : page.index("</main>")]


def test_all_runs_share_one_time_axis():
    short, long = named("short", tiny_run()), named("long", real_run(20, rate=1))
    page = build_comparison([short, long])
    end_s = np.max(long[1].steps["end_ns"]) / 1e9
    assert f'"range":[0,{end_s}]' in page


def test_hostile_names_stay_text():
    hostile = "</script><script>alert(1)</script>"
    one = named("one", tiny_run())
    plain = build_comparison([one, ("other", one[1])])
    page = build_comparison([one, (hostile, one[1])])
    assert "<script>alert" not in page
    assert page.count("</script>") == plain.count("</script>")
