"""The page of a search, in words and in a real browser without a network."""

import pytest
from browsers import eventually

from kvsim.search.size import Bounds, Laboratory, Search, answer, make_knob
from kvsim.search.size_verdict import build_page
from kvsim.search.slo import parse_slo
from kvsim.search.store import Store
from kvsim.settings.config import make_config, to_table
from kvsim.workload.spec import Workload, make_trace

LOAD = make_trace(Workload("random", requests=8, input_len=100, output_len=60), 5)
BASE = make_config({"max_model_len": 256, "num_gpu_blocks_override": 90, "request_rate": 400.0})


@pytest.fixture(scope="module")
def page_of(tmp_path_factory):
    """The page for some objectives, whose runs are shared."""
    folder = tmp_path_factory.mktemp("runs")

    def build(slo, find="num_gpu_blocks"):
        knob = make_knob(find, LOAD, to_table(BASE), Bounds())
        lab = Laboratory(LOAD, BASE, knob, parse_slo(slo), (0, 1), Store(folder), jobs=1)
        return build_page([Search(lab, answer(lab, ("arrivals",)))])

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


def test_a_browser_draws_it_quietly(page_of, opened):
    page = opened("size", page_of("p99_ttft<150ms"))
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.locator(".plot svg.main-svg").count() > 0
    eventually(page, "document.documentElement.scrollWidth <= 390")
    assert page.noise == []
