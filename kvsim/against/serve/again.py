"""KV events and metrics of a run that is over: it is replayed, and decides the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from kvsim.against.serve.kv_events import Batch, KVEvents, made_up_tokens
from kvsim.against.serve.metrics import EngineMetrics, history
from kvsim.against.serve.watch import Step, Steps
from kvsim.core.batch import Batch as Requests
from kvsim.errors import ConfigError
from kvsim.run.assembly import assemble
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.settings.parsing import named_code
from kvsim.settings.server import FILES
from kvsim.workload import open_trace
from kvsim.workload.spec import trace_of


class Again(NamedTuple):
    """What the clients of a finished run would have heard."""

    batches: list[Batch] | None
    """The KV events, by step, with simulated seconds; None: the engine publishes none."""
    openmetrics: str
    """All metrics, one scrape for each interval, as OpenMetrics text."""


def replayed(
    meta: Mapping[str, Any], interval_s: float, start_s: float, trusted: Collection[str]
) -> Again:
    """`meta`: of the summary of the run. Metrics are collected every `interval_s` simulated
    seconds, and their times begin at `start_s`. `trusted`: code that the settings may name. Raises
    `ConfigError`, `TraceError`."""
    if not interval_s >= 1e-3:
        raise ConfigError(f"--interval: {interval_s} s is below 1 ms; give more")
    _refuse_code(meta["config"], trusted)
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
    parts, steps = assemble(config), Steps()
    metrics = EngineMetrics(parts, parts.model.name, lambda now_ns: start_s + now_ns / 1e9)
    events = KVEvents(int(parts.blocks.block_size), made_up_tokens, parts.config.vllm_version)
    publishes = parts.offload is None and parts.blocks.report(events)
    batches, scrapes, every_ns = list[Batch](), list[Any](), round(interval_s * 1e9)

    def scrape(at_ns: int) -> None:
        scrapes.append([*metrics.collect(start_s + at_ns / 1e9)])

    def took(batch: Requests, step: Step) -> None:
        while step.now_ns > len(scrapes) * every_ns:
            scrape(len(scrapes) * every_ns)
        metrics(batch, step)
        if (published := events.batch(step.now_ns / 1e9)) is not None:
            batches.append(published)

    steps.listeners.append(took)
    result = simulate(trace, config, watcher=steps, parts_of=lambda _: parts)
    if result.meta["outcome"] != meta["outcome"]:
        raise ConfigError(
            f"timeline: this version decides otherwise than kvsim {meta['kvsim_version']},"
            " which made the run; run it again"
        )
    scrape(int(meta["outcome"]["time_s"] * 1e9))
    return Again(batches if publishes else None, history(scrapes))


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
