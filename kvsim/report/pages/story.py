"""Writes the story of one request as one small HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvsim.explain.story import Story, ledger_rows
from kvsim.report.pages.document import document
from kvsim.report.pages.html import Html, key_of, panel, shares, strip, table
from kvsim.results.ledger import PROMPT_LABELS, TIME_LABELS, standings
from kvsim.results.numerals import seconds
from kvsim.results.summary import bare

MOST_SPELLS = 200
"""Most spells that are drawn one by one; with more, each standing is drawn once."""

_PARTS = (
    *("waiting_blocks", "own_prefill", "own_decode", "recompute", "preempted_waiting"),
    *("swapped_waiting", "waiting_tier", "waiting_load", "reload", "deferred_free"),
)
COLOURS = {name: f"part-{part}" for name, part in zip(standings.NAMES, _PARTS, strict=True)}
"""Standing → the colour of the part of the ledger that most of it becomes."""


def build_story(story: Story, tail: Sequence[str] = ()) -> str:
    """The whole file; equal stories give equal bytes. `tail`: why its like are slow."""
    sections = {
        "Time line": _time_line(story),
        "Where its time went": _ledger(story.times_ns, TIME_LABELS, "part", "Time"),
        "Its prompt tokens": _ledger(story.tokens, PROMPT_LABELS, "prompt", "Tokens"),
    }
    remarks = [(said, "plain") for said in (*tail, story.verdict) if said]
    title = f"Request {story.id}"
    return document("kvsim why", title, sections, subject=story.about, remarks=remarks)


def _time_line(story: Story) -> Html:
    lengths = [(spell.standing, spell.end_ns - spell.begin_ns) for spell in story.spells]
    seen = {standing for standing, _ in lengths}
    if len(lengths) > MOST_SPELLS:
        lengths = [(each, sum(ns for s, ns in lengths if s == each)) for each in sorted(seen)]
    whole = sum(ns for _, ns in lengths)
    bar = strip(
        (COLOURS[standing], ns / whole, f"{standing}: {seconds(ns / 1e9)}")
        for standing, ns in lengths
    )
    key = key_of((colour, name) for name, colour in COLOURS.items() if name in seen)
    rows = [
        (text, f"{time_ns / 1e9:,.6f} s", seconds((time_ns - story.arrival_ns) / 1e9))
        for time_ns, text in story.moments
    ]
    return panel(None, bar, key, table(["What happened", "At", "After its arrival"], rows))


def _ledger(values: Mapping[str, int], labels: Mapping[str, str], family: str, unit: str) -> Html:
    if not values:
        return Html()
    parts = ((f"{family}-{bare(name)}", n, labels[name]) for name, n in values.items())
    rows = ledger_rows(values, labels)
    return panel(None, shares(parts), table(["", unit, "Share"], rows))
