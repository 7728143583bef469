"""The page of the crossover: every place is unique, every figure has one, nothing is fetched."""

import json
import re

import pytest

from kvsim.cost.crossover import ModelCrossings, crossings
from kvsim.machine import load_hardware, load_model
from kvsim.report.pages.cost import build_crossover, crossing_head, crossing_rows
from kvsim.settings.config import make_config

LENGTHS = [512, 8192]


@pytest.fixture(scope="module")
def models() -> list[ModelCrossings]:
    hardware = load_hardware("h200-sxm")
    tokens = [64, 512, 2048, 8192]
    return [
        crossings(load_model(name), hardware, make_config({}), tokens, ["layer", "cross"])
        for name in ("llama-3-8b", "llama-2-7b")
    ]


@pytest.fixture(scope="module")
def page(models: list[ModelCrossings]) -> str:
    return build_crossover(models, "h200-sxm", LENGTHS)


def test_ids_are_unique_and_every_figure_has_its_place(page: str) -> None:
    ids = re.findall(r'<[a-z]+[^>]*? id="([^"]+)"', page[: page.rindex("<script")])
    assert len(ids) == len(set(ids))
    drawn = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S)
    assert drawn is not None
    names = [figure["id"] for figure in json.loads(drawn[1])]
    assert names == ["even", "times-0", "times-1"]
    assert set(names) < set(ids)


def test_equal_inputs_give_equal_bytes(page: str, models: list[ModelCrossings]) -> None:
    assert build_crossover(models, "h200-sxm", LENGTHS) == page


def test_the_table_has_the_lengths_that_were_asked_for(
    page: str, models: list[ModelCrossings]
) -> None:
    body = page[page.index('id="table"') : page.index('id="sources"')]
    assert body.count("<td>512</td>") == body.count("<td>8,192</td>") == len(models)
    assert "<td>64</td>" not in body
    for model in models:
        assert all(len(row) == len(crossing_head(model)) for row in crossing_rows(model))


def test_words_say_who_wins_and_by_which_times(page: str) -> None:
    start = "llama-3-8b, 64 copies a block (layer): swapping is cheaper"
    assert f"{start} at 64 and at 8,192 tokens." in page
    start = "llama-3-8b, 1 copy a block (cross): swapping is cheaper"
    assert f"{start} at every length, from 64 to 8,192 tokens." in page
    assert "SCALED step times (scaled from public-table: h200-sxm x llama-3-8b" in page
