"""Replays a recording: with the recorded times, the simulator makes the real run's decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kvsim.against.validate.recording import MARKS, digest
from kvsim.core.plan import Plan
from kvsim.errors import ConfigError
from kvsim.run.assembly import Parts, assemble
from kvsim.run.simulation import simulate
from kvsim.settings.config import RunConfig
from kvsim.workload import Trace

if TYPE_CHECKING:
    from kvsim.run.result import Result

KINDS = ("decode", "prefill", "mixed")
"""Kinds of steps: decodes alone, prompts alone, both."""

Table = dict[str, Any]


class Replay:
    """A cost model and a link that return the recorded times, and note the prices of others."""

    kind = "measured"
    source = "measured: a recording, replayed"

    def __init__(self, run: Mapping[str, Any], parts: Parts) -> None:
        self._cost, self._link = parts.cost, parts.link
        self._steps: Iterator[int] = iter(run["step_ns"])
        self._swaps: Iterator[int] = iter(run["swap_ns"])
        self.kinds: list[int] = []
        """Index into `KINDS` of each step."""
        self.predicted_ns: list[int] = []
        self.predicted_swap_ns: list[int] = []
        self.swapped_blocks: list[int] = []

    def step_ns(self, plan: Plan) -> int:
        """The recorded time of the next step."""
        kind = 0 if not plan.chunks else 2 if plan.decode_seqs else 1
        self.kinds.append(kind)
        self.predicted_ns.append(self._cost.step_ns(plan))
        return _next(self._steps)

    def transfer_ns(self, blocks: int) -> int:
        """The recorded time of the next copy."""
        self.swapped_blocks.append(blocks)
        self.predicted_swap_ns.append(self._link.transfer_ns(blocks))
        return _next(self._swaps)

    @property
    def extrapolated_steps(self) -> int:
        """Number of steps outside the profile's tables."""
        return int(self._cost.describe()["extrapolated_steps"])

    def describe(self) -> Table:
        """Where the times come from."""
        return {"kind": self.kind, "source": self.source}

    def finished(self) -> bool:
        """Whether everything that was recorded has been replayed."""
        return next(self._steps, None) is None and next(self._swaps, None) is None


class Replayed(NamedTuple):
    """A real run: its result, and the prices of its steps."""

    result: Result
    replay: Replay


def replayed(policy: Mapping[str, Any], name: str, trace: Trace, config: RunConfig) -> Replayed:
    """Simulate with the times of the run `name` of a policy's recording.

    Raises `ConfigError` if the schedule differs from the recorded one.
    """
    run, used = policy[name], []

    def parts_of(settings: RunConfig) -> Parts:
        parts = assemble(settings)
        used.append(Replay(run, parts))
        return parts._replace(cost=used[-1], link=cast("Any", used[-1]))

    result = simulate(trace, config, parts_of=parts_of)
    same = digest(result.requests[mark].tolist() for mark in MARKS) == run["digest"]
    if not (same and used[-1].finished()):
        raise _other_schedule(f"{policy['name']}, {name}")
    return Replayed(result, used[-1])


def _next(times: Iterator[int]) -> int:
    time_ns = next(times, None)
    if time_ns is None:
        raise _other_schedule("it has fewer steps")
    return time_ns


def _other_schedule(what: str) -> ConfigError:
    return ConfigError(
        f"the recording does not lead to its own schedule ({what}): it was made by another version"
        " of kvsim; measure again"
    )
