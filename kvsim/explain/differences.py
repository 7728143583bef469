"""How two runs differ: where they diverge, and what the difference of a latency consists of.

*Divergence* is the first step that their schedulers decided differently. Until that step both runs
saw the same and decided the same. So their state at that step (free blocks, the head of the queue,
the preempted requests) is the cause of everything that follows. Times may differ before, because
another device takes other times for the same decisions.

*Attribution* splits the difference of a latency into parts that add up to it exactly. Every
request's time is split into integer nanoseconds (`kvsim.results.ledger`), so sums over requests are
exact, and so are these:
* **mean**: the mean of each part over the requests that both runs completed;
* **p99**: numpy interpolates a percentile between two requests, so it is their weighted mean. A
  run's p99 is split like those two requests, with the same weights. The other run may have two
  other requests at these ranks.

The ledger does not split time at the first token. So the part of a TTFT from the first step on is
a single part.

It also estimates, from one exact replay of each, how the two differ on the traffic that the trace
samples (`compare_replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from kvsim.core.schema import BLOCKED
from kvsim.explain.certainty import (
    Comparison,
    Estimate,
    Figure,
    Pair,
    Values,
    judge_pairs,
    together,
)
from kvsim.results.ledger import PROMPT_LABELS, TIME_LABELS, TIME_PARTS
from kvsim.results.metrics import BLOCKED_BY, HEADLINES, LATENCIES, METRICS, value
from kvsim.results.numerals import count, plural, seconds
from kvsim.results.statistics import Floats, Ints, completed, defined, durations_ns, ints
from kvsim.results.timeline import Columns

DECISIONS = (
    "preempted_recompute",
    "preempted_swap",
    "swapped_in",
    "swap_out_blocks",
    "swap_in_blocks",
    "blocked",
    "prefill_seqs",
    "cached_tokens",
    "prefill_tokens",
    "decode_seqs",
    "batched_tokens",
    "context_tokens",
    "copied_blocks",
    "ignored",
    "finished",
)
"""Columns of a step that hold decisions of the scheduler, the most telling first."""

STATES = ("waiting", "running", "swapped", "used_blocks", "cached_blocks", "free_blocks")
"""Columns of a step that hold the state after composing it."""

Row = dict[str, int]


class Divergence(NamedTuple):
    """The first step that differs."""

    step: int
    """Number of the step, from 0, the same in both runs."""
    rows: tuple[Row, Row]
    """Its columns in both runs; empty for a run that had ended."""
    before: tuple[Row, Row]
    """Columns of the step before it; empty if it is the first."""
    columns: tuple[str, ...]
    """Columns of `DECISIONS` that differ; empty if only one run goes on."""
    slower_from: int | None
    """The first earlier step with another duration or another start, if there is one."""


def first_divergence(first: Columns, other: Columns) -> Divergence | None:
    """The first step that differs; None if all steps of both runs hold the same decisions."""
    lengths = len(first["start_ns"]), len(other["start_ns"])
    common = min(lengths)
    different = _differing(first, other, DECISIONS, common)
    step = int(different.argmax()) if different.any() else common
    if step == common and lengths[0] == lengths[1]:
        return None
    timed = _differing(first, other, ("start_ns", "end_ns"), step)
    rows = _row(first, step), _row(other, step)
    return Divergence(
        step,
        rows,
        (_row(first, step - 1), _row(other, step - 1)),
        tuple(name for name in DECISIONS if all(rows) and rows[0][name] != rows[1][name]),
        int(timed.argmax()) if timed.any() else None,
    )


def concerned_words(pairs: Pairs, names: tuple[str, str]) -> list[str]:
    """The first request completed by both runs that was scheduled at different times, if any, in a
    sentence."""
    times = pairs.values("first_scheduled_ns")
    (different,) = np.nonzero(times[0] != times[1])
    if not len(different):
        return []
    i = int(different[times.min(axis=0)[different].argmin()])
    instants = (
        f"after {ns / 1e9:,.3f} s in {name}" for ns, name in zip(times[:, i], names, strict=True)
    )
    return [
        f"Request {pairs.id(i)} is the first that was scheduled at another"
        f" time: {' and '.join(instants)}."
    ]


def divergence_words(
    found: Divergence | None, names: tuple[str, str], pools: tuple[Any, Any]
) -> list[str]:
    """Where the runs diverge and why, in sentences; `pools`: numbers of GPU blocks."""
    if found is None:
        return ["Both runs made the same decisions from the first step to the last."]
    first, other = names
    if not all(found.rows):
        longer = names[0 if found.rows[0] else 1]
        return [f"All {plural(found.step, 'step')} were the same; then {longer} went on alone."]
    instants = [seconds(row["start_ns"] / 1e9) for row in found.rows]
    when = instants[0] if instants[0] == instants[1] else f"{instants[0]} and {instants[1]}"
    until = f"The first {plural(found.step, 'step')} made the same decisions. " * bool(found.step)
    did = [_decided(row, found.columns) for row in found.rows]
    sentences = [
        f"{until}At step {count(found.step)} (after {when}) {first} {did[0]}; {other} {did[1]}.",
        " ".join(_holdings(n, r, p) for n, r, p in zip(names, found.rows, pools, strict=True)),
    ]
    if found.slower_from is not None:
        sentences.append(
            f"Times differ from step {count(found.slower_from)} on, before any decision did."
        )
    return sentences


def _differing(
    first: Columns, other: Columns, names: tuple[str, ...], length: int
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    different = np.zeros(length, dtype=bool)
    for name in names:
        different |= np.asarray(first[name])[:length] != np.asarray(other[name])[:length]
    return different


def _row(steps: Columns, step: int) -> Row:
    if not 0 <= step < len(steps["start_ns"]):
        return {}
    return {name: int(column[step]) for name, column in steps.items()}


def _decided(row: Row, columns: tuple[str, ...]) -> str:
    """What a step did, as far as it differs from the other run's step."""
    words = [say(row) for named, say in _DONE.items() if not set(named).isdisjoint(columns)]
    name = columns[0]
    *others, last = words or [f"had {count(row[name])} {name.replace('_', ' ')}"]
    return f"{', '.join(others)} and {last}" if others else last


