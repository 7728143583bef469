"""The page of a sweep: ranked, whole, escaped, and drawn by a real browser without a network."""

import json
import math
from pathlib import Path

import pytest

from kvsim.sweep.choose import TTFT, choose, pareto
from kvsim.sweep.page import build_page
from kvsim.sweep.sweep import Outcome, Plan, Planned

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]


UNDER_POINTER = """() => {
  const plot = document.getElementById("parallel");
  const { left, top } = plot.getBoundingClientRect();
  const { xaxis, yaxis } = plot._fullLayout;
  const { x, y, customdata } = plot.data[0];
  const at = (axis, value) => axis._offset + axis.l2p(value);
  return [left + at(xaxis, x[2]), top + at(yaxis, y[2]), customdata[2]];
}"""
"""A figure of the first line of the parallel coordinates, and whose it is."""


def record(ttft, throughput, blocks=100, kind="finished", reason=""):
    figures = {
        "completed": 9,
        "failed": 0,
        "p99_ttft_ms": ttft,
        "p99_tpot_ms": 10.0 + ttft / 1000,
        "output_throughput": throughput,
        "num_preemptions": 3,
    }
    return {
        "key": "k",
        "kvsim_version": "0",
        "outcome": {"kind": kind, "explanation": reason},
        "engine": {"num_gpu_blocks": blocks},
        "time_source": {"kind": "estimated", "source": "a guess"},
        "figures": {} if kind != "finished" else figures,
    }


def sweep(rows, slo=None):
    """A plan and outcomes of (settings, seed, record)."""
    points = [Planned(settings, seed, str(i)) for i, (settings, seed, _) in enumerate(rows)]
    trace = {"name": "<load>.jsonl", "sha256": "0", "requests": 9}
    base = {"engine": "e", "model": "m", "hardware": "h", "watermark": None}
    return Plan(trace, base, points, slo), [Outcome(*row) for row in rows]


GRID = [
    (
        {"watermark": w, "preemption_mode": mode},
        0,
        record(1000 * w + 400 * (mode == "swap"), 900 - w),
    )
    for w in (0.1, 1.0, 5.0, 90.0)
    for mode in ("recompute", "swap")
]
BROKEN = (
    {"watermark": 7.0, "preemption_mode": "swap"},
    0,
    record(1, 1, 1, "refused", "too <small>"),
)


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
    assert [c.settings["n"] for c in chosen.best] == [3, 2]
    assert [c.met for c in chosen.configurations] == [1, 2, 2, 1]
    assert chosen.configurations[1].figures["p99_ttft_ms"] == 1250
    assert chosen.configurations[1].load == 0.75
    assert chosen.configurations[3].outcome == "deadlock"
    assert chosen.configurations[3].figures == {}
    assert chosen.verdict[0].text.startswith("2 of 4")


def test_with_a_varied_load_the_best_serve_most_and_with_varied_pools_they_are_least():
    by_rate = [({"request_rate": r}, 0, record(100 * r, 10 * r)) for r in (1, 5, 30)]
    assert [c.number for c in choose(*sweep(by_rate, "p99_ttft<2s")).best] == [2, 1]
    by_pool = [({"x": b}, 0, record(4000 / b, 1, blocks=b)) for b in (9, 1, 3)]
    assert [c.number for c in choose(*sweep(by_pool, "p99_ttft<2s")).best] == [3, 1]


def test_nothing_that_meets_them_names_the_nearest():
    chosen = choose(*sweep(GRID, "p99_ttft<50ms"))
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
    assert chosen.best == front


POINTS = [(100 + 37 * i % 61, round(50 * math.sin(i) + 60, 3)) for i in range(40)] + [
    (100, 80.0)
] * 2


@pytest.mark.parametrize("slo", [None, "p99_ttft<2s,p99_tpot<12ms"])
def test_a_page_has_every_section_and_escapes_what_it_shows(slo):
    page = build_page(*_chosen([*GRID, BROKEN], slo))
    for section in ("Best", "Trade-offs", "All at once", "Two settings at once", "Each setting"):
        assert f"<h2>{section}</h2>" in page
    assert "too &lt;small&gt;" in page
    assert "too <small>" not in page
    assert "&lt;load&gt;.jsonl" in page
    assert "1 configuration refused at start-up" in page.replace("\u00a0", " ")
    assert page == build_page(*_chosen([*GRID, BROKEN], slo))


def test_a_sweep_of_seeds_alone_and_one_in_which_nothing_ran_have_pages():
    assert "Every configuration" in build_page(*_chosen([({}, s, record(5, 5)) for s in (0, 1)]))
    page = build_page(*_chosen([BROKEN]))
    assert "refused" in page
    assert "<h2>Trade-offs</h2>" not in page


def _chosen(rows, slo=None):
    plan, outcomes = sweep(rows, slo)
    return plan, choose(plan, outcomes)


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}")
def test_a_browser_draws_it_quietly_and_marks_what_is_under_the_pointer(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = tmp_path / "sweep.html"
    path.write_text(build_page(*_chosen([*GRID, BROKEN], "p99_ttft<2s")), encoding="utf-8")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        noise = []
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda request: noise.append(request.url))
        page.goto(path.as_uri())
        page.locator("html[data-drawn=true]").wait_for()
        assert noise == [path.as_uri()]
        figures = json.loads(page.locator("#figures").text_content())
        marked = [figure["id"] for figure in figures]
        assert "parallel" in marked
        page.locator("#parallel").scroll_into_view_if_needed()
        x, y, owner = page.evaluate(UNDER_POINTER)
        page.mouse.move(x, y)
        for figure in figures:
            own = [
                (x, y)
                for each in figure["data"][:-1]
                for x, y, number in zip(
                    each["x"], each["y"], each.get("customdata", [None] * 999), strict=False
                )
                if number == owner and x is not None
            ]
            for _ in range(100):
                shown = page.evaluate(
                    f"() => {{ const t = document.getElementById('{figure['id']}').data.at(-1);"
                    " return [t.x, t.y]; }"
                )
                if shown[0] == [x for x, _ in own]:
                    break
                page.wait_for_timeout(50)
            assert own
            assert shown == [[x for x, _ in own], [y for _, y in own]]
        narrow = browser.new_page(viewport={"width": 390, "height": 800})
        narrow.goto(path.as_uri())
        narrow.locator("html[data-drawn=true]").wait_for()
        assert narrow.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()
