"""The ledger in summary, page and terminal, and the story of one request."""

import io
import json
import re

import numpy as np
import pytest
from worlds import MS, config, hashed, trace

import kvsim
from kvsim.errors import OutputError
from kvsim.explain.story import find_request, tell
from kvsim.report import make_console, read_results, read_transitions, render, write_results
from kvsim.report.pages.compare import build_story
from kvsim.report.pages.run import build_page
from kvsim.results.ledger import KERNELS, PROMPT_PARTS, TIME_PARTS
from kvsim.results.numerals import SPACE
from kvsim.results.summary import request_at


@pytest.fixture(scope="module")
def preempted():
    """r1 loses its blocks at 26, gets them back at 56 and ends at 95 (tests/exact/test_tiny.py)."""
    return kvsim.simulate(
        trace((0, 8, 4), (0, 8, 4)), config(num_gpu_blocks_override=5, max_model_len=20)
    )


@pytest.fixture(scope="module")
def cached():
    rows = ((0, 12, 1, [1, 2, 3]), (50, 14, 1, [1, 2, 9]), (60, 4, 1, []))
    return kvsim.simulate(hashed(4, *rows), config(enable_prefix_caching=True))


def told(result, index):
    story = tell(result.summary, result.requests, result.steps, result.transitions, index)
    return [(each.time_ns / MS, each.text.replace(SPACE, " ")) for each in story.moments]


def test_the_summary_adds_up(preempted):
    summary = preempted.summary
    assert sum(summary["time_ledger_total_s"].values()) == pytest.approx(0.056 + 0.095)
    assert sum(summary["time_ledger_mean_ms"].values()) == pytest.approx(summary["mean_e2el_ms"])
    assert summary["time_ledger_p99_ms"]["preempted_waiting"] == pytest.approx(0.99 * 30)
    last = summary["time_ledger_requests"]["p99"]
    assert (last["id"], last["e2el_ms"]) == ("r1", 95)
    assert sum(last["parts_ms"].values()) == 95
    assert sum(summary["step_time_s"].values()) == pytest.approx(0.095)
    assert json.loads(json.dumps(summary)) == summary


def test_prompt_tokens_are_counted_by_part(cached):
    tokens = cached.summary["prompt_ledger_tokens"]
    assert tokens["num_cached"] == cached.summary["prefix_cache_hit_tokens"] == 8
    assert sum(tokens.values()) == cached.summary["prefix_cache_query_tokens"] == 30


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 1), (99, 2), (1, 0), (34, 1), (100, 2), (33, 0)]
)
def test_the_request_at_a_percentile_is_one_that_exists(percent, expected):
    requests = {
        "status": ["completed", "completed", "rejected", "completed"],
        "arrival_ns": np.array([0, 10, 0, 20]),
        "finish_ns": np.array([10, 30, 999, 90]),
    }
    assert request_at(requests, percent) == [0, 1, 3][expected]
    requests["status"] = ["rejected"] * 4
    assert request_at(requests, percent) is None


def test_the_ledger_survives_the_disk(preempted, cached, tmp_path):
    for name, result in (("a", preempted), ("b", cached)):
        out = tmp_path / name
        tables = result.summary, result.requests, result.steps
        write_results(out, *tables, transitions=result.transitions)
        summary, requests, steps = read_results(out)
        assert summary == result.summary
        parts = PROMPT_PARTS if name == "b" else PROMPT_PARTS[:1]
        for column in (*TIME_PARTS, *parts):
            assert (requests[column] == result.requests[column]).all()
        assert set(PROMPT_PARTS[1:]).isdisjoint(requests) == (name == "a")
        for column in KERNELS:
            assert (steps[column] == result.steps[column]).all()
        for column, values in read_transitions(out, summary).items():
            assert (values == result.transitions[column]).all()


def test_the_page_and_the_terminal_say_where_time_went(preempted, cached):
    page = build_page(preempted.summary, preempted.requests, preempted.steps)
    text = re.sub(r"<[^>]*>", " ", page[: page.index('id="figures"')]).replace(SPACE, " ")
    assert "Where time went" in text
    assert "p99 of E2EL: r1" in text
    assert "preempted, waiting" in text
    assert "Where the time of the mean request went" not in text
    console = make_console(io.StringIO(), width=200)
    render(cached.summary, console)
    words = console.file.getvalue().replace(SPACE, " ")
    assert re.search(r"mean request +host overhead 51\.7 % · own prefill 37\.9 %", words)
    assert re.search(r"prompt tokens +cold 73\.3 % · hit 26\.7 %", words)


