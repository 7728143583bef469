"""The page of a sweep: whole, escaped, and drawn by a real browser without a network."""

import json
import re
from functools import cache

import pytest
from browsers import eventually
from msgspec.structs import replace

from kvsim.results.numerals import show
from kvsim.search.grid import expand, parse_space
from kvsim.search.runner import Task, run_point
from kvsim.search.sweep import choose, make_plan
from kvsim.search.sweep_page import build_page, heat_maps
from kvsim.settings.config import make_config, to_table
from kvsim.workload.spec import Workload, make_trace

BASE = to_table(make_config({"request_rate": 50.0, "max_model_len": 256}))
SLO = "p99_ttft<130ms,p99_tpot<30ms"
POOLS = "num_gpu_blocks_override=40,60,200"
SPACES = {
    "whole": ("watermark=0,0.1,0.2", "victim=tail,head,<small>", POOLS),
    "two": ("watermark=0,0.1", "max_num_seqs=12,32", POOLS),
    "rates": ("request_rate=2,5,50", "max_num_seqs=2,32"),
    "rates alone": ("request_rate=2,5,10,200",),
    "refused": ("victim=<small>",),
    "seeds": (),
}

UNDER_POINTER = """() => {
  const plot = document.getElementById("parallel");
  const { left, top } = plot.getBoundingClientRect();
  const { xaxis, yaxis } = plot._fullLayout;
  const { x, y, customdata } = plot.data[0];
  const at = (axis, value) => axis._offset + axis.l2p(value);
  const same = (i, j) => x[i] === x[j] && Math.abs(y[i] - y[j]) < 1e-3;
  const i = x.findIndex((_, i) => x[i] !== null && x.every((_, j) => i === j || !same(i, j)));
  return [left + at(xaxis, x[i]), top + at(yaxis, y[i]), customdata[i]];
}"""
"""A point of the parallel coordinates that no other line meets, and whose it is."""


JSON = r'<script type="application/json" id="figures">(.*?)</script>'


@cache
def swept(name, slo=None):
    """A plan and what is chosen of its runs: 20 requests, which 60 blocks put under pressure."""
    load = make_trace(
        Workload("random", requests=20, input_len=60, output_len=40, range_ratio=0.4), 3
    )
    load.path = "<load>.jsonl"
    points = expand(parse_space(SPACES[name], seeds=None if SPACES[name] else 2), BASE)
    plan = make_plan(load, BASE, points, slo)
    records = [run_point(Task("", point.config), load) for point in points]
    return plan, choose(plan, records)


@pytest.mark.parametrize("slo", [None, SLO])
def test_a_map_shows_the_best_of_the_other_settings(slo):
    """Of three pools one passes: the cell is green, and no mean of percentiles."""
    plan, chosen = swept("two", slo)
    first = str(heat_maps(chosen, plan.axes)).partition("</figure>")[0]
    cells = {
        int(number): text
        for number, text in re.findall(r'title="#(\d+): [^"]*"[^>]*>([^<]*)<', first)
    }
    ttfts = [each.figures["p99_ttft_ms"] for each in chosen.configurations]
    groups = [ttfts[i : i + 3] for i in range(0, len(ttfts), 3)]
    assert all(max(group) > 130 > min(group) for group in groups)
    assert sorted(cells.values()) == sorted(show(min(group), "ms") for group in groups)
    assert all(cells[number] == show(ttfts[number - 1], "ms") for number in cells)
    assert ("--good" in first) == (slo is not None)
    assert "--bad" not in first


@pytest.mark.parametrize("slo", [None, SLO])
def test_a_page_has_every_section_and_escapes_what_it_shows(slo):
    page = build_page(*swept("whole", slo))
    for section in ("Best", "Trade-offs", "All at once", "Two settings at once", "Each setting"):
        assert f"<h2>{section}</h2>" in page
    assert "&lt;small&gt;" in page
    assert "<small>" not in page
    assert "&lt;load&gt;.jsonl" in page
    assert "9 configurations refused at start-up" in page.replace("\u00a0", " ")
    swept.cache_clear()
    assert page == build_page(*swept("whole", slo))