def _preempted(row: Row) -> str:
    number = row["preempted_recompute"] + row["preempted_swap"]
    mode = "swap" if row["preempted_swap"] else "recompute"
    return f"preempted {plural(number, 'request')} by {mode}" if number else "preempted none"


def _refused(row: Row) -> str:
    reason = BLOCKED_BY.get(BLOCKED[row["blocked"]])
    return f"refused the head of the queue ({reason})" if reason else "refused no request"


def _computed(row: Row) -> str:
    tokens, requests = plural(row["prefill_tokens"], "prompt token"), row["prefill_seqs"]
    return (
        f"computed {tokens} of {plural(requests, 'request')}" if requests else "computed no prompt"
    )


_DONE: dict[tuple[str, ...], Callable[[Row], str]] = {
    ("preempted_recompute", "preempted_swap"): _preempted,
    ("swapped_in",): lambda row: f"swapped {plural(row['swapped_in'], 'request')} in",
    ("blocked",): _refused,
    ("cached_tokens",): (
        lambda row: f"found {plural(row['cached_tokens'], 'prompt token')} in the cache"
    ),
    ("prefill_seqs", "prefill_tokens"): _computed,
    ("decode_seqs",): lambda row: f"decoded {plural(row['decode_seqs'], 'sequence')}",
}
"""Columns → what a step did, if it is one of them that differs."""


def _holdings(name: str, row: Row, pool: Any) -> str:
    reusable = f", {count(row['cached_blocks'])} reusable" if row["cached_blocks"] else ""
    of = f" of {count(pool)}" if pool else ""
    return (
        f"{name} then had {count(row['free_blocks'])}{of} blocks free{reusable},"
        f" {count(row['running'])} requests running and {count(row['waiting'])} waiting."
    )


