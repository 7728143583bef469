"""What several replicas did with one trace. The two halves of each request of a prefill/decode
split are put together, and its time is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from kvsim.core.records import Tally
from kvsim.core.request import DECODE, PREFILL
from kvsim.core.schema import HANDOVERS, LEGS
from kvsim.results.ledger import TIME_PARTS
from kvsim.results.ledger.account import check_sums
from kvsim.results.statistics import Ints, ratio
from kvsim.run.replica.rdma import Handover
from kvsim.run.result import Result

Columns = Mapping[str, Any]

_OF_DECODE = ("status", "reason", "output_tokens", "first_token_ns", "finish_ns", "replica")
"""What becomes of a request shows on the decode side; all other columns are of the prefill side."""
_OF_BOTH = (
    *("num_preemptions", "recached_tokens", "recomputed_tokens", "blocked_steps"),
    *("swapped_out_blocks", "swapped_in_blocks"),
    *TIME_PARTS,
)
"""What both sides add to."""


class Replica(NamedTuple):
    """What one replica did, in the shapes of `kvsim.report.files`."""

    summary: Mapping[str, Any]
    requests: Mapping[str, Any]
    steps: Mapping[str, Any]
    transitions: Mapping[str, Any]


class Ways(NamedTuple):
    """How requests went through a split."""

    roles: tuple[str, ...]
    """`prefill` or `decode` for each replica."""
    decoders: Sequence[int]
    """The decode replica of each request, in the order of the trace; -1: none."""
    handovers: Mapping[int, Handover]
    """What prefill replicas computed, by the index of the request."""


class Sides(NamedTuple):
    """The requests to all replicas of each side, in the order of the trace."""

    prefill: Columns
    decode: Columns

    def whole(self) -> dict[str, Any]:
        """Returns the requests of the clients. Hits and times before the first step are those of
        the prefill side."""
        prefill, decode = self
        whole = {name: np.array(column) for name, column in prefill.items()}
        place = np.searchsorted(whole["index"], decode["index"])
        lost = whole["finish_ns"] >= 0
        lost &= np.array(whole["status"]) == "completed"
        # Of the prompts computed, those that the decode side lists are not lost.
        lost[place] = False
        for name in ("status", "reason"):
            whole[name] = whole[name].astype(object)
        for name in _OF_DECODE:
            whole[name][place] = decode[name]
        for name in _OF_BOTH:
            whole[name][place] += decode[name]
        # Computed, but no decode replica was left.
        whole["status"][lost], whole["reason"][lost], whole["output_tokens"][lost] = _LOST
        whole["first_token_ns"][lost] = whole["finish_ns"][lost] = -1
        return {name: c.tolist() if c.dtype.kind in "OU" else c for name, c in whole.items()}

    def handovers(self, known: Mapping[int, Handover]) -> dict[str, np.ndarray]:
        """Returns the columns of `kvsim.core.schema.HANDOVERS`."""
        prefill, decode = self
        index = np.asarray(prefill["index"])
        columns = {column.name: np.full(len(index), -1) for column in HANDOVERS.columns}
        columns |= {"request": index, "prefill_replica": np.asarray(prefill["replica"])}
        place: Ints = np.searchsorted(index, np.asarray(decode["index"]))
        columns["decode_replica"][place] = decode["replica"]
        computed = [known.get(each) for each in index.tolist()]
        for row, handover in enumerate(computed):
            if handover is not None:
                columns["moved_bytes"][row] = handover.moved_bytes
                columns["lease_ran_out"][row] = handover.ran_out
        # Only these have all instants.
        over = np.array([status == "completed" for status in decode["status"]], dtype=bool)
        rows: Ints = place[over]
        first_step = decode["first_scheduled_ns"][over]
        asked, met, sent, read = _instants([computed[row] for row in rows.tolist()], first_step)
        instants = (
            *(prefill[name][rows] for name in ("arrival_ns", "first_scheduled_ns")),
            *(decode["arrival_ns"][over], asked, met, sent, read, first_step),
            *(decode[name][over] for name in ("first_token_ns", "finish_ns")),
        )
        legs = dict(zip(LEGS, np.diff(np.stack(instants), axis=0), strict=True))
        check_sums("a request", legs, LEGS, instants[-1] - instants[0])
        for name, values in legs.items():
            columns[name][rows] = values
        return columns


def sides_of(
    each: Sequence[Columns],
    indexes: Sequence[np.ndarray],
    roles: Sequence[str],
    prefillers: Sequence[int],
    decoders: Sequence[int],
) -> Sides:
    """Returns both sides. `each`, `indexes`: the requests to each replica, and their places in the
    trace; `prefillers`, `decoders`: the replica of each request on either side, -1: none."""

    def side(role: str, where: Sequence[int]) -> dict[str, Any]:
        own = [number for number, its_role in enumerate(roles) if its_role == role]
        return together([each[i] for i in own], [indexes[i] for i in own], where)

    return Sides(side(PREFILL, prefillers), side(DECODE, decoders))


def together(
    each: Sequence[Columns], indexes: Sequence[np.ndarray], chosen: Sequence[int]
) -> dict[str, Any]:
    """Returns the requests of all replicas in the order of the trace, with the column `replica`.

    `indexes`: the requests of each replica, as places in the trace; `chosen`: the replica of each.
    A column that not all have, because some have no prefix cache, is left out.
    """
    places = np.concatenate(indexes)
    order = np.argsort(places, kind="stable")
    joined: dict[str, Any] = {}
    for name in each[0]:
        if not all(name in columns for columns in each):
            continue
        values = [columns[name] for columns in each]
        if isinstance(values[0], np.ndarray):
            joined[name] = np.concatenate(values)[order]
        else:
            flat = [value for column in values for value in column]
            joined[name] = [flat[place] for place in order]
    return {**joined, "index": places[order], "replica": np.array(chosen)[places[order]]}


def handover_figures(handovers: Columns) -> dict[str, Any]:
    """The mean of each leg over the requests that completed, in milliseconds, what moved, and how
    many leases ran out."""
    done = np.asarray(handovers[LEGS[0]]) >= 0
    means = {
        f"mean_{name.removesuffix('_ns')}_ms": ratio(
            int(np.asarray(handovers[name])[done].sum()) / 1e6, int(done.sum())
        )
        for name in LEGS
    }
    moved = np.asarray(handovers["moved_bytes"])
    return {
        "handovers": int((moved >= 0).sum()),
        "moved_bytes": int(moved[moved >= 0].sum()),
        "leases_run_out": int((np.asarray(handovers["lease_ran_out"]) == 1).sum()),
        **means,
    }


def _instants(handovers: Sequence[Handover | None], otherwise: np.ndarray) -> list[np.ndarray]:
    """Returns when blocks were asked for, the engines had met, the transfer began and ended. Of a
    request that needed none, all are `otherwise`."""
    found = [each.instants for each in handovers if each is not None]
    assert len(found) == len(handovers), "a request was decoded whose prompt nobody computed"
    times = np.array(found, dtype=np.int64).reshape(-1, 4)
    return [np.where(column >= 0, column, otherwise) for column in times.T]


_LOST = "rejected", "not-served", 0


@dataclass
class FleetResult:
    """What several replicas did with one trace."""

    router: str
    router_args: dict[str, Any]
    replicas: list[Result]
    """A result for each replica, with the requests that it was sent."""
    indexes: list[np.ndarray]
    """The requests of each replica, as places in the trace."""
    chosen: Sequence[int]
    """The replica of each request, in the order of the trace, or that of its prompt; -1: it was
    sent to none."""
    decisions: Mapping[str, np.ndarray] | None = None
    """Columns of `kvsim.core.schema.ROUTING`, if they were asked for."""
    ways: Ways | None = None
    """How requests went through a prefill/decode split; None without one."""

    @cached_property
    def requests(self) -> dict[str, Any]:
        """The requests of all replicas in the order of the trace, with the column `replica`."""
        if self._sides is not None:
            return self._sides.whole()
        return together([each.requests for each in self.replicas], self.indexes, self.chosen)

    @cached_property
    def handovers(self) -> dict[str, np.ndarray] | None:
        """Columns of `kvsim.core.schema.HANDOVERS`; None without a prefill/decode split."""
        if self.ways is None or self._sides is None:
            return None
        return self._sides.handovers(self.ways.handovers)

    @cached_property
    def token_gaps_ns(self) -> Tally:
        """Time between consecutive tokens of a sequence → how often it occurred."""
        gaps = Tally()
        for replica in self.replicas:
            gaps.add(*replica.token_gaps_ns.arrays())
        return gaps

    @cached_property
    def _sides(self) -> Sides | None:
        if self.ways is None:
            return None
        each = [one.requests for one in self.replicas]
        return sides_of(each, self.indexes, self.ways.roles, self.chosen, self.ways.decoders)
