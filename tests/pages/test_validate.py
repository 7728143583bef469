"""The page of a validation: whole, quiet, alone, and of the figures that it was given."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from browsers import eventually
from marks import long
from small import recording, write_profile, write_trace

from kvsim.against.validate.errors import compare, error_rows, sentence, share, signed_share
from kvsim.against.validate.page import build_page, latency_figures, step_figures


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("page")
    trace, profile = write_trace(folder), write_profile(folder)
    made = recording(trace, profile, lambda: 1.25, lambda: 1.2, lambda: 1.3)
    return compare(made, str(profile))


def test_equal_results_give_equal_pages(result: dict[str, Any]) -> None:
    assert build_page(result) == build_page(result)


def test_the_page_says_error_and_noise(result: dict[str, Any]) -> None:
    page = build_page(result)
    for policy in result["policies"]:
        assert sentence(policy) in page
    assert "20.0\u00a0% (4.0\u00a0%)" in page  # each step 25 % longer; once more 30 %
    assert "−20.0\u00a0% (+4.0\u00a0%)" in page


def test_texts_are_escaped(result: dict[str, Any]) -> None:
    named = {**result, "device": {"name": "<b>GPU</b>"}}
    assert "<b>GPU" not in build_page(named)


def test_a_profile_that_does_not_trust_itself_says_so(result: dict[str, Any]) -> None:
    error = {"trusted": False, "why": ["anchors drifted"]}
    doubted = {**result, "profile": {**result["profile"], "error": error}}
    assert "marked as not trusted: anchors drifted" in build_page(doubted)
    assert "not trusted" not in build_page(result)


def test_points_are_those_of_the_steps(result: dict[str, Any]) -> None:
    for policy in result["policies"]:
        scatter, errors = step_figures(policy)
        for trace in scatter.data[:-1]:
            ratios = [y / x for x, y in zip(trace["x"], trace["y"], strict=True)]
            assert ratios == pytest.approx([0.8] * len(ratios), rel=1e-3)
        predicted, again = errors.data
        assert predicted["x"][-1] == pytest.approx(20, rel=1e-2)
        assert again["x"][-1] == pytest.approx(4, rel=1e-2)
        assert [figure.id for figure in latency_figures(policy)] == [
            f"{policy['name']}-dist-{kind}" for kind in ("ttft", "tpot", "e2el")
        ]


def test_every_policy_has_a_column(result: dict[str, Any]) -> None:
    head, rows = error_rows(result)
    assert head == ["", "recompute", "swap", "prefix-caching"]
    assert all(len(row) == 4 and all(re.search(r"\d", cell) for cell in row[1:]) for row in rows)


def test_shares_are_written_with_two_figures_or_more() -> None:
    assert [share(x) for x in (0.0, 0.00123, 0.0567, 1.5)] == [
        "0.00\u00a0%", "0.12\u00a0%", "5.7\u00a0%", "150\u00a0%",
    ]  # fmt: skip
    assert (signed_share(-0.02), signed_share(0.3), share(None)) == (
        "−2.0\u00a0%", "+30.0\u00a0%", "–",
    )  # fmt: skip


@long
def test_a_browser_draws_it_without_a_word_or_a_request(
    result: dict[str, Any], opened: Callable[..., Any]
) -> None:
    page = opened("validation", build_page(result))
    drawn = page.evaluate(
        "[...document.querySelectorAll('.plot')].map(p => !!p.querySelector('svg .xtick'))"
    )
    assert len(drawn) == 15 and all(drawn)
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        eventually(page, f"document.documentElement.scrollWidth <= {width}")
    assert page.noise == []
