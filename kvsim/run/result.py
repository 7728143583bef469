"""The result of a run: tables, figures, and everything needed to repeat it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.core import compiled
from kvsim.core.records import Tally
from kvsim.engines import ENGINES
from kvsim.results.plain import plain
from kvsim.run.assembly import Parts
from kvsim.settings.config import RunConfig, to_table
from kvsim.version import __version__
from kvsim.workload.clients import missing_arrivals
from kvsim.workload.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    Columns = tuple[Mapping[str, np.ndarray], dict[str, Any]]
    """Of the steps, and of the requests."""


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
        """The outcome in plain values, for the provenance of a result."""
        table = self._asdict()
        table["time_s"] = table.pop("time_ns") / 1e9
        return table


class Books:
    """The columns of steps and requests, in two parts, each worked out at its first access."""

    def __init__(
        self, noted: Callable[[], Columns], accounted: Callable[[Columns], Columns]
    ) -> None:
        self._noted, self._accounted = noted, accounted

    @cached_property
    def noted(self) -> Columns:
        """The columns that the run itself noted."""
        return self._noted()

    @cached_property
    def whole(self) -> Columns:
        """Those columns and the columns of the ledger (`kvsim.results.ledger`)."""
        whole = self._accounted(self.noted)
        # What makes them holds much that nothing else needs.
        del self._noted, self._accounted
        return whole

    def __getstate__(self) -> dict[str, Any]:
        """The state for another process: the columns, without the functions that make them."""
        return {"noted": self.whole, "whole": self.whole}


@dataclass
class Result:
    """The result of a run: one row per step, one per request, and its provenance."""

    config: RunConfig
    meta: dict[str, Any]
    """Provenance: versions, trace, settings, memory, time source, outcome."""
    books: Books = field(repr=False)
    token_gaps_ns: Tally = field(repr=False)
    """Time between consecutive tokens of a sequence → how often it occurred."""
    transitions: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Columns of `kvsim.core.schema.TRANSITIONS`."""

    @property
    def steps(self) -> Mapping[str, np.ndarray]:
        """Columns of `kvsim.core.schema.STEPS`, except those in seconds."""
        return self.books.whole[0]

    @property
    def requests(self) -> dict[str, Any]:
        """Columns of `kvsim.core.schema.REQUESTS`, except those in seconds; one entry per
        request."""
        return self.books.whole[1]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Figures under the result keys of `vllm bench serve`, and those of the KV cache."""
        from kvsim.results.summary import summarise

        return summarise(self.steps, self.requests, self.token_gaps_ns, self.meta)

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The figures of `summary` without those of the ledger.

        So the ledger need not be worked out, except that it knows the bubbles of a pipeline.
        """
        from kvsim.results.summary import summarise

        pipeline = self.config.pipeline_parallel_size > 1
        columns = self.books.whole if pipeline else self.books.noted
        return summarise(*columns, self.token_gaps_ns, self.meta, ledger=False)

    def requests_frame(self) -> pd.DataFrame:
        """The table of `requests.parquet`; missing: it never happened."""
        from kvsim.results.tables import requests_table

        frame: pd.DataFrame = requests_table(self.requests).to_pandas()
        return frame

    def steps_frame(self) -> pd.DataFrame:
        """The table of `steps.parquet`."""
        from kvsim.results.tables import steps_table

        frame: pd.DataFrame = steps_table(self.steps).to_pandas()
        return frame


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
    config, cost = parts.config, parts.cost
    priced_by = {"source": cost.source, "kind": cost.kind, **cost.describe()}
    json.dumps(plain(priced_by))  # A user's own model may describe itself in no plain values.
    return {
        "kvsim_version": __version__,
        "core": compiled.way(),
        "command": command,
        "config": to_table(config),
        "assumed": {key: each._asdict() for key, each in parts.assumed.items()},
        "trace": {
            "path": trace.path,
            "format": trace.format,
            "sha256": trace.sha256,
            "requests": number,
            "notes": list(trace.notes),
        },
        "seed": config.seed,
        "engine": config.engine,
        "model": parts.model.name,
        "hardware": parts.hardware.name,
        "block_manager": parts.block_manager,
        "scheduler": ENGINES[config.engine].about if config.engine in ENGINES else config.engine,
        "max_num_batched_tokens": parts.scheduler.max_num_batched_tokens,
        "prefix_caching": parts.blocks.needs_keys,
        "block_size": config.block_size,
        "num_gpu_blocks": parts.blocks.gpu.size,
        "num_cpu_blocks": parts.blocks.cpu.size,
        "steps_in_flight": parts.scheduler.in_flight,
        "watermark_blocks": parts.scheduler.watermark_blocks,
        "notes": [
            *parts.notes,
            *missing_arrivals(trace.rows, config),
            *parts.scheduler.remarks(),
            *(parts.blocks.hears.remarks() if parts.blocks.hears is not None else ()),
        ],
        "memory": parts.memory.describe(),
        "cost": priced_by,
        "link": parts.link.describe(),
        "cache": {"block_lookups": lookups, "block_hits": hits},
        "goodput": dict(config.goodput),
        "oracles": list(parts.future.oracles),
        "outcome": outcome.describe(),
        "engine_errors": [error.describe() for error in errors],
    }