class Pairs(NamedTuple):
    """The requests that both runs completed, in the order of the trace."""

    runs: tuple[Columns, Columns]
    """Columns of all requests of the first run, and of the other one."""
    rows: tuple[Ints, Ints]
    """The places of the pairs in them."""
    only_first: int
    """Number of requests that the first run alone completed."""
    only_other: int
    durations_ns: dict[str, Floats]
    """Durations of the pairs, as `values`, with the keys of `durations_ns`."""

    @property
    def number(self) -> int:
        """How many pairs there are."""
        return len(self.rows[0])

    @property
    def same_arrivals(self) -> bool:
        """Whether both engines received every pair at the same time."""
        return bool(np.array_equal(*self.values("arrival_ns")))

    def id(self, i: int) -> str:
        """The id of a pair."""
        return str(self.runs[0]["id"][self.rows[0][i]])

    def values(self, column: str) -> Ints:
        """A column of the pairs, of shape (2, pairs): the first run, then the other one."""
        both = zip(self.runs, self.rows, strict=True)
        return np.array([ints(requests[column])[rows] for requests, rows in both])

    def differences_ns(self, kind: str) -> Floats:
        """Other minus first, one per pair for which both are defined."""
        before, after = self.durations_ns[kind]
        return defined(after - before)


def pair(first: Columns, other: Columns) -> Pairs | None:
    """Pairs by position in the trace; None if the runs had different requests, or one had more."""
    mine, theirs = (np.argsort(ints(requests["index"])) for requests in (first, other))
    for name in ("index", "id", "input_length", "output_length"):
        if not np.array_equal(np.asarray(first[name])[mine], np.asarray(other[name])[theirs]):
            return None
    done, also = completed(first)[mine], completed(other)[theirs]
    both = done & also
    mine, theirs, after = mine[both], theirs[both], durations_ns(other)
    return Pairs(
        (first, other),
        (mine, theirs),
        only_first=int((done & ~also).sum()),
        only_other=int((also & ~done).sum()),
        durations_ns={
            kind: np.array([before[mine], after[kind][theirs]])
            for kind, before in durations_ns(first).items()
        },
    )


LABELS = {**TIME_LABELS, "first_step_ns": "first step to first token"}
"""Part → label."""

_WAITING = tuple(part for part in TIME_PARTS if part.startswith("waiting_"))
_SCALE = 100


class Place(NamedTuple):
    """A request that a percentile is interpolated from."""

    id: str
    weight: Fraction


class Waterfall(NamedTuple):
    """The difference of one figure between two runs, part by part."""

    metric: str
    """`ttft` or `e2el`."""
    statistic: str
    """`mean` or `p99`."""
    parts: dict[str, tuple[Fraction, Fraction]]
    """Part → nanoseconds in the first and in the other run."""
    places: tuple[tuple[Place, ...], tuple[Place, ...]] = ((), ())
    """The requests that a percentile is interpolated from, in each run; empty for a mean."""

    @property
    def title(self) -> str:
        """`Mean E2EL`, `TTFT p99`."""
        label = LATENCIES[self.metric]
        return f"Mean {label}" if self.statistic == "mean" else f"{label} {self.statistic}"

    @property
    def totals(self) -> tuple[Fraction, Fraction]:
        """The figure in both runs, in nanoseconds: the sum of its parts."""
        first = sum((a for a, _ in self.parts.values()), Fraction())
        return first, sum((b for _, b in self.parts.values()), Fraction())

    @property
    def difference(self) -> Fraction:
        """Other minus first, in nanoseconds."""
        first, other = self.totals
        return other - first

    def changes(self) -> list[tuple[str, Fraction]]:
        """(part, other minus first) of every part that changed, in the order of the ledger."""
        return [(part, b - a) for part, (a, b) in self.parts.items() if a != b]


