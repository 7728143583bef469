"""Clocks: how long a call takes, on CUDA by events around graph replays, on CPU by process time.

Three ways to time, the same on both devices:

    alone        cold caches or none emptied; the call must not wait for the device
    difference   two calls in turn, what the first takes beyond the second (in situ)
    whole        the call as an engine makes it, host work included

Warm-up first, then a number of repeats that fits a time budget; medians with their quartiles.
"""

# mypy: disable-error-code="no-untyped-call"

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

Call = Callable[[], object]

WARM_UPS = 2
CPU_CACHE_BYTES = 64 << 20
"""Read before each cold call on CPU; more than the last-level cache of a core's share."""


@dataclass(frozen=True)
class Timing:
    """Median of `reps` repeats, and the distance between their quartiles, microseconds."""

    us: float
    iqr_us: float
    reps: int

    def scaled(self, factor: float) -> "Timing":
        """Returns the timing of `factor` times the work."""
        return Timing(self.us * factor, self.iqr_us * factor, self.reps)


class Clock(Protocol):
    """What a sweep needs of a clock.

    `rounds`: passes over all samples; `fewest`, `most`, `budget_s`: repeats in a round.
    """

    rounds: int
    fewest: int
    most: int
    budget_s: float

    def alone(self, call: Call, *, cold: bool = True) -> Timing:
        """A call on cold caches, or as its own predecessor leaves them."""
        ...

    def difference(self, call: Call, without: Call) -> Timing:
        """What `call` takes beyond `without`."""
        ...

    def whole(self, call: Call) -> Timing:
        """A call with the host work around it."""
        ...

    def once(self, call: Call) -> float:
        """Microseconds of one call with its host work, not repeated."""
        ...

    def state(self) -> dict[str, float]:
        """What tells whether the device has slowed down."""
        ...


class CpuClock:
    """CPU time of the process, one thread: other processes on the machine disturb it least.

    They still do, through caches and shared cores; so a sweep makes several rounds of few repeats.
    """

    rounds, fewest, most, budget_s = 3, 3, 5, 0.02

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._cache = np.ones(CPU_CACHE_BYTES // 8)

    def alone(self, call: Call, *, cold: bool = True) -> Timing:
        """See `Clock`."""
        once = self._once_cold if cold else self.once
        return _timing([once(call) for _ in range(self._reps(call))])

    def difference(self, call: Call, without: Call) -> Timing:
        """See `Clock`."""
        return _timing([self.once(call) - self.once(without) for _ in range(self._reps(call))])

    def whole(self, call: Call) -> Timing:
        """See `Clock`."""
        return _timing([self.once(call) for _ in range(self._reps(call))])

    def once(self, call: Call) -> float:
        """See `Clock`."""
        start = time.process_time_ns()
        call()
        return (time.process_time_ns() - start) / 1e3

    def state(self) -> dict[str, float]:
        """Nothing: the sweep's anchors tell."""
        return {}

    def _once_cold(self, call: Call) -> float:
        self._cache.sum()
        return self.once(call)

    def _reps(self, call: Call) -> int:
        """Warms up, and says how often the budget allows the call."""
        return _reps(self, self.once(call))


class CudaClock:
    """Events around the replay of a captured graph, less those around a graph that does nothing.

    Cold caches: four times the L2 are read before each repeat; reading leaves no dirty lines that
    the timed kernel would have to write back.
    """

    rounds, fewest, most, budget_s = 1, 5, 20, 0.05

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self._cache = torch.ones(1024, 4 * l2_bytes // 4096, device="cuda")
        self._sums = torch.empty(1024, device="cuda")
        # `alone` subtracts it, so it is 0 while it is measured.
        self._empty_us = 0.0
        one = torch.zeros(1, device="cuda")
        self._empty_us = self.alone(lambda: one.add_(1.0)).us

    def alone(self, call: Call, *, cold: bool = True) -> Timing:
        """See `Clock`."""
        graph = _captured(call)
        reps = _reps(self, self._replays(graph, WARM_UPS, cold)[-1])
        times = [us - self._empty_us for us in self._replays(graph, reps, cold)]
        graph.reset()
        return _timing(times)

    def difference(self, call: Call, without: Call) -> Timing:
        """See `Clock`."""
        graphs = [_captured(each) for each in (call, without)]
        reps = _reps(self, self._replays(graphs[0], WARM_UPS, False)[-1])
        # In turn, so that a clock that changes meanwhile changes both.
        pairs = [[self._replays(g, 1, False)[0] for g in graphs] for _ in range(reps)]
        for graph in graphs:
            graph.reset()
        return _timing([long - short for long, short in pairs])

    def whole(self, call: Call) -> Timing:
        """See `Clock`."""
        took = [self.once(call) for _ in range(WARM_UPS)]
        return _timing([self.once(call) for _ in range(_reps(self, took[-1]))])

    def once(self, call: Call) -> float:
        """See `Clock`."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop)) * 1e3

    def state(self) -> dict[str, float]:
        """The time of an empty graph, and SM clock, power and temperature as nvidia-smi reads them.

        The device is kept busy meanwhile, so that the clock is the one that kernels see.
        """
        found = {"empty_graph_us": round(self._empty_us, 3)}
        keys = {"clocks.sm": "sm_mhz", "power.draw": "power_w", "temperature.gpu": "celsius"}
        command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader,nounits"]
        try:
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                while process.poll() is None:
                    for _ in range(50):
                        self._flush()
                    torch.cuda.synchronize()
                assert process.stdout is not None
                words = process.stdout.readline().split(",")
            return found | dict(zip(keys.values(), map(float, words), strict=True))
        except (OSError, ValueError):
            return found

    def _flush(self) -> None:
        torch.sum(self._cache, dim=1, out=self._sums)

    def _replays(self, graph: torch.cuda.CUDAGraph, reps: int, cold: bool) -> list[float]:
        """Microseconds of each of `reps` replays, queued together and waited for once."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
        for start, stop in events:
            if cold:
                self._flush()
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        return [float(start.elapsed_time(stop)) * 1e3 for start, stop in events]


def make_clock(device: str) -> CpuClock | CudaClock:
    """The clock of a device, "cuda" or "cpu"."""
    return CudaClock() if device == "cuda" else CpuClock()


def _captured(call: Call) -> torch.cuda.CUDAGraph:
    """A graph of the call; it is run before, so that kernels are compiled and workspaces sized."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _reps(clock: Clock, us: float) -> int:
    """Returns how often a call that takes `us` fits the budget, within the clock's bounds."""
    return max(clock.fewest, min(clock.most, int(clock.budget_s * 1e6 / max(us, 1.0))))


def _timing(times: list[float]) -> Timing:
    low, middle, high = np.percentile(times, (25, 50, 75))
    return Timing(float(middle), float(high - low), len(times))
