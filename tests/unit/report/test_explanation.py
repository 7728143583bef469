"""Why one run differs from another: real runs, in words, as a record, as a page."""

import json
import re
from fractions import Fraction

import pytest
from runs import real_run
from shared import SHARED, needs_shared
from tiny import no_run

from kvsim.cost.calibrate.llmservingsim import import_profile
from kvsim.cost.profile import to_json
from kvsim.report import explain
from kvsim.report.compare import explanation_record
from kvsim.report.files import Results
from kvsim.report.pages.compare import build_diff
from kvsim.results.numerals import SPACE
from kvsim.results.summary import summarise
from kvsim.run.simulation import simulate
from kvsim.workload.spec import Workload, make_trace

TRACE = make_trace(Workload("chat", requests=150), 0)


def replay(name, **settings):
    table = {"engine": "vllm-0.6.3", "num_gpu_blocks_override": 700, **settings}
    return name, simulate(TRACE, table)


def fake(name, run):
    steps, requests, gaps, meta = run
    return name, Results(summarise(steps, requests, gaps, meta), requests, steps)


@pytest.fixture(scope="module")
def runs():
    return replay("small"), replay("large", num_gpu_blocks_override=1400)


@pytest.fixture(scope="module")
def explanation(runs):
    return explain(*runs)


def plain(words):
    return " ".join(words).replace(SPACE, " ")


def test_the_waterfalls_are_those_of_the_summaries(runs, explanation):
    for fall in explanation.waterfalls:
        key = f"{fall.statistic}_{fall.metric}_ms"
        for total, run in zip(fall.totals, runs, strict=True):
            assert float(total) / 1e6 == pytest.approx(run[1].summary[key], rel=1e-12)
        assert sum(change for _, change in fall.changes()) == fall.difference


def test_the_words_name_preemptions_and_what_they_cost(runs, explanation):
    first, other = (run.summary for _, run in runs)
    avoided = first["num_preemptions"] - other["num_preemptions"]
    assert avoided > 0
    [lead, *_] = explanation.headline
    words = lead.replace(SPACE, " ")
    assert words.startswith(f"large avoided {avoided} preemptions: −")
    assert "recomputed tokens, −" in words and "p99 TTFT" in words
    backwards = plain(explain(runs[1], runs[0]).headline)
    assert backwards.startswith(f"small made {avoided} more preemptions: +")


def test_what_hardly_differs_is_called_no_difference():
    """Steps that take 10 us longer, and then 1 ms."""
    slow, slower, slowest = (
        replay(str(us), num_gpu_blocks_override=9000, cost={"model": "constant", "step_us": us})
        for us in (6000, 6010, 7000)
    )
    [lead, *_] = explain(slow, slower).headline
    assert lead.startswith("6010: no difference in p99 TTFT, no difference in p99 E2EL. What ch")
    assert "no difference" not in plain(explain(slow, slowest).headline)


def test_swaps_are_set_against_what_they_replace(runs):
    swap = replay("swap", preemption_mode="swap", num_gpu_blocks_override=700)
    modes = swap[1].summary["num_preemptions_by_mode"]
    assert modes["swap"] and not modes["recompute"]
    before = runs[0][1].summary["num_preemptions"]
    words = plain(explain(runs[0], swap).headline)
    assert f"swap made {modes['swap']} preemptions by swap instead of" in words
    assert f"instead of {before} preemptions by recompute" in words
    large = plain(explain(swap, runs[1]).headline)
    assert ("large avoided" in large) == (runs[1][1].summary["num_preemptions"] == 0)


def test_the_first_divergence_is_where_decisions_part(runs, explanation):
    found, steps = explanation.divergence, [run.steps for _, run in runs]
    for name in ("prefill_tokens", "decode_seqs", "blocked", "preempted_recompute"):
        same = steps[0][name][: found.step] == steps[1][name][: found.step]
        assert all(same)
    assert all(steps[0][name][found.step] != steps[1][name][found.step] for name in found.columns)
    words = plain(explanation.divergence_words)
    assert "small" in words and "large" in words and "of 700 blocks free" in words


