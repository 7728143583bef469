"""The page of a profile: a figure for each of its tables, at each block size."""

import json
import re
from typing import Any

import pytest
from msgspec.structs import replace

from kvsim.cost.profile import MixedGrid, Profile, load_profile
from kvsim.report.pages.cost import LINES, build_profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile("h200-sxm-llama-3-8b-public")


def figures(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert found is not None
    return {figure["id"]: figure for figure in json.loads(found[1])}


def test_every_table_has_a_figure_of_its_times(profile: Profile) -> None:
    page = build_profile(profile)
    drawn = figures(page)
    assert list(drawn) == ["dense-64", "head-64", "prefill-64", "decode_v2-64"]
    fit = profile.fit
    (dense,) = drawn["dense-64"]["data"]
    assert dense["x"] == fit.dense.x
    assert dense["y"] == pytest.approx(fit.dense.us, rel=1e-4)
    first, *_, last = drawn["decode_v2-64"]["data"]
    assert len(drawn["decode_v2-64"]["data"]) == LINES
    assert first["y"] == pytest.approx(fit.decode_v2.us[0], rel=1e-4)
    assert last["y"] == pytest.approx(fit.decode_v2.us[-1], rel=1e-4)
    column = drawn["prefill-64"]["data"][1]
    assert column["y"] == pytest.approx([row[1] for row in fit.prefill.us], rel=1e-4)


def test_block_sizes_come_one_after_another_and_ids_are_unique(profile: Profile) -> None:
    page = build_profile(replace(profile, others={"16": profile.fit}))
    assert {name.rpartition("-")[2] for name in figures(page)} == {"64", "16"}
    ids = re.findall(r'<[a-z]+[^>]*? id="([^"]+)"', page[: page.rindex("<script")])
    assert len(ids) == len(set(ids))
    assert set(figures(page)) < set(ids)


def test_one_launch_is_drawn_by_chunk(profile: Profile) -> None:
    us = [[[[1.0 + q, 2.0 + q]]] for q in range(2)]
    mixed = MixedGrid([16, 32], [0], [4], [16, 64], us)
    page = build_profile(replace(profile, fit=replace(profile.fit, mixed=mixed)))
    (trace,) = figures(page)["mixed-64"]["data"]
    assert (trace["name"], trace["x"], trace["y"]) == ("4 decodes of 64", [16, 32], [2, 3])


def test_errors_are_listed_by_region(profile: Profile) -> None:
    figures_of = {"points": 3, "median_percent": 1.5, "p95_percent": 2.5}
    error = {"decode": {**figures_of, "short": figures_of}, "trusted": True}
    page = build_profile(replace(profile, error=error))
    assert "<td>decode</td>" in page
    assert "<td>decode, short</td>" in page
    assert "<dt>trusted</dt><dd>yes</dd>" in page
    assert build_profile(profile) == build_profile(profile)
