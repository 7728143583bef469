"""States in words what caches make of a trace, and where a run's prompt tokens went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvsim.explain.cachelab.audit import Audit
from kvsim.explain.cachelab.curve import Group, Point, Study
from kvsim.explain.cachelab.ranking import Ranked, Ranking
from kvsim.explain.certainty import LEVEL
from kvsim.results.numerals import count, percent, plural, signed, size

PARTS = {
    "hit": "hit",
    "policy": "lost to the policy",
    "pinning": "lost to pinning",
    "capacity": "lost to capacity",
    "timing": "lost to timing",
    "granularity": "lost to block granularity",
    "other_salt": "another cache salt",
    "cold": "cold",
    "unreached": "not reached",
}
"""Part of an `Audit` → its name for people."""


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


def capacity_words(blocks: int, study: Study) -> str:
    """A capacity in the unit that fits: memory if the model is known, else blocks."""
    if study.block_bytes is None:
        return plural(blocks, "block")
    return size(blocks * study.block_bytes)


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
    return (
        f"At {capacity_words(point.blocks, study)}, LRU finds {percent(study.share(point.lru))} of"
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
            "" if study.block_bytes is None else size(point.blocks * study.block_bytes),
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
        yield (
            group.name,
            count(group.requests),
            count(group.input_tokens),
            percent(group.reuse.ceiling_tokens / tokens),
            percent(group.curve.tokens([capacity])[0] / tokens),
        )


GROUP_HEAD = ("requests", "prompt tokens", "unlimited", "LRU")


def policy_rows(ranking: Ranking) -> Iterator[tuple[str, ...]]:
    """One row per capacity and policy, and one for the optimum."""
    capacity = None
    for row in ranking.rows:
        if row.capacity != capacity:
            if capacity is not None:
                yield _optimum_row(ranking, capacity)
            capacity = row.capacity
        yield (
            count(row.capacity),
            row.name,
            "" if row.blocks is None else percent(row.blocks / ranking.input_tokens),
            percent(row.closed / ranking.input_tokens),
            gain_words(row),
        )
    if capacity is not None:
        yield _optimum_row(ranking, capacity)


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
    for name, words in PARTS.items():
        tokens = [run.audit._asdict()[name] for run in runs]
        if any(tokens):
            shares = (
                percent(part / max(run.audit.prompt_tokens, 1))
                for part, run in zip(tokens, runs, strict=True)
            )
            yield words, *shares
    yield "all prompt tokens", *(count(run.audit.prompt_tokens) for run in runs)


def _optimum_row(ranking: Ranking, capacity: int) -> tuple[str, ...]:
    share = percent(ranking.optimum[capacity] / ranking.input_tokens)
    return count(capacity), "optimum (ORACLE)", share, share, ""


def _points(share: float) -> str:
    return f"{share * 100:+.1f}".replace("-", "−")
