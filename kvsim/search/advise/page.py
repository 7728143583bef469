"""Writes advice as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.report import Remark
from kvsim.report.pages.compare import interval_figure
from kvsim.report.pages.html import (
    Html,
    card,
    cards,
    document,
    element,
    join,
    lead,
    panel,
    placed,
    table,
    tags,
)
from kvsim.results.numerals import count, plural, show
from kvsim.results.plain import plain
from kvsim.run.assembly import assemble
from kvsim.search.advise.search import Advice
from kvsim.search.advise.statement import method, named, not_tried, rows, sentences
from kvsim.search.sweep.page import origin_panels
from kvsim.settings.config import to_table
from kvsim.version import __version__
from kvsim.workload.trace import Trace

PAGE, NAME = "advice.html", "advice.json"
_INDENT = "\u2003"


def build_page(
    advice: Advice, trace: Trace, now: Sequence[Remark], cache: Sequence[str], line: str
) -> str:
    """The page of an advice. `now`: what the present settings suffer from, and last where step
    times come from. `cache`: sentences on the prefix cache. `line`: how to start the server."""
    base, source = assemble(advice.base.config).config, now[-1]
    sent = min(len(trace.rows), base.num_prompts or len(trace.rows))
    subject = base.engine, base.model, base.hardware, plural(sent, "request")
    changed = ", ".join(map(named, advice.best.changes))
    sections = {
        "At a glance": _cards(advice),
        "Command line": panel(None, element("pre", line)),
        "Every change": _tried(advice),
        "Prefix cache": join(map(lead, cache)) if cache else None,
        "To repeat it": _origin(advice, trace),
    }
    return document(
        "kvsim advise",
        f"Set {changed}" if changed else "No tested change helps",
        sections,
        subject=" · ".join(str(each) for each in subject if each is not None),
        about=[tags([(source.text, "good" if source.tone == "plain" else "warning")])],
        remarks=[*now[:-1], *map(Remark, sentences(advice))],
    )


def _cards(advice: Advice) -> Html:
    """Every objective: its limit, and its figure before and after."""
    best = advice.best if advice.best.changes else None
    shown = []
    for each in advice.objectives.each:
        unit, before = each.metric.unit, advice.base.mean(each)
        after = None if best is None else best.mean(each)
        words = (
            show(before, unit) if after is None else f"{show(before, unit)} → {show(after, unit)}"
        )
        last = before if after is None else after
        kept = last is not None and (last <= each.limit) == each.below
        shown.append(card(each.metric.label, words, str(each), tone="better" if kept else "worse"))
    met = f"{count((best or advice.base).met(advice.objectives))} of {len(advice.base.runs)}"
    return cards([*shown, card("Seeds that meet all objectives", met)])


def _tried(advice: Advice) -> Html:
    tried = [*advice.singles, advice.best] if advice.best.changes[1:] else advice.singles
    drawn = [
        (" + ".join(map(named, each.changes)), each.verdict)
        for each in tried
        if each.verdict is not None and each.verdict.finding not in ("same", "equal")
    ]
    mean = advice.base.mean(advice.decides)
    difference = f"{advice.decides.metric.label}: difference"
    body = [(row.name.replace("  ", _INDENT), *row[1:]) for row in rows(advice)]
    parts: list[object] = [lead(method(advice))]
    if mean and drawn:
        title = f"{advice.decides.metric.label}: difference to the present settings"
        parts.append(placed([interval_figure(title, mean, drawn)]))
    parts.append(panel(None, table(["Setting", difference, ""], body, text_columns=3)))
    return join([*parts, *map(lead, not_tried(advice))])


def _origin(advice: Advice, trace: Trace) -> Html:
    origin = {
        "Trace": trace.path,
        "Trace SHA-256": trace.sha256,
        "Objectives": advice.objectives.text,
        "Seeds": count(len(advice.base.runs)),
        "kvsim": __version__,
    }
    return origin_panels(origin, plain(to_table(advice.base.config)))
