"""Keeps the books of a run: where the time of its steps and requests went, and its prompt tokens.

Everything is worked out after the run, from its rows and its log of transitions. The parts are
checked: if they do not add up, the simulator has an error (`AssertionError`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.records.packed import PackedColumns
from kvsim.results.ledger import KERNELS, PROMPT_PARTS, TIME_PARTS, kernels, standings, time
from kvsim.results.ledger.prompts import Rules, split_prompts
from kvsim.results.ledger.time import Slices, slices
from kvsim.workload.keys import Streams

Ints = NDArray[np.int64]

_SWAPPED = ("swap_out_blocks", "swap_in_blocks")


def account_times(
    cost: object,
    steps: Mapping[str, Ints],
    requests: Mapping[str, Any],
    transitions: Mapping[str, Ints],
    in_flight: int,
) -> tuple[Mapping[str, Ints], dict[str, Ints]]:
    """The columns of `steps` with `KERNELS` added, and `TIME_PARTS` of the requests.

    `steps`: the columns of a recorder, with those of a `DraftLog` if there was one; packed columns
    are widened in place. `transitions`: the columns of `kvsim.core.records.logs`.
    `in_flight`: how many steps the engine composes before the oldest is settled.
    """
    starts, ends = steps["start_ns"], steps["end_ns"]
    run_end_ns = max(
        int(column.max(initial=0))
        for column in (ends, requests["finish_ns"], requests["arrival_ns"])
    )
    instants = np.append(starts, run_end_ns)
    starts, until = instants[:-1], instants[1:]  # Views: a long run has many steps.
    why = time.reasons(steps["blocked"], steps["prefill_seqs"], in_flight)
    spells = standings.lay_out(requests, transitions, starts, ends, run_end_ns)
    del ends
    ended = standings.ends_ns(requests, run_end_ns)
    copies = time.own_copies(transitions, ended, starts)
    times = time.StepTimes(starts, until, why)
    rows = kernels.Rows(steps)
    sliced = slices(times, steps["end_ns"], run_end_ns) if rows.overlap and rows.number else None
    split = time.Split(spells, copies, sliced.times if sliced else times, len(ended))
    samples = kernels.samples_of(steps, requests, transitions)
    book = _Book(cost, rows, samples, times, split, sliced)
    if isinstance(steps, PackedColumns):
        steps.widen(KERNELS, book.pieces())
    else:
        found = np.concatenate([np.zeros((0, len(KERNELS)), dtype=np.int64), *book.pieces()])
        steps = {**steps, **{name: found[:, place] for place, name in enumerate(KERNELS)}}
    parts = split.columns()
    check_sums("a request", parts, TIME_PARTS, ended - requests["arrival_ns"])
    return steps, parts


def account_prompts(
    streams: Streams,
    requests: Mapping[str, Any],
    transitions: Mapping[str, Ints],
    block_size: int,
    withheld: int,
) -> dict[str, Ints]:
    """`PROMPT_PARTS` of the requests of a run with prefix caching.

    `streams`: of the requests, in order, and maybe more. `withheld`: tokens at the end of a prompt
    that are never looked up (`blocks.sharing.FullHit`).
    """
    parts = split_prompts(streams, requests, transitions, Rules(block_size, withheld))
    admitted = np.where(requests["first_scheduled_ns"] >= 0, requests["input_length"], 0)
    check_sums("a prompt", parts, PROMPT_PARTS, admitted)
    return parts


def check_sums(
    whose: str, columns: Mapping[str, Any], names: Sequence[str], wholes: NDArray[np.int64]
) -> None:
    """Assert that the columns `names` are nowhere negative and add up to `wholes`."""
    total = np.zeros(len(wholes), dtype=np.int64)
    for name in names:
        assert int(np.min(columns[name], initial=0)) >= 0, f"{name} of {whose} is negative"
        total += columns[name]
    wrong = np.flatnonzero(total != wholes)
    assert not len(wrong), f"parts of {whose} (number {wrong[0]}) do not add up"


class _Book:
    """Goes through the steps once, piece by piece, and splits the time of requests on the way."""

    def __init__(
        self,
        cost: object,
        rows: kernels.Rows,
        samples: Ints,
        times: time.StepTimes,
        split: time.Split,
        slices: Slices | None,
    ) -> None:
        """`slices`: of a pipeline, whose steps overlap."""
        self._cost, self._rows, self._samples = cost, rows, samples
        self._times, self._split, self._slices = times, split, slices
        kinds = len(time.TIMES) + len(time.DRAFT_TIMES) * rows.drafted
        self._total = np.zeros((1, kinds), dtype=np.int64)

    def pieces(self) -> Iterator[Ints]:
        """`KERNELS` of the steps, as arrays of some rows each."""
        for first, last in self._rows.pieces():
            yield self._piece(first, last)
        number = self._rows.number if self._slices is None else len(self._slices.step)
        self._split.add(number, self._total[:0], self._total)

    def _piece(self, first: int, last: int) -> Ints:
        rows = self._rows
        work = kernels.work_of(rows, first, last, self._samples)
        computing, drafter = kernels.computing_ns(rows, first, last)
        split = kernels.split_piece(self._cost, work, computing)
        assert (split >= 0).all(), "a step has a kernel of negative time"
        assert (split.sum(axis=1) == computing).all(), "the kernels of a step do not add up"
        split[:, KERNELS.index("drafter_ns")] = drafter
        host = split[:, KERNELS.index("host_ns")]
        alone = kernels.alone_ns(self._cost, work, computing, host)
        # In a step without decodes, the host time counts as interference as well.
        others = np.where(work.decode_seqs > 0, computing - host - alone, computing)
        columns = {name: rows.part(name, first, last) for name in (*rows.times, *_SWAPPED)}
        table = time.table(columns, computing - host, alone, others)
        if rows.drafted:
            verifying = alone - kernels.undrafted_ns(self._cost, work, alone)
            accepted = rows.part("accepted_tokens", first, last)
            table = time.with_drafts(table, drafter, verifying, work.draft_tokens, accepted)
        self._add(table, first, last)
        return split

    def _add(self, table: Ints, first: int, last: int) -> None:
        """Gives requests their part of the time of the steps `first .. last - 1`."""
        times = self._times
        if self._slices is not None:
            low, high = self._slices.within(first, last)
            table, times = self._slices.of(table, first, low, high), self._slices.times
            first, last = low, high
        table = time.with_waits(table, times, first, last)
        sums = np.concatenate((self._total, self._total + np.cumsum(table, axis=0)))
        self._split.add(first, table, sums[:-1])
        self._total = sums[-1:]