def test_the_requests_are_those_that_ran():
    """The trace has 20; fewer are sent, or some points send fewer."""
    plan, chosen = swept("seeds")
    for base, settings, words in (
        ({}, [{}, {}], "20 requests"),
        ({"num_prompts": 7}, [{}, {}], "7 requests"),
        ({"num_prompts": 900}, [{}, {}], "20 requests"),
        ({}, [{"num_prompts": 5}, {"num_prompts": 12}], "5 to 12 requests"),
    ):
        points = [replace(p, settings=s) for p, s in zip(plan.points, settings, strict=True)]
        page = build_page(replace(plan, base={**plan.base, **base}, points=points), chosen)
        assert f"&lt;load&gt;.jsonl, {words}," in page.replace("\u00a0", " ")


def test_latency_and_what_was_served_are_drawn_against_the_rate():
    plan, chosen = swept("rates")
    page = build_page(plan, chosen)
    assert page.index("<h2>By request rate</h2>") < page.index("<h2>Best</h2>")
    figures = {each["id"]: each for each in json.loads(re.search(JSON, page)[1])}
    two, many = (
        [c for c in chosen.configurations if c.settings["max_num_seqs"] == n] for n in (2, 32)
    )
    for key, other in (("p99_ttft_ms", "p50_ttft_ms"), ("p99_tpot_ms", "p50_tpot_ms")):
        lines = figures[f"rate-{key}"]["data"][:-1]
        assert [each["x"] for each in lines] == [[2, 5, 50]] * 4
        tops = [[c.figures[k] for c in those] for those in (two, many) for k in (key, other)]
        scale = 1000 if max(tops[0]) > 2000 else 1
        for drawn, values in zip(lines, tops, strict=True):
            assert drawn["y"] == pytest.approx([value / scale for value in values], rel=1e-4)
    offered, *served = figures["rate-request_throughput"]["data"][:-1]
    assert offered["x"] == offered["y"] == [2, 50]
    assert served[0]["y"][2] < served[1]["y"][2] < 50
    assert "By request rate" not in build_page(*swept("two"))


def test_of_rates_alone_the_highest_that_meets_the_objectives_is_named():
    plan, chosen = swept("rates alone", "p99_ttft<150ms")
    met = [each.settings["request_rate"] for each in chosen.configurations if each.meets]
    assert [place.first.settings["request_rate"] for place in chosen.best] == met[::-1]
    assert chosen.verdict[-1].text.startswith(f"Highest: request_rate {met[-1]} (")
    assert "goodput" not in build_page(plan, chosen)


def test_a_sweep_of_seeds_alone_and_one_in_which_nothing_ran_have_pages():
    assert "Every configuration" in build_page(*swept("seeds"))
    page = build_page(*swept("refused"))
    assert "refused" in page
    assert "<h2>Trade-offs</h2>" not in page


def test_a_browser_draws_it_quietly_and_marks_what_is_under_the_pointer(opened):
    page = opened("sweep", build_page(*swept("whole", SLO)))
    assert page.noise == []
    figures = json.loads(page.locator("#figures").text_content())
    assert "parallel" in [figure["id"] for figure in figures]
    page.locator("#parallel").scroll_into_view_if_needed()
    x, y, owner = page.evaluate(UNDER_POINTER)
    page.mouse.move(x, y)
    for figure in figures:
        own = [
            [x, y]
            for each in figure["data"][:-1]
            for x, y, number in zip(
                each["x"], each["y"], each.get("customdata", [None] * 999), strict=False
            )
            if number == owner and x is not None
        ]
        assert own
        marked = f"document.getElementById('{figure['id']}').data.at(-1)"
        eventually(page, f"{marked}.x.length === {len(own)} && {marked}.x[0] !== null")
        shown = page.evaluate(f"() => {{ const t = {marked}; return [t.x, t.y]; }}")
        assert shown == [[x for x, _ in own], [y for _, y in own]]
    page.set_viewport_size({"width": 390, "height": 800})
    eventually(page, "document.documentElement.scrollWidth <= 390")
