"""Shows what caches of every size make of a trace, and where the prompt tokens of runs went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsim.explain.cachelab.curve import WHO, Study
from kvsim.explain.cachelab.sentences import (
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
from kvsim.report.pages.figures import Figure, Trace, chart, compact, line, log_ticks, rule, titled
from kvsim.report.pages.html import Html, document, join, key_of, lead, panel, placed, strip, table
from kvsim.results.numerals import count

MOST_GROUPS = 12
LRU, OPTIMUM, CEILING = "run-1", "run-2", "muted"
WHO_COLOURS = dict(zip(WHO, ("run-1", "run-2", "run-3"), strict=True))
PART_COLOURS = {
    "hit": "prompt-num_cached",
    "policy": "run-1",
    "pinning": "prompt-concurrent",
    "capacity": "prompt-evicted",
    "timing": "prompt-last_block",
    "granularity": "prompt-partial_block",
    "other_salt": "prompt-other_salt",
    "cold": "prompt-cold",
    "unreached": "prompt-unreached",
}
"""Part of an `Audit` → its colour: that of the report of a run where both name it."""


def build_curve(study: Study) -> str:
    """The page of `kvsim cache curve`."""
    hits, regret, distances = _figures(study)
    head = ["group of requests", *GROUP_HEAD]
    groups = {"Sessions": study.sessions, "Prompts that begin alike": study.prefixes}
    sections: dict[str, Html | None] = {
        "Hits by size": placed([hits]),
        "What a better policy could add": placed([regret]),
        "Who reuses what": join((lead(_WHO), placed([distances]))),
        "Table": panel(None, table(CURVE_HEAD, curve_rows(study), text_columns=0)),
    }
    for title, listed in groups.items():
        if listed:
            sections[title] = panel(None, table(head, group_rows(study, listed, MOST_GROUPS)))
    return document(
        "kvsim cache curve",
        f"Caches of every size: {study.trace.rsplit('/', 1)[-1]}",
        sections,
        subject=definitions(study),
        remarks=[(sentence, "plain") for sentence in sentences(study)],
    )


def build_audit(runs: Sequence[Audited]) -> str:
    """The page of `kvsim cache audit`."""
    parts = [run.audit._asdict() for run in runs]
    bars = [
        [run.label, _bar(each), count(run.audit.prompt_tokens)]
        for run, each in zip(runs, parts, strict=True)
    ]
    used = [name for name in PARTS if any(each[name] for each in parts)]
    legend = key_of((PART_COLOURS[name], PARTS[name]) for name in used)
    head = ["run", "where its prompt tokens went", "prompt tokens"]
    every = table(["prompt tokens", *(run.label for run in runs)], audit_rows(runs))
    return document(
        "kvsim cache audit",
        "Where the prompt tokens went",
        {
            "Parts": join((lead(_PARTS), panel(None, table(head, bars, text_columns=2), legend))),
            "Table": panel(None, every),
        },
        subject="The parts of each run add up to its prompt tokens.",
        remarks=[(text, "plain") for text in audit_sentences(runs)],
    )


def _bar(parts: Mapping[str, int]) -> Html:
    whole = max(parts["prompt_tokens"], 1)
    return strip(
        (PART_COLOURS[name], parts[name] / whole, f"{words}: {count(parts[name])} tokens")
        for name, words in PARTS.items()
    )


_WHO = (
    "Tokens that hit, by the number of other blocks used since. A cache of at least this size finds"
    " them. Shared root: content that at least two sessions had used before."
)
_REGRET = "Optimum less LRU, in points of the prompt tokens."
_REUSE = "Each step: what a cache of this size adds to the last one."
_PARTS = (
    "Lost to the policy: in this very schedule, another choice of what to evict would have kept"
    " them. Lost to pinning: the room was held by running requests. Lost to capacity: even with the"
    " whole pool and knowledge of the future they cannot be kept."
)


def _figures(study: Study) -> list[Figure]:
    """Hits, regret and reuse by capacity, in memory if the model is known; with the capacity asked
    about."""
    unit, per_block = "blocks", 1.0
    if study.block_bytes is not None:
        unit, per_block = "GiB", study.block_bytes / 2**30
    x = compact((point.blocks * per_block for point in study.points), digits=8)
    known = [value for value in x if value]
    across = titled(f"capacity ({unit})", showgrid=True, **log_ticks(min(known), max(known)))
    marked = [rule("x", study.chosen * per_block, "muted", dash="dot")] if study.chosen else []

    def drawn(tokens: Iterable[int | None], colour: str, name: str, **look: Any) -> Trace:
        shares = compact(100 * study.share(each or 0) for each in tokens)
        return line(x, shares, colour, name, **look)

    points = study.points
    hits = [
        drawn([study.ceiling] * len(x), CEILING, "no limit", dash="dash"),
        drawn((point.optimum for point in points), OPTIMUM, "optimum (sees the future)"),
        drawn((point.lru for point in points), LRU, "LRU"),
    ]
    left = [drawn((point.left for point in points), LRU, "left by LRU")]
    reused = [drawn(study.reused[who], WHO_COLOURS[who], who, shape="vh") for who in study.reused]
    asked = "The dotted line is the capacity asked about." if marked else ""
    charts = (
        ("hits", "Hits by capacity", asked, "prompt tokens that hit (%)", 360, hits),
        ("regret", "Regret", _REGRET, "points left by LRU", 240, left),
        ("distances", "Reuse by distance", _REUSE, "prompt tokens (%)", 280, reused),
    )
    return [
        chart(
            *(id, title, note, data, across, titled(y)),
            keyed=len(data) > 1,
            height=height,
            shapes=marked,
        )
        for id, title, note, y, height, data in charts
    ]
