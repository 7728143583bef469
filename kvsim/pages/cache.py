"""Shows what caches of every size make of a trace, and where the prompt tokens of runs went."""

from __future__ import annotations

from collections.abc import Sequence

from kvsim.cachelab.breakdown import WHO
from kvsim.cachelab.study import Study
from kvsim.cachelab.wording import (
    CURVE_HEAD,
    GROUP_HEAD,
    PARTS,
    Audited,
    audit_rows,
    audit_sentences,
    curve_rows,
    definitions,
    group_rows,
    sentences,
)
from kvsim.pages.document import document, placed
from kvsim.pages.figures import (
    Entry,
    Figure,
    Points,
    compact,
    layout,
    legend_of,
    line,
    log_ticks,
    rule,
    titled,
)
from kvsim.pages.html import Html, join, key_of, lead, panel, strip, table

MOST_GROUPS = 12
LRU, OPTIMUM, CEILING = "used", "cached", "muted"
WHO_COLOURS = dict(zip(WHO, ("run-1", "run-2", "run-3"), strict=True))
PART_COLOURS = {
    "hit": "cached",
    "policy": "run-2",
    "pinning": "run-3",
    "capacity": "run-4",
    "timing": "run-5",
    "granularity": "run-1",
    "other_salt": "run-0",
    "cold": "grid",
    "unreached": "rule",
}


def build_curve(study: Study) -> str:
    """The page of `kvsim cache curve`."""
    figures = [_hits(study), _regret(study), _distances(study)]
    head = ["group of requests", *GROUP_HEAD]
    groups = {"Sessions": study.sessions, "Prompts that begin alike": study.prefixes}
    sections: dict[str, Html | None] = {
        "Hits by size": placed(figures[:1]),
        "What a better policy could add": placed(figures[1:2]),
        "Who reuses what": join((lead(_WHO), placed(figures[2:]))),
        "Table": table(CURVE_HEAD, curve_rows(study), text_columns=0),
    }
    for title, listed in groups.items():
        if listed:
            sections[title] = panel(None, table(head, group_rows(study, listed, MOST_GROUPS)))
    return document(
        "kvsim cache curve",
        f"Caches of every size: {study.trace.rsplit('/', 1)[-1]}",
        sections,
        figures,
        subject=definitions(study),
        remarks=[(sentence, "plain") for sentence in sentences(study)],
    )


def build_audit(runs: Sequence[Audited]) -> str:
    """The page of `kvsim cache audit`."""
    rows = []
    for run in runs:
        parts = run.audit._asdict()
        whole = max(run.audit.prompt_tokens, 1)
        bar = [
            (PART_COLOURS[name], parts[name] / whole, f"{words}: {parts[name]:,} tokens")
            for name, words in PARTS.items()
        ]
        rows.append(panel(run.label, strip(bar)))
    used = [name for name in PARTS if any(run.audit._asdict()[name] for run in runs)]
    legend = key_of([(PART_COLOURS[name], PARTS[name]) for name in used])
    head = ["prompt tokens", *(run.label for run in runs)]
    return document(
        "kvsim cache audit",
        "Where the prompt tokens went",
        {"Parts": join((lead(_PARTS), legend, *rows)), "Table": table(head, audit_rows(runs))},
        subject="The parts of each run add up to its prompt tokens.",
        remarks=[(text, "plain") for text in audit_sentences(runs)],
    )


_WHO = (
    "Tokens that hit, by the number of other blocks used since. A cache of at least this size finds"
    " them. Shared root: content that at least two sessions had used before."
)
_PARTS = (
    "Lost to the policy: in this very schedule, another choice of what to evict would have kept"
    " them. Lost to pinning: the room was held by running requests. Lost to capacity: even with the"
    " whole pool and knowledge of the future they cannot be kept."
)


def _x(study: Study) -> tuple[Points, str]:
    """Capacities of the points, and the title of their axis."""
    if study.block_bytes is None:
        return [point.blocks for point in study.points], "capacity (blocks)"
    return compact(p.blocks * study.block_bytes / 2**30 for p in study.points), "capacity (GiB)"


def _across(study: Study) -> dict[str, object]:
    x, title = _x(study)
    known = [value for value in x if value]
    return titled(title, showgrid=True, **log_ticks(min(known), max(known)))


def _marked(study: Study) -> list[dict[str, object]]:
    """A line at the capacity asked about."""
    if study.chosen is None:
        return []
    scale = 1.0 if study.block_bytes is None else study.block_bytes / 2**30
    return [rule("x", study.chosen * scale, "muted", dash="dot")]


def _hits(study: Study) -> Figure:
    x, _ = _x(study)
    lru = compact(100 * study.share(point.lru) for point in study.points)
    best = compact(100 * study.share(point.optimum or 0) for point in study.points)
    most = compact([100 * study.share(study.ceiling)] * len(x))
    data = [
        line(x, most, CEILING, "no limit", dash="dash"),
        line(x, best, OPTIMUM, "optimum"),
        line(x, lru, LRU, "LRU"),
    ]
    legend = [
        Entry("LRU", LRU, (2,), "line"),
        Entry("optimum (sees the future)", OPTIMUM, (1,), "line"),
        Entry("no limit", CEILING, (0,), "dash"),
    ]
    look = layout(_across(study), titled("prompt tokens that hit (%)"), shapes=_marked(study))
    note = "The dotted line is the capacity asked about." if study.chosen else ""
    return Figure("hits", "Hits by capacity", note, data, look, legend, height=360)


def _regret(study: Study) -> Figure:
    x, _ = _x(study)
    left = compact(100 * study.share(point.left or 0) for point in study.points)
    look = layout(_across(study), titled("points left by LRU"), shapes=_marked(study))
    note = "Optimum less LRU, in points of the prompt tokens."
    return Figure("regret", "Regret", note, [line(x, left, LRU, "left")], look, [], height=240)


def _distances(study: Study) -> Figure:
    x, _ = _x(study)
    data = []
    for who, tokens in study.reused.items():
        shares = compact(100 * study.share(each) for each in tokens)
        data.append(line(x, shares, WHO_COLOURS[who], who, shape="vh"))
    look = layout(_across(study), titled("prompt tokens (%)"), shapes=_marked(study))
    title, note = "Reuse by distance", "Each step: what a cache of this size adds to the last one."
    return Figure("distances", title, note, data, look, legend_of(data), height=280)
