"""The page of several replicas, in words and in a real browser without a network."""

from typing import Any

from browsers import eventually
from places import ROOT

from kvsim.fleet import build_fleet, find_bounds, fleet_run, simulate_fleet, summarise_fleet
from kvsim.fleet.page import MOST_LANES
from kvsim.workload import open_trace

CHAT = str(ROOT / "traces" / "chat.jsonl")
SMALL: dict[str, Any] = {
    "model": "llama-3-8b",
    "num_prompts": 60,
    "max_model_len": 4096,
    "num_gpu_blocks_override": 300,
}


def page_of(replicas: int, router: str, **settings: Any) -> str:
    configs = [{**SMALL, **settings}] * replicas
    result = simulate_fleet(CHAT, configs, router, explain=True)
    summary = summarise_fleet(result, find_bounds(open_trace(CHAT), result))
    return build_fleet(fleet_run(result, summary))


def test_equal_bytes_and_every_section() -> None:
    page = page_of(3, "sglang-cache_aware")
    assert page == page_of(3, "sglang-cache_aware")
    for section in ("At a glance", "Decisions", "Over time", "Replicas", "Latency", "Provenance"):
        assert f"<h2>{section}</h2>" in page
    assert page.count('id="lane-') == 3
    assert "The decisions that cost most" in page
    assert "pooled cache: one as large as all together" in page


def test_without_caches_no_decision_found_anything() -> None:
    page = page_of(2, "round-robin", enable_prefix_caching=False)
    assert "<h2>Decisions</h2>" not in page
    assert "What decisions found" not in page
    assert page.count('id="lane-') == 2


def test_of_many_replicas_the_busiest_have_lanes() -> None:
    page = page_of(MOST_LANES + 3, "session-affinity")
    assert page.count('id="lane-') == MOST_LANES
    assert "3 more have folders" in page


def test_one_request_is_enough() -> None:
    assert page_of(3, "least-loaded", num_prompts=1).count('id="lane-') == 3


def test_a_browser_draws_it_quietly(opened: Any) -> None:
    page = opened("fleet", page_of(3, "least-loaded"))
    for width in (1400, 800, 390):
        page.set_viewport_size({"width": width, "height": 800})
        eventually(page, f"document.documentElement.scrollWidth <= {width}")
    assert page.locator(".plot svg.main-svg").count() > 0
    assert page.noise == []


def test_a_fleet_that_rejects_everything_has_a_page() -> None:
    assert "<h2>Provenance</h2>" in page_of(2, "least-loaded", max_model_len=16)
