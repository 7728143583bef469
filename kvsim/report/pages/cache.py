"""Says and draws what caches make of a trace, and where the prompt tokens of runs went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from kvsim.explain.cache_curve import WHO, Group, Point, Study, make_curve
from kvsim.explain.cache_eviction import Audit, Ranked, Ranking
from kvsim.explain.certainty import LEVEL
from kvsim.report.pages.figures import Figure, Trace, chart, compact, line, log_ticks, rule, titled
from kvsim.report.pages.html import Html, document, join, key_of, lead, panel, placed, strip, table
from kvsim.results.numerals import count, percent, plural, signed, size

PARTS = {
    "hit": ("hit", "prompt-num_cached"),
    "policy": ("lost to the policy", "run-1"),
    "pinning": ("lost to pinning", "prompt-concurrent"),
    "capacity": ("lost to capacity", "prompt-evicted"),
    "timing": ("lost to timing", "prompt-last_block"),
    "granularity": ("lost to block granularity", "prompt-partial_block"),
    "other_salt": ("another cache salt", "prompt-other_salt"),
    "cold": ("cold", "prompt-cold"),
    "unreached": ("not reached", "prompt-unreached"),
}
"""Part of an `Audit` → its name for people, and its colour: that of the report of a run where both
name it."""


class Audited(NamedTuple):
    """A run and its audit."""

    name: str
    audit: Audit
    oracle: bool = False
    """Whether its eviction sees the future."""

    @property
    def label(self) -> str:
        """The name; that of an oracle says so."""
        return f"{self.name} (ORACLE)" if self.oracle else self.name


def definitions(study: Study) -> str:
    """What the figures count."""
    counting = study.counting
    kept = "partial last blocks included" if counting.partial_blocks else "full blocks only"
    last = "may hit" if counting.last_token else "is always computed again"
    outputs = ", outputs that the trace names are kept" if counting.outputs else ""
    return (
        f"Share of {count(study.input_tokens)} prompt tokens; blocks of {counting.block_size}"
        f" tokens, {kept}, the last token {last}{outputs}. The cache alone: one request at a time,"
        " nothing pinned."
    )


def sentences(study: Study) -> list[str]:
    """The answer for the capacity asked about; without one, for where LRU loses most."""
    if not study.ceiling:
        return ["No prompt repeats what an earlier one had: no cache finds anything."]
    if study.chosen is not None:
        point = study.point(study.chosen)
        return [_now(study, point), *_more(study, point)]
    point = max(study.points, key=lambda each: each.left or 0)
    if point.left is None:
        return [f"A cache without limit finds {percent(study.share(study.ceiling))}."]
    now = _now(study, point)
    first = f"Where the choice of policy matters most: {now[:1].lower()}{now[1:]}"
    return [first, *_more(study, point)]


def _now(study: Study, point: Point) -> str:
    reach = ""
    if point.optimum is not None:
        share = point.lru / point.optimum if point.optimum else 1.0
        reach = f": {percent(share)} of what any policy could"
        reach += f" ({percent(study.share(point.optimum))})"
    each_bytes, capacity = study.asked.block_bytes, plural(point.blocks, "block")
    if each_bytes is not None:
        capacity = size(point.blocks * each_bytes)
    return (
        f"At {capacity}, LRU finds {percent(study.share(point.lru))} of"
        f" the prompt tokens{reach}. A cache without limit finds"
        f" {percent(study.share(study.ceiling))}."
    )


def _more(study: Study, point: Point) -> Iterator[str]:
    doubled = next((each for each in study.points if each.blocks == 2 * point.blocks), None)
    if doubled is None:
        return
    more = signed(study.share(doubled.lru - point.lru), "share")
    told = f"Twice the memory gives {more} with LRU"
    if point.left is not None:
        most = signed(study.share(point.left), "share")
        told += f"; the best policy could give {most} in the same memory"
    yield f"{told}."


def curve_rows(study: Study) -> Iterator[tuple[str, ...]]:
    """One row per capacity: its size, LRU, optimum, left, blocks that hit, requests that find at
    least one."""
    for point in study.points:
        left = point.left
        yield (
            count(point.blocks),
            count(point.blocks * study.counting.block_size),
            "" if study.asked.block_bytes is None else size(point.blocks * study.asked.block_bytes),
            percent(study.share(point.lru)),
            "" if point.optimum is None else percent(study.share(point.optimum)),
            "" if left is None else f"{100 * study.share(left):.1f}",
            percent(point.lru_blocks / max(study.blocks, 1)),
            percent(point.requests / study.requests),
        )


CURVE_HEAD = (
    "blocks",
    "tokens",
    "memory",
    "LRU",
    "optimum",
    "left, points",
    "LRU, blocks",
    "LRU, requests",
)


def group_rows(study: Study, groups: Sequence[Group], most: int) -> Iterator[tuple[str, ...]]:
    """The first groups: name, requests, prompt tokens, ceiling, LRU at the capacity asked about."""
    middle = study.points[len(study.points) // 2].blocks
    capacity = study.chosen or middle
    for group in groups[:most]:
        tokens = max(group.input_tokens, 1)
        curve = make_curve(group.reuse.found, group.reuse.counting.block_size)
        yield (
            group.name,
            count(len(group.reuse.found)),
            count(group.input_tokens),
            percent(group.reuse.ceiling_tokens / tokens),
            percent(curve.tokens.values([capacity])[0] / tokens),
        )


def policy_rows(ranking: Ranking) -> Iterator[tuple[str, ...]]:
    """One row per capacity and policy, and one for the optimum."""
    tokens = ranking.input_tokens
    for capacity, rows in groupby(ranking.rows, key=attrgetter("capacity")):
        for row in rows:
            single = "" if row.blocks is None else percent(row.blocks / tokens)
            yield count(capacity), row.name, single, percent(row.closed / tokens), gain_words(row)
        share = percent(ranking.optimum[capacity] / tokens)
        yield count(capacity), "optimum (ORACLE)", share, share, ""


POLICY_HEAD = ("blocks", "policy", "single blocks", "ends only", "gain over LRU")


def gain_words(row: Ranked) -> str:
    """What a policy gains over LRU, with its interval: `+2.1 points (+1.0 to +3.2)`."""
    if row.name == "lru":
        return ""
    if row.gain is None:
        return "too few requests to tell"
    low, high = row.gain.interval(LEVEL)
    return f"{signed(row.gain.difference, 'share')} ({_points(low)} to {_points(high)})"


def policy_sentences(ranking: Ranking) -> Iterator[str]:
    """For each capacity, the best policy and what it leaves to the optimum."""
    for capacity, optimum in ranking.optimum.items():
        rows = [row for row in ranking.rows if row.capacity == capacity]
        best = max(rows, key=lambda row: row.closed)
        left = (optimum - best.closed) / ranking.input_tokens
        gain = "" if best.name == "lru" else f", {gain_words(best)} over LRU"
        yield (
            f"At {plural(capacity, 'block')}, {best.name} is best with"
            f" {percent(best.closed / ranking.input_tokens)}{gain}; the optimum has"
            f" {signed(left, 'share')} more."
        )


def audit_sentences(runs: Sequence[Audited]) -> Iterator[str]:
    """What each run found of what it could have found, and what it lost most to."""
    for run in runs:
        audit = run.audit
        whole = max(audit.prompt_tokens, 1)
        losses = {"policy": audit.policy, "pinning": audit.pinning, "capacity": audit.capacity}
        if not audit.ceiling:
            yield f"{run.label}: nothing in these prompts could have hit."
            continue
        listed = ", ".join(
            f"{100 * tokens / whole:.1f} to {name}" for name, tokens in losses.items()
        )
        yield (
            f"{run.label}: {percent(audit.hit / whole)} of the prompt tokens hit,"
            f" {percent(audit.hit / audit.ceiling)} of what a pool without limit would have found."
            f" Lost, in points: {listed}."
        )


def audit_rows(runs: Sequence[Audited]) -> Iterator[tuple[str, ...]]:
    """One row per part with tokens in any run, a column per run; the last row is the sum."""
    for name, (words, _) in PARTS.items():
        tokens = [run.audit._asdict()[name] for run in runs]
        if any(tokens):
            shares = (
                percent(part / max(run.audit.prompt_tokens, 1))
                for part, run in zip(tokens, runs, strict=True)
            )
            yield words, *shares
    yield "all prompt tokens", *(count(run.audit.prompt_tokens) for run in runs)


def _points(share: float) -> str:
    return f"{share * 100:+.1f}".replace("-", "−")


MOST_GROUPS = 12
LRU, OPTIMUM, CEILING = "run-1", "run-2", "muted"
WHO_COLOURS = dict(zip(WHO, ("run-1", "run-2", "run-3"), strict=True))


def build_curve(study: Study) -> str:
    """The page of `kvsim cache curve`."""
    hits, regret, distances = _figures(study)
    head = ("group of requests", "requests", "prompt tokens", "unlimited", "LRU")
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
    bars, used = [], set[str]()
    for run in runs:
        tokens = run.audit._asdict()
        used |= {name for name in PARTS if tokens[name]}
        bar = strip(
            (colour, tokens[name] / max(run.audit.prompt_tokens, 1), f"{words}: {n} tokens")
            for name, (words, colour) in PARTS.items()
            for n in [count(tokens[name])]
        )
        bars.append([run.label, bar, count(run.audit.prompt_tokens)])
    legend = key_of((colour, words) for name, (words, colour) in PARTS.items() if name in used)
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


def _drawn(
    study: Study, x: list[Any], tokens: Iterable[int | None], colour: str, name: str, **look: Any
) -> Trace:
    """A line of tokens by capacity, as shares of all that are looked up."""
    shares = compact(100 * study.share(each or 0) for each in tokens)
    return line(x, shares, colour, name, **look)


def _figures(study: Study) -> list[Figure]:
    """Hits, regret and reuse by capacity, in memory if the model is known; with the capacity asked
    about."""
    unit, per_block = "blocks", 1.0
    if study.asked.block_bytes is not None:
        unit, per_block = "GiB", study.asked.block_bytes / 2**30
    x = compact((point.blocks * per_block for point in study.points), digits=8)
    known = [value for value in x if value]
    across = titled(f"capacity ({unit})", showgrid=True, **log_ticks(min(known), max(known)))
    marked = [rule("x", study.chosen * per_block, "muted", dash="dot")] if study.chosen else []
    points, drawn = study.points, partial(_drawn, study, x)
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