def test_a_run_does_not_differ_from_itself(runs):
    one = runs[0]
    explanation = explain(one, ("again", one[1]))
    assert explanation.same
    assert plain(explanation.headline) == "Every request took the same time in again as in small."
    page = build_diff(one, ("again", one[1]))
    body = page[page.index("<body>") : page.index("</main>")]
    assert not re.search(r"[+−]\d", body)
    assert "<script" not in page


def test_the_record_is_exact(explanation):
    record = json.loads(json.dumps(explanation_record(explanation), allow_nan=False))
    for fall in record["waterfalls"]:
        parts = sum(Fraction(part["difference_ns"]) for part in fall["parts"].values())
        assert parts == Fraction(fall["difference_ns_exact"])
    assert record["first_divergence"]["step"] == explanation.divergence.step
    assert record["requests"] and record["blocks"]


def test_the_page_holds_everything(runs):
    page = build_diff(*runs)
    assert page == build_diff(*runs)
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        *("Where the difference comes from", "First divergent decision"),
        *("Requests that changed most", "Blocks that changed most", "All parts", "Settings"),
    ]
    [figures] = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    drawn = json.loads(figures)
    assert [figure["id"] for figure in drawn] == [
        *("fall-mean-ttft", "fall-p99-ttft", "fall-mean-e2el", "fall-p99-e2el"),
    ]
    for figure in drawn:
        [trace] = figure["data"]
        *begins, origin = trace["base"]
        *lengths, together = trace["x"]
        assert len(begins) == len(lengths) == len(trace["y"]) - 1 == len(trace["text"]) - 1
        # Each bar begins where the last one ends; the bar of all of them begins at 0.
        ends = [0, *(begin + length for begin, length in zip(begins, lengths, strict=True))]
        assert [*begins, together] == pytest.approx(ends, rel=1e-3, abs=1e-3 * abs(together))
        assert origin == 0
        assert [shape["x0"] for shape in figure["layout"]["shapes"]] == pytest.approx(
            ends[1:], rel=1e-3, abs=1e-3 * abs(together)
        )


def test_runs_of_other_requests_or_of_none_are_not_set_side_by_side():
    one, other = fake("one", real_run(30)), fake("other", real_run(30, seed=1))
    assert "had different requests" in plain(explain(one, other).headline)
    none = fake("none", no_run())
    for pair in ((one, other), (none, none)):
        assert explain(*pair).waterfalls == []
        assert "<h1>" in build_diff(*pair)


@needs_shared("groundtruth/rtx4090-llama-3.1-8b")
def test_the_block_sensitivity_of_the_measured_run_is_explained(tmp_path):
    """2,588 blocks, as the engine had them, against 3,400: what the difference is made of."""
    folder = SHARED / "groundtruth" / "rtx4090-llama-3.1-8b"
    profile = tmp_path / "rtx-4090.json"
    profile.write_text(to_json(import_profile(folder / "kernels")))
    settings = {
        "engine": "vllm-v1",
        "model": "llama-3.1-8b",
        "hardware": "rtx-4090",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_model_len": 32768,
        "cost": {"model": "table", "profile": str(profile)},
    }
    engine, larger = (
        (str(n), simulate(folder / "trace.jsonl", {**settings, "num_gpu_blocks_override": n}))
        for n in (2588, 3400)
    )
    explanation = explain(engine, larger)
    falls = {(fall.metric, fall.statistic): fall for fall in explanation.waterfalls}
    for fall in falls.values():
        blocks = dict(fall.changes())["waiting_blocks_ns"]
        assert blocks / fall.difference > Fraction(9, 10)
        assert sum(change for _, change in fall.changes()) == fall.difference
    assert falls["ttft", "p99"].difference < -20 * 10**9
    assert explanation.divergence.columns[0] == "blocked"
    words = plain(explanation.divergence_words)
    assert "2588 refused the head of the queue (too few free blocks)" in words
    assert "Request bench-41 is the first that was scheduled at another time" in words
