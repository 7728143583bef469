"""Explains why one run differs from another: in words, by parts, by request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvsim.explain import matters
from kvsim.explain.differences import (
    BLOCKS,
    LABELS,
    Blocks,
    Carrier,
    Divergence,
    Pairs,
    Share,
    Waterfall,
    blocks,
    carriers,
    concerned_words,
    divergence_words,
    first_concerned,
    first_divergence,
    has_ledger,
    pair,
    waterfalls,
)
from kvsim.report.compare import NO_DIFFERENCE, config_differences
from kvsim.results.metrics import LATENCIES
from kvsim.results.numerals import count, plural, signed, signed_percent
from kvsim.results.plain import plain

Run = tuple[str, Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]
"""Name, summary, requests, steps."""

_MANY_PREEMPTIONS, _MANY_HITS = 0.1, 0.05
"""Relative changes from which preemptions, or prompt tokens found in the cache, count as the
reason."""
_NAMED = 3
"""Parts that a sentence names; it sums the others up where they matter."""


class Explanation(NamedTuple):
    """How the other run differs from the first, and why."""

    names: tuple[str, str]
    pairs: Pairs | None
    """None if the runs had different requests."""
    headline: list[str]
    settings: list[tuple[str, tuple[str, ...]]]
    divergence: Divergence | None
    divergence_words: list[str]
    waterfalls: list[Waterfall]
    """Empty if no request was completed by both runs, as are all fields below."""
    share: Share | None = None
    carriers: tuple[Carrier, ...] = ()
    blocks: tuple[Blocks, ...] = ()
    ledger: bool = False
    """Whether the parts are those of the ledger; else they are the phases of runs without one."""

    @property
    def same(self) -> bool:
        """Whether every request took the same time and every decision was the same."""
        changed = any(waterfall.changes() for waterfall in self.waterfalls)
        return self.pairs is not None and self.divergence is None and not changed


def explain(first: Run, other: Run) -> Explanation:
    """Compare the second run with the first."""
    names = first[0], other[0]
    pools = (first[1]["meta"].get("num_gpu_blocks"), other[1]["meta"].get("num_gpu_blocks"))
    explanation = explain_requests(first[:3], other[:3])
    if not explanation.waterfalls:
        return explanation
    pairs, found = explanation.pairs, first_divergence(first[3], other[3])
    assert pairs is not None, "waterfalls are of pairs"
    words = [
        *divergence_words(found, names, pools),
        *concerned_words(first_concerned(pairs, first[2], other[2]), names),
    ]
    return explanation._replace(divergence=found, divergence_words=words)


def explain_requests(
    first: tuple[str, Mapping[str, Any], Mapping[str, Any]],
    other: tuple[str, Mapping[str, Any], Mapping[str, Any]],
) -> Explanation:
    """What names, figures and requests alone explain: all but the first divergent decision."""
    names = first[0], other[0]
    summaries = [(first[0], first[1]), (other[0], other[1])]
    pairs = pair(first[2], other[2])
    settings = config_differences(summaries)
    if pairs is None or not pairs.number:
        what = "had different requests" if pairs is None else "completed no request both"
        text = f"{names[1]} and {names[0]} {what}, so there is nothing to compare."
        return Explanation(names, pairs, [text], settings, None, [], [])
    falls = waterfalls(pairs, first[2], other[2])
    share, listed = carriers(pairs, first[2], other[2])
    block_size = int(first[1]["meta"].get("block_size") or 1)
    return Explanation(
        names,
        pairs,
        headline_words(names, first[1], other[1], falls),
        settings,
        None,
        [],
        falls,
        share,
        tuple(listed),
        tuple(blocks(pairs, first[2], other[2], block_size)),
        has_ledger(first[2]) and has_ledger(other[2]),
    )


def headline_words(
    names: tuple[str, str],
    first: Mapping[str, Any],
    other: Mapping[str, Any],
    falls: list[Waterfall],
) -> list[str]:
    """`B avoided 412 preemptions: −38 % recomputed tokens, −1.9 s p99 TTFT.`

    Preemptions or cache hits are named as the reason only if their number changed much and
    latencies moved with them. Otherwise the part of time that changed most is named.
    """
    tails = [fall for fall in falls if fall.statistic == "p99"]
    if not any(fall.changes() for fall in falls):
        return [f"Every request took the same time in {names[1]} as in {names[0]}."]
    results = ", ".join(map(_result, tails))
    moved = sum(float(fall.difference) for fall in tails if _matters(fall))
    preemptions = other["num_preemptions"] - first["num_preemptions"]
    hits = other["prefix_cache_hit_tokens"] - first["prefix_cache_hit_tokens"]
    reasons = []
    if preemptions or _by_swap(other) != _by_swap(first):
        most = max(run["num_preemptions"] for run in (first, other))
        weighty = preemptions * moved > 0 and abs(preemptions) >= _MANY_PREEMPTIONS * most
        reasons.append((_preemption_words(names[1], first, other), weighty))
    if hits:
        tokens = plural(abs(hits), f"{'more' if hits > 0 else 'fewer'} prompt token")
        asked = first["prefix_cache_query_tokens"]
        weighty = hits * moved < 0 and abs(hits) >= _MANY_HITS * asked
        reasons.append((f"{names[1]} found {tokens} in the cache", weighty))
    reasons.sort(key=lambda reason: not reason[1])
    facts = [words for words, _ in reasons]
    if reasons and reasons[0][1]:
        sentences = [_lead(facts.pop(0), results)]
    else:
        part, _ = max((c for f in falls for c in f.changes()), key=lambda c: abs(c[1]))
        sentences = [f"{names[1]}: {results}. What changed most: {LABELS[part]}."]
    sentences += [f"{fact}." for fact in facts]
    return [*sentences, *(fall_words(fall) for fall in falls if fall.changes())]


def _matters(fall: Waterfall) -> bool:
    return matters(float(fall.difference), float(fall.totals[0]))


def _result(fall: Waterfall) -> str:
    """`−1.9 s p99 TTFT`, or `no difference in p99 TTFT`."""
    change = _seconds(fall.difference) if _matters(fall) else f"{NO_DIFFERENCE} in"
    return f"{change} {fall.statistic} {LATENCIES[fall.metric]}"


def fall_words(fall: Waterfall) -> str:
    """`Mean E2EL −14.4 s: −12.1 s waiting for free blocks; −0.1 s other parts.`"""
    changes = sorted(fall.changes(), key=lambda change: -abs(change[1]))
    named = [f"{_seconds(ns)} {LABELS[part]}" for part, ns in changes[:_NAMED]]
    rest = sum((ns for _, ns in changes[_NAMED:]), changes[0][1] * 0)
    if matters(float(rest), float(fall.difference)):
        named.append(f"{_seconds(rest)} other parts")
    return f"{title_of(fall)} {_seconds(fall.difference)}: {'; '.join(named)}."


def title_of(fall: Waterfall) -> str:
    """`Mean E2EL`, `TTFT p99`."""
    label = LATENCIES[fall.metric]
    return f"Mean {label}" if fall.statistic == "mean" else f"{label} {fall.statistic}"


def explanation_record(explanation: Explanation) -> dict[str, Any]:
    """Everything as plain values; nanoseconds as exact fractions in text and as numbers."""
    divergence = explanation.divergence
    return dict(
        plain(
            {
                "first": explanation.names[0],
                "other": explanation.names[1],
                "same": explanation.same,
                "words": explanation.headline,
                "settings": [
                    {"key": key, "first": texts[0], "other": texts[1]}
                    for key, texts in explanation.settings
                ],
                "pairs": explanation.pairs.number if explanation.pairs else 0,
                "ledger": explanation.ledger,
                "first_divergence": None if divergence is None else divergence._asdict(),
                "first_divergence_words": explanation.divergence_words,
                "waterfalls": [_fall_record(fall) for fall in explanation.waterfalls],
                "share": explanation.share._asdict() if explanation.share else None,
                "requests": [carrier._asdict() for carrier in explanation.carriers],
                "blocks": [
                    {**each._asdict(), "label": BLOCKS[each.column]} for each in explanation.blocks
                ],
            }
        )
    )


def _fall_record(fall: Waterfall) -> dict[str, Any]:
    first, other = fall.totals
    return {
        "metric": fall.metric,
        "statistic": fall.statistic,
        "first_ns": float(first),
        "other_ns": float(other),
        "difference_ns": float(fall.difference),
        "difference_ns_exact": str(fall.difference),
        "parts": {
            part: {"first_ns": str(a), "other_ns": str(b), "difference_ns": str(b - a)}
            for part, (a, b) in fall.parts.items()
        },
        "made_of": [
            [{"request": place.id, "weight": str(place.weight)} for place in places]
            for places in fall.places
        ],
    }


def _preemption_words(name: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """`B avoided 412 preemptions (−38 % recomputed tokens)`; both modes if their mix changed."""
    number = other["num_preemptions"] - first["num_preemptions"]
    degree = "" if number < 0 else "more "
    what = plural(abs(number), f"{degree}preemption")
    before, after = first["recomputed_tokens"], other["recomputed_tokens"]
    detail = ""
    if before and after != before:
        detail = f" ({signed_percent((after - before) / before)} recomputed tokens)"
    if _by_swap(first) != _by_swap(other) and first["num_preemptions"] and other["num_preemptions"]:
        return f"{name} made {_modes(other)} instead of {_modes(first)}{detail}"
    return f"{name} {'avoided' if number < 0 else 'made'} {what}{detail}"


def _by_swap(summary: Mapping[str, Any]) -> int:
    return int(summary["num_preemptions_by_mode"]["swap"])


def _modes(summary: Mapping[str, Any]) -> str:
    """`304 preemptions by recompute and 201 by swap`."""
    modes = [(mode, n) for mode, n in summary["num_preemptions_by_mode"].items() if n]
    numbers = [plural(modes[0][1], "preemption"), *(count(n) for _, n in modes[1:])]
    named = zip(numbers, modes, strict=True)
    return " and ".join(f"{number} by {mode}" for number, (mode, _) in named)


def _lead(fact: str, results: str) -> str:
    """`B avoided 412 preemptions: −38 % recomputed tokens, −1.9 s p99 TTFT.`"""
    what, parenthesis, detail = fact.rstrip(")").partition(" (")
    return f"{what}: {f'{detail}, ' if parenthesis else ''}{results}."


def _seconds(ns: Any) -> str:
    return signed(float(ns) / 1e9, "s")
