"""Keeps the books of a run: where the time of its steps and requests went, and its prompt tokens.

Everything is worked out after the run, from its rows and its log of transitions. The parts are
checked: if they do not add up, the simulator has an error (`AssertionError`).

*Kernels.* The cost model explains what each term of a step takes (`kvsim.cost.explain`). The terms
are cut to whole nanoseconds and filled in one after the other, as far as the step's time lasts.
What is left is prompt attention in a step with prompt tokens. In all other steps it is host time,
because the host waits where a kernel launch floor held the step up, or decode attention, where the
cost model says so: it prices uneven batches. So the parts always add up to the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.core.records import RESUMED, PackedColumns, part_of, rows_in
from kvsim.core.rows import PIECE_ROWS
from kvsim.core.schema import STAGE_COLUMNS
from kvsim.cost.explain import Explains, Work
from kvsim.results.ledger import KERNELS, TIME_PARTS, standings, time
from kvsim.results.statistics import Ints

TIME_COLUMNS = ("transfer_ns", "link_wait_ns", "flush_ns", "rank_wait_ns", *STAGE_COLUMNS)
"""Columns of what a step takes beside kernels; only pipelines have the last two."""
_COUNTS = ("prefill_tokens", "prefill_seqs", "decode_seqs", "context_tokens", "copied_blocks")
_READ = ("start_ns", "end_ns", *_COUNTS, "swap_out_blocks", "swap_in_blocks", *TIME_COLUMNS)
_OF_DRAFTS = ("draft_tokens", "accepted_tokens", "drafter_ns")
"""Columns that are read besides where there is speculative decoding."""


def account_times(
    cost: object,
    steps: Mapping[str, Ints],
    requests: Mapping[str, Any],
    transitions: Mapping[str, Ints],
    in_flight: int,
) -> tuple[Mapping[str, Ints], dict[str, Ints]]:
    """The columns of `steps` with `KERNELS` added, and `TIME_PARTS` of the requests.

    `steps`: the columns of a recorder, with those of a `DraftLog` if there was one; packed columns
    are widened in place. `transitions`: the columns of `kvsim.core.records`.
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
    prompts = completions(starts, ends, requests, transitions)
    spells = standings.lay_out(requests, transitions, starts, ends, run_end_ns)
    del ends
    ended = standings.ends_ns(requests, run_end_ns)
    copies = time.own_copies(transitions, ended, starts)
    times, sliced = time.StepTimes(starts, until, why), None
    # Only the steps of a pipeline overlap.
    if STAGE_COLUMNS[0] in steps and len(starts):
        sliced = time.slices(times, steps["end_ns"], run_end_ns)
    split = time.Split(spells, copies, times, sliced, len(ended))
    pieces = _pieces(cost, steps, prompts, split)
    if isinstance(steps, PackedColumns):
        steps.widen(KERNELS, pieces)
    else:
        found = np.concatenate([np.zeros((0, len(KERNELS)), dtype=np.int64), *pieces])
        steps = {**steps, **{name: found[:, place] for place, name in enumerate(KERNELS)}}
    parts = split.columns()
    check_sums("a request", parts, TIME_PARTS, ended - requests["arrival_ns"])
    return steps, parts


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


_TERMS = ("host", "dense", "attention_decode", "head", "copies")
_HOST, _DRAFTER, _PROMPTS, _UNEXPLAINED = map(
    KERNELS.index, ("host_ns", "drafter_ns", "attention_prefill_ns", "unexplained_ns")
)
_PLACES = [KERNELS.index(f"{name}_ns") for name in _TERMS]