def test_the_story_of_a_preemption(preempted):
    assert told(preempted, 1) == [
        (0, "arrived; 0 waiting, 2 running, 1 of 5 blocks free"),
        (0, "first step; the step computes 16 prompt tokens of 2 requests and 0 decodes"),
        (26, "first token"),
        (26, "preempted, so that 1 running request could grow (2 blocks free after it): lost the KV"
         " of 8 tokens"),
        (56, "admitted again after 30.0 ms"),
        (75, "recomputed its lost KV in 19.0 ms"),
        (95, "finished with 4 tokens"),
    ]  # fmt: skip


def test_the_story_of_a_wait_names_who_ran_and_who_made_room():
    result = kvsim.simulate(trace((0, 8, 3), (1, 4, 1)), config(max_num_seqs=1))
    assert told(result, 1)[1:4] == [
        (1, "waited 17.0 ms for the current step"),
        (18, "waited 20.0 ms for a slot (max_num_seqs), while r0 ran"),
        (38, "r0 ended; first step; the step computes 4 prompt tokens of 1 request and 0 decodes"),
    ]


def test_the_story_of_a_swap():
    result = kvsim.simulate(
        trace((0, 8, 4), (0, 8, 4)),
        config(
            num_gpu_blocks_override=5,
            max_model_len=20,
            num_cpu_blocks_override=4,
            preemption_mode="swap",
        ),
    )
    moments = dict(told(result, 1))
    assert moments[57] == "its blocks began to come back after 31.0 ms"


@pytest.mark.parametrize(
    ("rows", "settings", "end"),
    [
        (((0, 65, 1), (0, 4, 1)), {}, "given up by the engine: too-long"),
        (
            ((0, 4, 20), (0, 20, 12)),
            {
                "num_gpu_blocks_override": 10,
                "max_model_len": 40,
                "num_cpu_blocks_override": 10,
                "preemption_mode": "swap",
                "watermark": 0.4,
            },
            "the run ended without it: deadlock",
        ),
    ],
)
def test_stories_without_a_good_end(rows, settings, end):
    result = kvsim.simulate(trace(*rows), config(**settings))
    place = result.requests["status"].index("rejected")
    assert told(result, place)[-1][1] == end


def test_a_request_that_was_never_sent_has_a_story_without_moments():
    settings = {
        "num_gpu_blocks_override": 5,
        "max_model_len": 20,
        "num_cpu_blocks_override": 1,
        "preemption_mode": "swap",
    }
    result = kvsim.simulate(trace((0, 8, 4), (0, 8, 4), (500, 4, 1)), config(**settings))
    story = tell(result.summary, result.requests, result.steps, result.transitions, 2)
    assert story.moments == story.spells == []
    assert story.about.endswith("never sent: swap-space-exhausted")
    assert "never sent" in build_story(story)


def test_a_wait_whose_reason_changes_often_is_told_in_one_sentence():
    rows = [(0, 9 + i % 7, 6 + 5 * i % 9) for i in range(16)]
    result = kvsim.simulate(trace(*rows), config(num_gpu_blocks_override=16, watermark=0.1))
    [wait] = [text for _, text in told(result, 15) if text.startswith("waited")]
    assert wait == (
        "waited 438 ms for free blocks; waited 340 ms, held by the watermark, in turns,"
        " while r0, r2, r1, r3 and 11 more ran"
    )
    assert result.requests["waiting_blocks_ns"][15] == 438 * MS


def test_a_livelock_is_not_told_moment_by_moment():
    """r1 loses its one chunk as often as the run lets it: 50,000 times."""
    rows = hashed(4, (0, 7, 9, []), (0, 18, 1, []))
    result = kvsim.simulate(
        rows,
        config(
            num_gpu_blocks_override=5,
            max_model_len=20,
            max_num_batched_tokens=8,
            max_num_seqs=2,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
        ),
    )
    assert result.meta["outcome"]["kind"] == "livelock"
    story = tell(result.summary, result.requests, result.steps, result.transitions, 1)
    assert len(story.moments) < 45
    assert [m.text for m in story.moments if m.text.startswith("…")] == [
        "… and 149,964 more such moments"
    ]
    assert len(build_story(story)) < 40_000


def test_an_unknown_request_is_one_line_with_the_nearest_one(preempted):
    assert find_request(preempted.requests, "r1") == 1
    with pytest.raises(OutputError, match=r"no 'r11' among 2.requests; did you mean 'r1'\?"):
        find_request(preempted.requests, "r11")


def test_the_page_of_a_story_is_small_and_asks_for_nothing(cached):
    tables = cached.summary, cached.requests, cached.steps, cached.transitions
    page = build_story(tell(*tables, 1)._replace(id="<script>alert(1)</script>"))
    assert len(page) < 40_000
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(?!#|data:)', page) == []
    assert "4 of 14" not in page
    assert "8 of 14" in page.replace(SPACE, " ")
