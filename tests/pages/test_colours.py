"""The style sheet has a colour for everything that a page draws."""

import re

import pytest
from places import ROOT

from kvsim.core.schema import BLOCKED, CAUSES
from kvsim.fleet.page import CAUSE_COLOURS
from kvsim.report.pages.cache import PARTS
from kvsim.report.pages.compare import COLOURS, STANDING_COLOURS, run_colour
from kvsim.report.pages.figures import coloured
from kvsim.report.pages.run import MEMORY
from kvsim.results.ledger import KERNEL_LABELS, PROMPT_LABELS, TIME_LABELS
from kvsim.results.summary import bare

STYLE = (ROOT / "kvsim" / "report" / "pages" / "page.css").read_text()
DRAWN = {
    "causes of a wait": [f"cause-{cause}" for cause in BLOCKED[1:]],
    "times": [f"part-{bare(name)}" for name in TIME_LABELS],
    "kernels": [f"kernel-{bare(name)}" for name in KERNEL_LABELS],
    "prompt tokens": [f"prompt-{bare(name)}" for name in PROMPT_LABELS],
    "memory": [colour for _, colour in MEMORY.values()],
    "an audit": [colour for _, colour in PARTS.values()],
    "regrets": [CAUSE_COLOURS[cause] for cause in CAUSES[1:]],
    "compared runs": [run_colour(i) for i in range(COLOURS)],
    "standings": list(STANDING_COLOURS.values()),
}


@pytest.mark.parametrize("what", DRAWN)
def test_everything_drawn_side_by_side_has_a_colour_of_its_own(what: str) -> None:
    found = coloured([f"var(--{name})" for name in DRAWN[what]])
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour in found)
    assert len(set(found)) == len(found)


def test_every_colour_but_a_namesake_has_a_dark_one() -> None:
    light, dark = STYLE.split("(prefers-color-scheme: dark)")[:2]
    own = {name for name, value in re.findall(r"--([\w-]+): ([^;]+);", light) if "#" in value[:1]}
    assert own <= set(re.findall(r"--([\w-]+):", dark))


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
def test_everything_drawn_stands_out_from_its_card(theme: int) -> None:
    """Graphics need a contrast of 3:1 (WCAG 2.1, 1.4.11). What is free, and the low end of a scale,
    are backgrounds."""
    sheet = STYLE.split("(prefers-color-scheme: dark)")[theme].partition("\n}\n")[0]
    own = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", sheet))
    card = luminance(own["card"])
    for name in set(own) - {"ground", "card", "ink", "rule", "grid", "free", "least"}:
        if name.endswith("-ground"):
            continue
        dark, light = sorted((card, luminance(own[name])))
        assert (light + 0.05) / (dark + 0.05) >= 3, name


def test_prefill_and_decode_have_one_colour_each() -> None:
    pairs = (
        ("kernel-attention_prefill", "part-own_prefill"),
        ("kernel-attention_decode", "decode"),
    )
    for kernel, part in pairs:
        assert coloured([f"var(--{kernel})"]) == coloured([f"var(--{part})"])
