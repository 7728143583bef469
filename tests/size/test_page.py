"""The page of a search, in words and in a real browser without a network."""

from pathlib import Path

import pytest

from kvsim.config import make_config, to_table
from kvsim.size.answer import answer
from kvsim.size.knobs import Bounds, make_knob
from kvsim.size.page import build_page
from kvsim.size.search import Laboratory
from kvsim.sweep.slo import parse_slo
from kvsim.sweep.store import Store
from kvsim.workload.lengths import Lengths, synthesise_lengths

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
LOAD = synthesise_lengths(Lengths(100), Lengths(60), 5, requests=8)
BASE = make_config({"max_model_len": 256, "num_gpu_blocks_override": 90, "request_rate": 400.0})


@pytest.fixture(scope="module")
def page_of(tmp_path_factory):
    """The page for some objectives, whose runs are shared."""
    folder = tmp_path_factory.mktemp("runs")

    def build(slo, find="num_gpu_blocks"):
        knob = make_knob(find, LOAD, to_table(BASE), Bounds())
        lab = Laboratory(LOAD, BASE, knob, parse_slo(slo), (0, 1), Store(folder), jobs=1)
        return build_page(lab, answer(lab, ("arrivals",)))

    return build


@pytest.mark.parametrize("slo", ["p99_ttft<150ms", "p99_ttft<1us", "preemptions<1,preemptions>=0"])
def test_equal_bytes_and_every_section(page_of, slo):
    page = page_of(slo)
    assert page == page_of(slo)
    for section in ("Curves", "Around the answer", "To repeat it"):
        assert f"<h2>{section}</h2>" in page
    assert ("near the answer" in page) == (slo != "p99_ttft<1us")


def test_a_best_value_has_a_page(page_of):
    assert "Farthest from the limits" in page_of("p99_ttft<10s", "watermark")


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}")
def test_a_browser_draws_it_quietly(page_of, tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = tmp_path / "size.html"
    path.write_text(page_of("p99_ttft<150ms"), encoding="utf-8")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 390, "height": 800})
        noise = []
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda request: noise.append(request.url))
        page.goto(path.as_uri())
        page.locator("html[data-drawn=true]").wait_for()
        assert noise == [path.as_uri()]
        assert page.locator(".plot svg.main-svg").count() > 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()
