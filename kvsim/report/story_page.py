"""Writes the story of one request as one small HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from kvsim.ledger.parts import PROMPT_LABELS, TIME_LABELS
from kvsim.report.html import Html, element, join, key_of, panel, strip, table
from kvsim.report.ledger_summary import bare
from kvsim.report.numerals import count, percent, seconds
from kvsim.report.story import Story
from kvsim.version import __version__

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The page needs no other file and no network."""

MOST_SPELLS = 200
"""Most spells that are drawn one by one; with more, each standing is drawn once."""

_COLOURS = {
    "waiting": "part-waiting_blocks",
    "prefill": "part-own_prefill",
    "decode": "part-own_decode",
    "recompute": "part-recompute",
    "preempted, waiting": "part-preempted_waiting",
    "swapped out": "part-swapped_waiting",
}


def build_story(story: Story) -> str:
    """The whole file; equal stories give equal bytes."""
    title = f"Request {story.id}"
    style = resources.files("kvsim.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = [
        element("h2", "Time line"),
        _time_line(story),
        element("h2", "Where its time went"),
        _ledger(story.times_ns, TIME_LABELS, "part"),
    ]
    if story.tokens:
        sections += [
            element("h2", "Its prompt tokens"),
            _ledger(story.tokens, PROMPT_LABELS, "prompt"),
        ]
    header = element("div", element("h1", title), element("p", story.about, class_="subject"))
    body = join(
        (
            element("header", header),
            element("main", *sections),
            element("footer", f"kvsim {__version__}"),
        )
    )
    head = join(
        (
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            element("title", f"{title} · kvsim"),
            element("style", Html(style)),
        )
    )
    page = element("html", element("head", head), element("body", body), lang="en")
    return f"<!doctype html>\n{page}\n"


def _time_line(story: Story) -> Html:
    lengths = [(spell.standing, spell.end_ns - spell.begin_ns) for spell in story.spells]
    seen = {standing for standing, _ in lengths}
    if len(lengths) > MOST_SPELLS:
        lengths = [(each, sum(ns for s, ns in lengths if s == each)) for each in sorted(seen)]
    whole = sum(ns for _, ns in lengths)
    bar = strip(
        (f"var(--{_COLOURS[standing]})", ns / whole, f"{standing}: {seconds(ns / 1e9)}")
        for standing, ns in lengths
    )
    key = key_of((f"var(--{colour})", name) for name, colour in _COLOURS.items() if name in seen)
    rows = [
        (text, f"{time_ns / 1e9:,.6f} s", seconds((time_ns - story.arrival_ns) / 1e9))
        for time_ns, text in story.moments
    ]
    moments = table(["What happened", "At", "After its arrival"], rows)
    return panel(None, bar, key, moments)


def _ledger(values: Mapping[str, int], labels: Mapping[str, str], family: str) -> Html:
    whole = sum(values.values())
    times = family == "part"
    rows = [
        (
            labels[name],
            seconds(value / 1e9) if times else count(value),
            percent(value / whole),
        )
        for name, value in values.items()
    ]
    bar = strip(
        (f"var(--{family}-{bare(name)})", value / whole, labels[name])
        for name, value in values.items()
    )
    key = key_of((f"var(--{family}-{bare(name)})", labels[name]) for name in values)
    return panel(None, bar, key, table(["", "Time" if times else "Tokens", "Share"], rows))
