"""The pages of `kvsim cache`, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from places import ROOT

from kvsim.explain.cache_curve import Asked, study_trace
from kvsim.explain.cache_eviction import Audit
from kvsim.report.pages.cache import Audited, build_audit, build_curve
from kvsim.workload import open_trace
from kvsim.workload.reuse import Counting


def test_the_pages_are_drawn_without_a_complaint(opened: Callable[..., Any]) -> None:
    study = study_trace(
        open_trace(str(ROOT / "traces/agents.jsonl")),
        Counting(64),
        Asked([1024], block_bytes=64 * 131_072),
    )
    page = opened("cache-curve", build_curve(study))
    assert page.noise == []
    assert page.locator("h1").inner_text() == "Caches of every size: agents.jsonl"
    assert page.locator(".js-plotly-plot").count() == 3
    page.close()
    found = Audit(100, 50, 20, 10, 5, 0, 5, 0, 10, 0)
    runs = [Audited("lru", found), Audited("belady", found, oracle=True)]
    page = opened("cache-audit", build_audit(runs), drawn=False)
    assert page.noise == []
    assert "belady (ORACLE)" in page.locator("body").inner_text()
    page.close()
