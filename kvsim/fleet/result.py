"""What several replicas did with one trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvsim.core.records.tally import Tally
from kvsim.fleet.handovers import Sides, Ways, sides_of, together
from kvsim.run.result import Result


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
            for number, times in zip(*replica.token_gaps_ns.arrays(), strict=True):
                gaps.add(int(number), int(times))
        return gaps

    @cached_property
    def _sides(self) -> Sides | None:
        if self.ways is None:
            return None
        each = [one.requests for one in self.replicas]
        return sides_of(each, self.indexes, self.ways.roles, self.chosen, self.ways.decoders)