def waterfalls(pairs: Pairs) -> list[Waterfall]:
    """Mean and p99 of TTFT and E2EL, over the requests that both runs completed (at least one)."""
    found = []
    for metric in ("ttft", "e2el"):
        parts = _parts(pairs, metric)
        means = {part: (_mean(first), _mean(other)) for part, (first, other) in parts.items()}
        found.append(Waterfall(metric, "mean", means))
        one, two = map(_places, np.array(list(parts.values())).sum(axis=0))
        cuts = {part: (_at(first, one), _at(other, two)) for part, (first, other) in parts.items()}
        named = _named(pairs, one), _named(pairs, two)
        found.append(Waterfall(metric, "p99", cuts, named))
    return found


def _parts(pairs: Pairs, metric: str) -> dict[str, Ints]:
    """The parts of the E2EL of both runs, as `Pairs.values`; for TTFT, the waits and the rest."""
    names = _WAITING if metric == "ttft" else TIME_PARTS
    parts = {part: pairs.values(part) for part in names}
    if metric == "ttft":
        ttft = pairs.values("first_token_ns") - pairs.values("arrival_ns")
        parts["first_step_ns"] = ttft - sum(parts.values())
    return parts


def _mean(values: Ints) -> Fraction:
    return Fraction(int(values.sum()), len(values))


def _places(values: Ints) -> list[tuple[int, Fraction]]:
    """The requests that the p99 is interpolated from, and their weights; equals in trace order."""
    order = np.argsort(values, kind="stable")
    below, rest = divmod((len(values) - 1) * 99, _SCALE)
    places = [(int(order[below]), Fraction(_SCALE - rest, _SCALE))]
    if rest:
        places.append((int(order[below + 1]), Fraction(rest, _SCALE)))
    return places


def _named(pairs: Pairs, places: list[tuple[int, Fraction]]) -> tuple[Place, ...]:
    return tuple(Place(pairs.id(i), weight) for i, weight in places)


def _at(values: Ints, places: list[tuple[int, Fraction]]) -> Fraction:
    return sum((weight * int(values[i]) for i, weight in places), Fraction())


LISTED = 15

BLOCKS = {
    **{part: f"prompt: {label}" for part, label in PROMPT_LABELS.items()},
    "recached_tokens": "found again after a preemption",
    "recomputed_tokens": "computed again after a preemption",
    "swapped_out_blocks": "swapped out",
    "swapped_in_blocks": "swapped in",
}
"""Column of requests → what happened to these tokens or blocks."""


class Carrier(NamedTuple):
    """One request and its change."""

    id: str
    e2el_ns: tuple[int, int]
    part: str
    """The part of its time that changed most."""
    part_ns: int
    """By how much: other minus first."""
    preemptions: tuple[int, int]


class Share(NamedTuple):
    """How a difference is spread over requests."""

    half: int
    """Number of requests, from the most changed down, that carry half of all change."""
    changed: int
    """Number of requests that changed at all."""
    total: int


class Blocks(NamedTuple):
    """Blocks with one fate, in both runs, and the request in which their number changed most."""

    column: str
    blocks: tuple[float, float]
    id: str
    change: float


def carriers(pairs: Pairs) -> tuple[Share, list[Carrier]]:
    """How the change of E2EL is spread, and the requests that changed most."""
    times = pairs.values("finish_ns") - pairs.values("arrival_ns")
    changes = times[1] - times[0]
    order = np.argsort(-np.abs(changes), kind="stable")
    sizes = np.abs(changes)[order]
    half = int(np.searchsorted(np.cumsum(sizes) * 2, sizes.sum())) + 1 if sizes.any() else 0
    parts = np.array([pairs.values(part) for part in TIME_PARTS])
    preemptions = pairs.values("num_preemptions")
    listed = []
    for i in (i for i in order[:LISTED].tolist() if changes[i]):
        moved = parts[:, 1, i] - parts[:, 0, i]
        most = int(np.abs(moved).argmax())
        (before, after), (lost, also) = times[:, i].tolist(), preemptions[:, i].tolist()
        part = TIME_PARTS[most], int(moved[most])
        listed.append(Carrier(pairs.id(i), (before, after), *part, (lost, also)))
    return Share(half, int((changes != 0).sum()), len(changes)), listed