def _pieces(
    cost: object, steps: Mapping[str, Any], prompts: NDArray[np.int32], split: time.Split
) -> Iterator[Ints]:
    """`KERNELS` of the steps, as arrays of some rows each; requests get their part of the time on
    the way, so that a long run is never in memory as a whole. `prompts`: that each step
    completes."""
    names = [name for name in _READ if name in steps]
    names += _OF_DRAFTS if "draft_tokens" in steps else ()
    for first in range(0, rows_in(steps), PIECE_ROWS):
        last = first + PIECE_ROWS
        piece = {name: part_of(steps, name, first, last) for name in names}
        work, drafter = work_of(piece, prompts[first:last]), piece.get("drafter_ns", 0)
        beside = sum(piece[name] for name in TIME_COLUMNS if name in piece)
        computing: Ints = piece["end_ns"] - piece["start_ns"] - beside - drafter
        kernels = split_piece(cost, work, computing)
        assert (kernels >= 0).all(), "a step has a kernel of negative time"
        assert (kernels.sum(axis=1) == computing).all(), "the kernels of a step do not add up"
        kernels[:, _DRAFTER] = drafter
        host = kernels[:, _HOST]
        alone = alone_ns(cost, work, computing, host)
        # In a step without decodes, the host time counts as interference as well.
        others = np.where(work.decode_seqs > 0, computing - host - alone, computing)
        accepted = rejected = np.zeros_like(alone)
        if "draft_tokens" in piece:
            verifying = alone - undrafted_ns(cost, work, alone)
            drafts = np.maximum(work.draft_tokens, 1)
            accepted = part_ns(verifying, piece["accepted_tokens"], drafts)
            rejected = verifying - accepted
        drafting = drafter, accepted, rejected
        split.add(first, time.table(piece, computing - host, alone, others, drafting))
        yield kernels


def completions(
    starts: Ints, ends: Ints, requests: Mapping[str, Any], transitions: Mapping[str, Ints]
) -> NDArray[np.int32]:
    """Prompts that each step completed, those that were computed again among them."""
    first = requests["first_token_ns"]
    rows = np.searchsorted(ends, first[first >= 0], side="left")
    resumed = transitions["kind"] == RESUMED
    again = np.searchsorted(starts, transitions["time_ns"][resumed], side="right") - 1
    request = transitions["request"][resumed]
    # Those whose first token the step made are counted above.
    known = (
        (again >= 0) & (first[request] != ends[again]) if len(again) else np.zeros(0, dtype=bool)
    )
    prompts = np.zeros(len(ends), dtype=np.int32)  # Narrow, because a long run has many steps.
    for places in (rows, again[known]):
        np.add.at(prompts, places[places < len(prompts)], 1)
    return prompts


def work_of(steps: Mapping[str, Any], prompts: NDArray[np.int32]) -> Work:
    """The counts of steps, which complete these `prompts`.

    Logits are computed for each decoding sequence, draft and completed prompt. vLLM V1 runs the
    last token of a prompt as a decode where a chunk leaves it alone. Such a step may be counted one
    row too many if it has chunks of other requests.
    """
    prefill_tokens, prefill_seqs, decode_seqs, context_tokens, copied = (
        steps[name] for name in _COUNTS
    )
    drafts = steps.get("draft_tokens", 0)
    samples = decode_seqs + np.minimum(prompts, prefill_seqs) + drafts
    return Work(prefill_tokens, prefill_seqs, decode_seqs, context_tokens, samples, copied, drafts)


def split_piece(cost: object, work: Work, whole_ns: Ints) -> Ints:
    """An array of shape (steps, `KERNELS`) whose rows add up to `whole_ns`."""
    parts = np.zeros((len(whole_ns), len(KERNELS)), dtype=np.int64, order="F")
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
        share = part_ns(kernels[mixed], work.decode_tokens[mixed], work.tokens[mixed])
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
        share = part_ns(alone[drafted], some.decode_seqs, some.tokens)
    own[drafted] = np.clip(share, 0, alone[drafted])
    return own


def _price_ns(cost: Explains, work: Work) -> Ints:
    """The kernels of steps as the cost model explains them, host time excluded."""
    terms = cost.explain(work)
    price = sum(np.floor(terms[name]) for name in terms if name not in ("host", "rest"))
    return np.asarray(price, dtype=np.int64)


def part_ns(whole: Ints, part: Ints, of: Ints) -> Ints:
    """`whole * part // of`, without sums beyond 64 bits."""
    share: Ints = whole // of * part + whole % of * part // of
    return share
