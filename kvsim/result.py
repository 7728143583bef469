"""What a run leaves behind: tables, figures, and everything needed to repeat it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.assembly import Parts
from kvsim.config import RunConfig, to_table
from kvsim.engines import ENGINES
from kvsim.request import Request
from kvsim.version import __version__
from kvsim.workload.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    Books = tuple[Mapping[str, np.ndarray], dict[str, Any]]


class Outcome(NamedTuple):
    """How a run ended."""

    kind: str
    """`finished`, `deadlock`, or the `kind` of an `EngineStopped`."""
    time_ns: int
    step: int
    request: str = ""
    explanation: str = ""
    remedy: str = ""
    rule: str = ""

    def describe(self) -> dict[str, Any]:
        """In plain values, for the provenance of a result."""
        table = self._asdict()
        table["time_s"] = table.pop("time_ns") / 1e9
        return table


@dataclass
class Result:
    """What a run did: one row per step, one per request, and what made it."""

    config: RunConfig
    meta: dict[str, Any]
    """Provenance: versions, trace, settings, memory, time source, outcome."""
    keep_books: Callable[[], Books] | None = field(repr=False)
    """Works out the columns of steps and requests, ledger included, when they are asked for."""
    token_gaps_ns: dict[int, int] = field(repr=False)
    """Time between consecutive tokens of a sequence → how often it occurred."""
    transitions: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Columns of `kvsim.transitions.TRANSITION_COLUMNS`."""

    @cached_property
    def _books(self) -> Books:
        assert self.keep_books is not None
        return self.keep_books()

    @property
    def steps(self) -> Mapping[str, np.ndarray]:
        """Columns of `recorder.STEP_COLUMNS` and `ledger.parts.KERNELS`."""
        return self._books[0]

    @property
    def requests(self) -> dict[str, Any]:
        """Columns, one entry per request in trace order; see `kvsim.report`.

        The times of `ledger.parts.TIME_PARTS`, and with prefix caching its `PROMPT_PARTS`, are
        among them.
        """
        return self._books[1]

    def __getstate__(self) -> dict[str, Any]:
        """What goes to another process: the books, not how they are kept."""
        return {**self.__dict__, "_books": self._books, "keep_books": None}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Figures under the result keys of `vllm bench serve`, and those of the KV cache."""
        from kvsim.report.summary import summarise

        return summarise(self.steps, self.requests, self.token_gaps_ns, self.meta)

    def requests_frame(self) -> pd.DataFrame:
        """The table of `requests.parquet`."""
        from kvsim.report.frames import requests_frame

        return requests_frame(self.requests)

    def steps_frame(self) -> pd.DataFrame:
        """The table of `steps.parquet`."""
        from kvsim.report.frames import steps_frame

        return steps_frame(self.steps)


def request_columns(requests: list[Request]) -> dict[str, Any]:
    """One entry per request and column, in trace order; -1: never happened."""
    import numpy as np

    read = attrgetter(*_REQUEST_INTEGERS, "cached_tokens")
    names = (*_REQUEST_INTEGERS, "num_cached_tokens")
    columns = np.empty((len(names), len(requests)), dtype=np.int64)
    for first in range(0, len(requests), _AT_ONCE):
        some = requests[first : first + _AT_ONCE]
        numbers = np.fromiter(chain.from_iterable(map(read, some)), np.int64)
        columns[:, first : first + len(some)] = numbers.reshape(-1, len(names)).T
    return {
        "id": [request.id for request in requests],
        "session": [request.session or "" for request in requests],
        "status": ["rejected" if request.reason else "completed" for request in requests],
        "reason": [request.reason for request in requests],
        **dict(zip(names, columns, strict=True)),
    }


_AT_ONCE = 1 << 15
"""Requests that are turned into columns together."""

_REQUEST_INTEGERS = (
    "index",
    "input_length",
    "output_length",
    "output_tokens",
    "priority",
    "n",
    "released_ns",
    "arrival_ns",
    "client_queue_ns",
    "first_scheduled_ns",
    "first_token_ns",
    "finish_ns",
    "num_preemptions",
    "recached_tokens",
    "recomputed_tokens",
    "swapped_out_blocks",
    "swapped_in_blocks",
    "blocked_steps",
)


def provenance(
    trace: Trace,
    number: int,
    parts: Parts,
    outcome: Outcome,
    errors: list[Outcome],
    command: str,
) -> dict[str, Any]:
    """Everything needed to repeat the run and to read its figures."""
    lookups, hits = parts.blocks.lookups
    config = parts.config
    return {
        "kvsim_version": __version__,
        "command": command,
        "config": to_table(config),
        "trace": {
            "path": trace.path,
            "format": trace.format,
            "sha256": trace.sha256,
            "requests": number,
            "notes": list(trace.notes),
        },
        "seed": config.seed,
        "engine": config.engine,
        "block_manager": parts.block_manager,
        "scheduler": ENGINES[config.engine].about if config.engine in ENGINES else config.engine,
        "max_num_batched_tokens": parts.scheduler.max_num_batched_tokens,
        "prefix_caching": parts.blocks.needs_keys,
        "block_size": config.block_size,
        "num_gpu_blocks": parts.blocks.gpu.size,
        "num_cpu_blocks": parts.blocks.cpu.size,
        "steps_in_flight": getattr(parts.scheduler, "in_flight", 1),
        "watermark_blocks": getattr(parts.scheduler, "watermark_blocks", 0),
        "memory": parts.memory.describe(),
        "cost": {"source": parts.cost.source, "kind": parts.cost.kind, **parts.cost.describe()},
        "link": parts.link.describe(),
        "cache": {"block_lookups": lookups, "block_hits": hits},
        "goodput": dict(config.goodput),
        "outcome": outcome.describe(),
        "engine_errors": [error.describe() for error in errors],
    }
