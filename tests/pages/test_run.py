import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from runs import real_run
from tiny import no_run, tiny_run

from kvsim.pages.run import build_page
from kvsim.report.numerals import SPACE
from kvsim.report.summary import summarise


def page_of(run):
    steps, requests, gaps, meta = run
    return build_page(summarise(steps, requests, gaps, meta), requests, steps)


def figures_in(page):
    [data] = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    return {figure["id"]: figure for figure in json.loads(data)}


def text_of(page):
    body = page[page.index("<body>") : page.index('<script type="application/json"')]
    return re.sub(r"<[^>]*>", " ", body).replace(SPACE, " ")


@pytest.fixture(scope="module")
def tiny():
    return page_of(tiny_run())


def test_every_section_has_a_heading_and_a_link_to_it(tiny):
    titles = re.findall(r"<h2>(.*?)</h2>", tiny)
    assert titles == [
        *("Key figures", "Latency", "Over time", "Requests", "Prefix cache", "Memory"),
        "Provenance",
    ]
    for anchor in re.findall(r'href="#(.*?)"', tiny):
        assert f'<section id="{anchor}">' in tiny


def test_the_verdict_the_reasons_and_the_time_source_are_in_words(tiny):
    text = text_of(tiny)
    assert "4 requests in 250 ms: 3 completed, 1 rejected (too long)." in text
    assert "1 token computed again" in text
    assert "ESTIMATED step times" in text


def test_all_that_is_needed_to_repeat_a_run_is_there():
    text = text_of(page_of(real_run(20)))
    for fact in ("kvsim run traces/chat.jsonl", "b8cbb061" * 8, "0.1.0", "roofline of h100-sxm"):
        assert fact in text
    assert "[cost.link]\nlatency_us = 10.0" in text


def test_the_memory_budget_is_itemised():
    text = text_of(page_of(real_run(20)))
    for item in ("weights: 15.0 GiB", "KV blocks: 54.0 GiB", "left to others: 8.0 GiB"):
        assert item in text
    assert "480, room for 7,680 tokens" in text


def test_only_figures_with_something_to_show_are_drawn():
    always = {"gpu-blocks", "queues", "batch", "fragmentation"}
    always |= {"dist-ttft", "dist-tpot", "dist-e2el"}
    assert figures_in(page_of(real_run(4, rate=0.1, caching=False))).keys() == always
    busy = figures_in(page_of(real_run(rate=8, swap=True))).keys()
    assert busy == always | {"blocked", "preemptions", "swaps", "cpu-blocks", "hit-rate"}


def test_few_states_are_drawn_exactly(tiny):
    used, cached, free = figures_in(tiny)["gpu-blocks"]["data"]
    assert used["x"] == [0, 10, 30, 40, 60, 100, 200, 210, 220, 250]
    assert used["y"] == [0, 2, 3, 3, 2, 0, 2, 0, 2, 2]
    assert [sum(three) for three in zip(used["y"], cached["y"], free["y"], strict=True)] == [
        10
    ] * 10


def test_the_watermark_line_is_where_admission_ends(tiny):
    [line] = figures_in(tiny)["gpu-blocks"]["layout"]["shapes"]
    assert line["y0"] == line["y1"] == 10 - 1


def test_preemptions_are_drawn_where_they_happened(tiny):
    [bars] = figures_in(tiny)["preemptions"]["data"]
    assert [x for x, y in zip(bars["x"], bars["y"], strict=True) if y] == [
        pytest.approx(210, abs=2)
    ]
    assert sum(bars["y"]) == 1


def test_the_curve_of_a_latency_reaches_every_completed_request(tiny):
    curve = figures_in(tiny)["dist-e2el"]["data"][0]
    assert curve["x"] == [50, 50, 80]
    assert curve["y"] == pytest.approx([100 / 3, 200 / 3, 100], rel=1e-4)


def test_the_slowest_request_is_listed_first(tiny):
    slowest = re.findall(r'<span class="id">([A-D])</span>', tiny)
    assert slowest[:3] == ["B", "A", "C"]


def test_hostile_names_stay_text():
    hostile = '</script><script>alert(1)</script>"><img src=x onerror=alert(2)>'
    steps, requests, gaps, meta = tiny_run()
    requests["id"] = [f"{hostile}{i}" for i in range(4)]
    requests["reason"][3] = hostile
    meta["trace"] = {"path": f"/x/{hostile}", "notes": [hostile]}
    meta["command"] = meta["cost"] = {"kind": hostile, "source": hostile}
    meta["config"] = {"engine": hostile, hostile: {"model": hostile}}
    page = page_of((steps, requests, gaps, meta))
    assert "<script>alert" not in page
    assert "<img" not in page.replace("<image", "")[: page.index('id="figures"')]
    assert page.count("</script>") == page_of(tiny_run()).count("</script>")


def test_a_page_names_nothing_that_it_would_have_to_fetch(tiny):
    shell = tiny[: tiny.index('<script type="application/json"')]
    assert re.findall(r'(?:src|href)="(?!#|data:,)', shell) == []
    assert "default-src 'none'" in shell
    assert "url(" not in shell


@pytest.mark.parametrize("run", [no_run(), real_run(1), real_run(3, longest=1)])
def test_runs_with_next_to_nothing_have_a_page(run):
    page = page_of(run)
    assert "NaN" not in text_of(page)
    figures_in(page)


def test_the_engine_that_stopped_is_explained():
    steps, requests, gaps, meta = tiny_run()
    meta["outcome"] = {"kind": "deadlock", "explanation": "nobody moves", "remedy": "more blocks"}
    text = text_of(page_of((steps, requests, gaps, meta)))
    assert "Deadlock" in text
    assert "Nobody moves." in text
    assert "Remedy: more blocks." in text


def test_long_runs_are_thinned_out():
    steps, requests, gaps, meta = real_run(rate=8)
    count, times = len(steps["start_ns"]), 60
    shift = int(steps["end_ns"][-1])
    long = {name: np.tile(column, times) for name, column in steps.items()}
    for name in ("start_ns", "end_ns"):
        long[name] += np.repeat(np.arange(times) * shift, count)
    page = page_of((long, requests, gaps, meta))
    assert len(page) < 6_000_000
    for figure in figures_in(page).values():
        assert all(len(trace["x"]) <= 1501 for trace in figure["data"])


PROGRAM = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from runs import real_run
from kvsim.pages.run import build_page
from kvsim.report.summary import summarise
steps, requests, gaps, meta = real_run(60)
page = build_page(summarise(steps, requests, gaps, meta), requests, steps)
print(hashlib.sha256(page.encode()).hexdigest())
"""


def test_equal_runs_give_equal_bytes_in_any_process():
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]))
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("finish_ms", "kind"), [((20, 30, 40), None), ((20, 200, 9000), "log"), ((10, 200, 9000), None)]
)
def test_latencies_that_differ_widely_get_a_logarithmic_axis_if_they_can(finish_ms, kind):
    steps, requests, gaps, meta = tiny_run()
    requests["arrival_ns"] = requests["first_token_ns"] = np.array([10, 10, 10, 5]) * 1_000_000
    requests["finish_ns"] = np.array([*finish_ms, -1]) * 1_000_000
    figure = figures_in(page_of((steps, requests, gaps, meta)))["dist-e2el"]
    assert figure["layout"]["xaxis"].get("type") == kind
