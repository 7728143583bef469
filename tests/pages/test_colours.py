"""The style sheet has a colour for everything that a page draws."""

import re

import pytest
from places import ROOT

from kvsim.core.schema import BLOCKED, CAUSES
from kvsim.explain.cachelab.sentences import PARTS
from kvsim.fleet.page import CAUSE_COLOURS
from kvsim.report.pages.cache import PART_COLOURS
from kvsim.report.pages.compare import COLOURS, run_colour
from kvsim.report.pages.figures import coloured
from kvsim.report.pages.provenance import MEMORY
from kvsim.report.pages.story import COLOURS as STANDINGS
from kvsim.results.ledger import KERNEL_LABELS, PROMPT_LABELS, TIME_LABELS
from kvsim.results.ledger_summary import bare

STYLE = (ROOT / "kvsim" / "report" / "pages" / "page.css").read_text()
DRAWN = {
    "causes of a wait": [f"cause-{cause}" for cause in BLOCKED[1:]],
    "times": [f"part-{bare(name)}" for name in TIME_LABELS],
    "kernels": [f"kernel-{bare(name)}" for name in KERNEL_LABELS],
    "prompt tokens": [f"prompt-{bare(name)}" for name in PROMPT_LABELS],
    "memory": [colour for _, colour in MEMORY.values()],
    "an audit": [PART_COLOURS[part] for part in PARTS],
    "regrets": [CAUSE_COLOURS[cause] for cause in CAUSES[1:]],
    "compared runs": [run_colour(i) for i in range(COLOURS)],
    "standings": list(STANDINGS.values()),
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
