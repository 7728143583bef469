"""KV events and metrics of a run that is over: it is replayed, and decides the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvsim.against.serve.kv_events import Batch, KVEvents, layout_of, made_up_tokens
from kvsim.against.serve.metrics import EngineMetrics, history
from kvsim.against.serve.watch import Step, Steps
from kvsim.core.batch import Batch as Requests
from kvsim.errors import ConfigError
from kvsim.run.assembly import Parts, assemble
from kvsim.run.simulation import simulate
from kvsim.settings.config import RunConfig, make_config
from kvsim.settings.parsing import named_code
from kvsim.settings.server import FILES
from kvsim.workload import open_trace
from kvsim.workload.spec import trace_of


class Again:
    """What the clients of a finished run would have heard."""

    def __init__(
        self, meta: Mapping[str, Any], interval_s: float, start_s: float, trusted: Collection[str]
    ) -> None:
        """`meta`: of its summary. Metrics are collected every `interval_s` simulated seconds, and
        their times begin at `start_s`. `trusted`: code that the settings may name. Raises
        `ConfigError`, `TraceError`."""
        if not interval_s >= 1e-3:
            raise ConfigError(f"--interval: {interval_s} s is below 1 ms; give more")
        self.batches: list[Batch] = []
        """The KV events, by step, with simulated seconds."""
        self.publishes = False
        """Whether the engine publishes KV events."""
        self._meta, self._steps, self._scrapes = meta, Steps(), list[Any]()
        self._every_ns, self._start_s = round(interval_s * 1e9), start_s
        self._metrics: EngineMetrics | None = None
        self._steps.listeners.append(self._scrape)
        _refuse_code(meta["config"], trusted)
        self._replay()

    @property
    def openmetrics(self) -> str:
        """All metrics, one scrape for each interval, as OpenMetrics text."""
        return history(self._scrapes)

    def _replay(self) -> None:
        meta = self._meta
        if meta["engine_errors"] or meta["trace"]["format"] == "served":
            raise ConfigError(
                "timeline: a run whose requests came over HTTP, or one that went on after an"
                " engine error, cannot be replayed; collect its metrics while it runs"
            )
        config, path = make_config(meta["config"]), meta["trace"]["path"]
        made = config.workload is not None
        trace = trace_of(config) if made else open_trace(path, meta["trace"]["format"])
        if trace.sha256 != meta["trace"]["sha256"]:
            raise ConfigError(f"timeline: {path} is not as it was when the run was made")
        result = simulate(trace, config, watcher=self._steps, parts_of=self._parts)
        if result.meta["outcome"] != meta["outcome"]:
            raise ConfigError(
                f"timeline: this version decides otherwise than kvsim {meta['kvsim_version']},"
                " which made the run; run it again"
            )
        self._collect(int(meta["outcome"]["time_s"] * 1e9))

    def _parts(self, config: RunConfig) -> Parts:
        parts = assemble(config)
        version = parts.config.vllm_version
        events = KVEvents(int(parts.blocks.block_size), made_up_tokens, layout_of(version))
        self.publishes = parts.offload is None and parts.blocks.report(events)
        self._metrics = EngineMetrics(parts, parts.model.name)

        def publish(_: Requests, step: Step) -> None:
            if (batch := events.batch(step.now_ns / 1e9)) is not None:
                self.batches.append(batch)

        self._steps.listeners += [self._metrics, publish]
        return parts

    def _scrape(self, _: Requests, step: Step) -> None:
        """Collects what there was at all marks up to a step."""
        while step.now_ns > len(self._scrapes) * self._every_ns:
            self._collect(len(self._scrapes) * self._every_ns)

    def _collect(self, at_ns: int) -> None:
        assert self._metrics is not None
        self._scrapes.append([*self._metrics.collect(self._start_s + at_ns / 1e9)])


def _refuse_code(settings: Mapping[str, Any], trusted: Collection[str]) -> None:
    """Raises `ConfigError` for code that the settings name: a file from elsewhere must not run what
    it likes."""
    used = {key: value for key, value in settings.items() if key not in FILES}
    for name in named_code(used):
        if name not in trusted:
            raise ConfigError(
                f"timeline: the run has {name!r}, which is not of kvsim; if you know that code, add"
                f" --trust {name}"
            )
