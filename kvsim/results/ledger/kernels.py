"""Splits the time of every step by kernel, after the run, from its row.

The cost model explains what each term of a step takes (`kvsim.cost.explain`). The terms are cut to
whole nanoseconds and filled in one after the other, as far as the step's time lasts. What is left
is prompt attention in a step with prompt tokens. In all other steps it is host time, because the
host waits where a kernel launch floor held the step up, or decode attention, where the cost model
says so: it prices uneven batches. So the parts always add up to the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.records.logs import RESUMED
from kvsim.core.records.packed import part_of, rows_in
from kvsim.core.rows import PIECE_STEPS
from kvsim.core.schema import STAGE_COLUMNS
from kvsim.cost.explain import Explains, Work
from kvsim.results.ledger import KERNELS

Ints = NDArray[np.int64]

TIME_COLUMNS = ("transfer_ns", "link_wait_ns", "flush_ns", "rank_wait_ns", *STAGE_COLUMNS)
"""Columns of what a step takes beside kernels; only pipelines have the last two."""

_TERMS = ("host", "dense", "attention_decode", "head", "copies")
_PROMPTS, _UNEXPLAINED = map(KERNELS.index, ("attention_prefill_ns", "unexplained_ns"))
_PLACES = [KERNELS.index(f"{name}_ns") for name in _TERMS]


class Rows:
    """Columns of steps, read in pieces, so that a long run is never in memory as a whole."""

    def __init__(self, steps: Mapping[str, Any]) -> None:
        self._steps = steps
        self.number = rows_in(steps)
        self.drafted = "draft_tokens" in steps
        """Whether there is speculative decoding."""
        self.overlap = STAGE_COLUMNS[0] in steps
        """Whether they are those of a pipeline, and may overlap."""
        self.times = tuple(name for name in TIME_COLUMNS if name in steps)
        """Columns of what a step takes beside kernels."""

    def pieces(self) -> list[tuple[int, int]]:
        """(first, last + 1) of each piece."""
        return [
            (first, min(first + PIECE_STEPS, self.number))
            for first in range(0, self.number, PIECE_STEPS)
        ]

    def part(self, name: str, first: int, last: int) -> Ints:
        """Rows `first .. last - 1` of a column."""
        return part_of(self._steps, name, first, last)

    def drafter_ns(self, first: int, last: int) -> Ints | int:
        """How long the drafter made the rows `first .. last - 1`."""
        return self.part("drafter_ns", first, last) if self.drafted else 0


def samples_of(
    steps: Mapping[str, Any], requests: Mapping[str, Any], transitions: Mapping[str, Ints]
) -> Ints:
    """Rows of logits that each step computed: one per decoding sequence, draft and completed
    prompt.

    vLLM V1 runs the last token of a prompt as a decode where a chunk leaves it alone. Such a step
    may be counted one row too many if it has chunks of other requests.
    """
    starts, ends = steps["start_ns"], steps["end_ns"]
    samples: Ints = steps["decode_seqs"].copy()
    first = requests["first_token_ns"]
    rows = np.searchsorted(ends, first[first >= 0], side="left")
    resumed = transitions["kind"] == RESUMED
    again = np.searchsorted(starts, transitions["time_ns"][resumed], side="right") - 1
    request = transitions["request"][resumed]
    known = (
        (again >= 0) & (first[request] != ends[again]) if len(again) else np.zeros(0, dtype=bool)
    )
    for places in (rows, again[known]):
        np.add.at(samples, places[places < len(samples)], 1)
    most: Ints = np.minimum(samples, steps["decode_seqs"] + steps["prefill_seqs"])
    return most + steps["draft_tokens"] if "draft_tokens" in steps else most


def work_of(rows: Rows, first: int, last: int, samples: Ints) -> Work:
    """The counts of the rows `first .. last - 1`."""
    names = ("prefill_tokens", "prefill_seqs", "decode_seqs", "context_tokens")
    prefill_tokens, prefill_seqs, decode_seqs, context_tokens = (
        rows.part(name, first, last) for name in names
    )
    copied = rows.part("copied_blocks", first, last)
    drafts = rows.part("draft_tokens", first, last) if rows.drafted else 0
    counts = prefill_tokens, prefill_seqs, decode_seqs, context_tokens
    return Work(*counts, samples[first:last], copied, drafts)


def computing_ns(rows: Rows, first: int, last: int) -> tuple[Ints, Ints | int]:
    """The time of steps without `TIME_COLUMNS` and without the drafter; and the time of the
    drafter."""
    computing = rows.part("end_ns", first, last) - rows.part("start_ns", first, last)
    for name in rows.times:
        computing = computing - rows.part(name, first, last)
    drafter = rows.drafter_ns(first, last)
    return computing - drafter, drafter


def split_piece(cost: object, work: Work, whole_ns: Ints) -> Ints:
    """An array of shape (steps, `KERNELS`) whose rows add up to `whole_ns`."""
    parts = np.zeros((len(whole_ns), len(KERNELS)), dtype=np.int64)
    if not isinstance(cost, Explains):
        parts[:, _UNEXPLAINED] = whole_ns
        return parts
    terms = cost.explain(work)
    left = whole_ns.copy()
    for name, place in zip(_TERMS, _PLACES, strict=True):
        term = np.asarray(terms.get(name, 0.0), dtype=np.float64)
        parts[:, place] = np.clip(np.floor(term).astype(np.int64), 0, left)
        left -= parts[:, place]
    prompts = work.prefill_tokens > 0
    parts[:, _PROMPTS] += np.where(prompts, left, 0)
    parts[:, _PLACES[_TERMS.index(terms.get("rest", "host"))]] += np.where(prompts, 0, left)
    return parts


def alone_ns(cost: object, work: Work, computing: Ints, host: Ints) -> Ints:
    """What the decodes of each step would take without its prompts, host time excluded.

    A cost model without an explanation gives the decodes their share of the tokens.
    """
    kernels = computing - host
    mixed = (work.decode_seqs > 0) & ((work.prefill_tokens > 0) | (work.prefill_seqs > 0))
    alone = np.where(work.decode_seqs > 0, kernels, 0)
    if not mixed.any():
        return alone
    if isinstance(cost, Explains):
        share = _price_ns(cost, work.at(mixed).without_prompts())
    else:
        share = _part_ns(kernels[mixed], work.decode_tokens[mixed], work.tokens[mixed])
    alone[mixed] = np.clip(share, 0, kernels[mixed])
    return alone


def undrafted_ns(cost: object, work: Work, alone: Ints) -> Ints:
    """What the decodes of each step would take of the time `alone` without drafts."""
    drafted, own = np.asarray(work.draft_tokens) > 0, alone.copy()
    if not drafted.any():
        return own
    some = work.at(drafted).without_prompts()
    if isinstance(cost, Explains):
        share = _price_ns(cost, some._replace(samples=some.decode_seqs, draft_tokens=0))
    else:
        share = _part_ns(alone[drafted], some.decode_seqs, some.tokens)
    own[drafted] = np.clip(share, 0, alone[drafted])
    return own


def _price_ns(cost: Explains, work: Work) -> Ints:
    """The kernels of steps as the cost model explains them, host time excluded."""
    terms = cost.explain(work)
    price = sum(np.floor(terms[name]) for name in terms if name not in ("host", "rest"))
    return np.asarray(price, dtype=np.int64)


def _part_ns(whole: Ints, part: Ints, of: Ints) -> Ints:
    """`whole * part // of`, without sums beyond 64 bits."""
    share: Ints = whole // of * part + whole % of * part // of
    return share