def blocks(pairs: Pairs, block_size: int) -> list[Blocks]:
    """Blocks by fate, where their number changed; tokens count as blocks of the first run."""
    found = []
    for column in BLOCKS:
        if not all(column in requests for requests in pairs.runs):
            continue
        before, after = pairs.values(column) / (1 if column.endswith("_blocks") else block_size)
        changes = after - before
        if changes.any():
            most = int(np.abs(changes).argmax())
            sums = float(before.sum()), float(after.sum())
            found.append(Blocks(column, sums, pairs.id(most), float(changes[most])))
    return found


Runs = Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]

_NS_PER_MS = 1e6
_LATENCIES = ("ttft", "e2el", "queue", "tpot")
_PERCENTILES = (50, 90, 99)
_MEANS_ONLY = ("prefill", "decode", "client_queue")
_SUMS = {
    "num_preemptions": "num_preemptions",
    "recomputed_tokens": "recomputed_tokens",
    "swapped_out_blocks": "swapped_out_blocks",
    "swapped_in_blocks": "swapped_in_blocks",
    "prefix_cache_hit_tokens": "num_cached_tokens",
}
"""Key of a summary → column of requests that it sums up."""


def compare_replay(runs: Runs, *, level: float, margin: float) -> Comparison:
    """Verdicts on the figures that are computed from requests; all other figures have none.

    Each run is (name, summary, requests). Requests that both runs of a pair completed are paired.
    """
    names = tuple(name for name, *_ in runs)
    values = values_of([[summary for _, summary, _ in runs]])
    estimates: dict[Pair, Estimate] = {}
    for first, other in combinations(range(len(runs)), 2):
        pairs = pair(runs[first][2], runs[other][2])
        if pairs is not None and pairs.number > 1:
            found = _estimates(pairs)
            estimates |= {
                Pair(key, first, other): estimate
                for key, estimate in found.items()
                if key in values and (first == 0 or key in HEADLINES)
            }
    verdicts = judge_pairs(estimates, values, HEADLINES, level=level, margin=margin)
    return Comparison(names, "stretches", (), (), 0, level, margin, values, verdicts)


def values_of(summaries: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, tuple[Values, ...]]:
    """Every figure that is not 0 or undefined everywhere, by configuration, then by seed.

    `summaries` holds, for each seed, the summary of every configuration.
    """
    found = {}
    for metric in METRICS:
        rows = tuple(
            tuple(value(each, metric.key) for each in seeds)
            for seeds in zip(*summaries, strict=True)
        )
        if any(any(row) for row in rows):
            found[metric.key] = rows
    return found


def _estimates(pairs: Pairs) -> dict[str, Estimate]:
    everyone = {}
    for key, column in _SUMS.items():
        before, after = pairs.values(column).astype(float)
        everyone[key] = Figure(before, after, partial(np.sum, axis=-1))
    for kind in (*_LATENCIES[:-1], *_MEANS_ONLY):
        everyone |= _durations(pairs, kind)
    # A TPOT is defined only for outputs of two tokens or more.
    return {**together(everyone), **together(_durations(pairs, "tpot"))}


def _durations(pairs: Pairs, kind: str) -> dict[str, Figure]:
    before, after = pairs.durations_ns[kind] / _NS_PER_MS
    there = ~(np.isnan(before) | np.isnan(after))
    before, after = before[there], after[there]
    if len(before) < 2:
        return {}
    figures = {f"mean_{kind}_ms": Figure(before, after, lambda v: v.mean(axis=-1))}
    if kind in _LATENCIES:
        for p in _PERCENTILES:
            statistic = partial(np.percentile, q=p, axis=-1)
            figures[f"p{p}_{kind}_ms"] = Figure(before, after, statistic)
    return figures
