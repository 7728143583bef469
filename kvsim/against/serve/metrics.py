"""The Prometheus metrics of vLLM 0.33.0: names, labels, buckets, and when each changes.

Sources: `v1/metrics/loggers.py` (`PrometheusStatLogger`), `v1/metrics/stats.py`,
`v1/metrics/buckets.py`, `v1/engine/output_processor.py`. Times are simulated ones. Not there: what
nothing here can change (sleep, multi-modal caches, queue limits of the front end), and metrics of
Python and of the HTTP server. A run that is over is replayed for them and for its KV events, and
decides the same.
"""

from __future__ import annotations

import tomllib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvsim.against.serve.kv_events import Batch as Published
from kvsim.against.serve.kv_events import KVEvents, made_up_tokens
from kvsim.against.serve.watch import Entry, Step, Steps
from kvsim.core.batch import Batch
from kvsim.errors import ConfigError
from kvsim.run.assembly import Parts, assemble
from kvsim.run.simulation import simulate, to_repeat
from kvsim.settings.parsing import FILES, named_code, refuse_code

_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text())
GAUGES, COUNTERS, HISTOGRAMS = _TABLE["gauges"], _TABLE["counters"], _TABLE["histograms"]
"""Name → what is said about it, its further label with all values, or its family of buckets."""
_TOKENS = "request_tokens"
_LORA_LABELS = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """A value was seen so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, about: str, labels: dict[str, str], at: float | None) -> Metric:
        """The metric, with the time of its samples."""
        found = HistogramMetricFamily(name, about, labels=[*labels])
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        counts = zip(bounds, accumulate(self._counts), strict=True)
        found.add_metric([*labels.values()], [*counts], self._sum, timestamp=at)
        return found


class EngineMetrics:
    """All metrics of one engine: a listener of its steps, and a collector of a registry."""

    def __init__(self, parts: Parts, model_name: str, seconds: Callable[[int], float]) -> None:
        """`seconds`: what is told as the time of a step that ends then."""
        config = parts.config
        self._seconds, self._adapters = seconds, list[str]()
        self._max_loras = str(config.max_loras or 1) if config.enable_lora else None
        self._lora_s: dict[str, float] = {}
        """Names of adapters with requests → when a step found so."""
        self._caching, self._offloads = parts.blocks.needs_keys, parts.offload is not None
        self._labels = {"model_name": model_name, "engine": "0"}
        self._cache = {
            "block_size": str(config.block_size),
            "cache_dtype": str(config.kv_cache_dtype),
            "enable_prefix_caching": str(self._caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
            "num_gpu_blocks": str(parts.memory.num_gpu_blocks),
            "num_gpu_blocks_override": str(config.num_gpu_blocks_override),
            "engine": "0",
        }
        self._values: dict[tuple[str, str], float] = defaultdict(float)
        self._values["engine_sleep_state", "awake"] = 1
        longest: Any = config.max_model_len
        # 1, 2, 5, 10, 20, ... up to the longest sequence (v1/metrics/buckets.py).
        powers = [each * 10.0**power for power in range(len(str(longest))) for each in (1, 2, 5)]
        buckets = {**_TABLE["buckets"], _TOKENS: [each for each in powers if each <= longest]}
        self._histograms = {
            name: Histogram(buckets[about["buckets"]]) for name, about in HISTOGRAMS.items()
        }

    def __call__(self, batch: Batch, step: Step) -> None:
        """Takes in a step."""
        deferred = len(batch.holding)
        blocks: Any = batch.blocks
        waiting, gpu = len(batch.waiting) + len(batch.swapped), blocks.gpu
        self._values["num_requests_running", ""] = len(batch.running)
        self._values["num_requests_waiting", ""] = waiting + deferred
        self._values["num_requests_waiting_by_reason", "capacity"] = waiting
        self._values["num_requests_waiting_by_reason", "deferred"] = deferred
        self._values["kv_cache_usage_perc", ""] = 1 - gpu.free / gpu.size
        if self._max_loras is not None:
            self._note_adapters(batch, step)
        for entry in step.admitted:
            self._admit(entry)
        if step.tokens:
            self._take(step)
        for entry in step.ended:
            if entry.reason in ("stop", "length"):
                self._end(entry, step.now_ns)

    def collect(self, at: float | None = None) -> Iterator[Metric]:
        """All metrics as they are now, for a registry; `at`: the time of their samples."""
        for names, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, about in names.items():
                labels = [*self._labels, *filter(None, [about.get("label")])]
                family: Any = kind(f"vllm:{name}", about["about"], labels=labels)
                for value in about.get("values", [""]):
                    given = [*self._labels.values(), *filter(None, [value])]
                    family.add_metric(given, self._values[name, value], timestamp=at)
                yield family
        for name, histogram in self._histograms.items():
            yield histogram.family(f"vllm:{name}", HISTOGRAMS[name]["about"], self._labels, at)
        about = "Information of the LLMEngine CacheConfig"
        info = GaugeMetricFamily("vllm:cache_config_info", about, labels=[*self._cache])
        info.add_metric([*self._cache.values()], 1, timestamp=at)
        yield info
        if self._max_loras is not None:
            about = "Running stats on lora requests."
            info = GaugeMetricFamily("vllm:lora_requests_info", about, labels=_LORA_LABELS)
            for names, seconds in self._lora_s.items():
                info.add_metric([self._max_loras, names, names], seconds, timestamp=at)
            yield info

    def _note_adapters(self, batch: Batch, step: Step) -> None:
        """vLLM counts the requests of each adapter, and tells the names alone: those that have any
        request, whether it waits or runs, stand in both labels, in the order in which they came."""
        requests = chain(batch.running, batch.swapped, batch.holding, batch.waiting)
        now = dict.fromkeys(each.options.lora for each in requests)
        stay = [each for each in self._adapters if each in now]
        self._adapters = [*stay, *(each for each in now if each and each not in stay)]
        self._lora_s[",".join(self._adapters)] = self._seconds(step.now_ns)

    def _admit(self, entry: Entry) -> None:
        """A request was given its first blocks: what was looked up, and found."""
        request: Any = entry.request
        if not self._caching:
            return
        loaded = request.tier1_hit_tokens + request.tier2_hit_tokens
        found = request.cached_tokens - loaded
        self._count("prefix_cache_queries", request.input_length)
        self._count("prefix_cache_hits", found)
        self._count("prompt_tokens_cached_by_source", found, "device")
        if self._offloads:
            self._count("external_prefix_cache_queries", request.input_length - found)
            self._count("external_prefix_cache_hits", loaded)
            self._count("prompt_tokens_cached_by_source", loaded, "host")

    def _take(self, step: Step) -> None:
        """Requests got tokens."""
        gaps = Counter[int]()
        computed = generated = 0
        for entry, new in step.tokens:
            request: Any = entry.request
            generated += new
            if request.num_preemptions > entry.preemptions:
                self._count("num_preemptions", request.num_preemptions - entry.preemptions)
                entry.preemptions = request.num_preemptions
            if entry.last_ns >= 0:
                gaps[step.now_ns - entry.last_ns] += 1
                continue
            cached = min(request.cached_tokens, request.input_length)
            loaded = request.tier1_hit_tokens + request.tier2_hit_tokens
            computed += request.input_length - cached
            self._count("prompt_tokens", request.input_length)
            self._count("prompt_tokens_cached", cached)
            self._count("prompt_tokens_by_source", request.input_length - cached, "local_compute")
            self._count("prompt_tokens_by_source", cached - loaded, "local_cache_hit")
            self._count("prompt_tokens_by_source", loaded, "external_kv_transfer")
            self._add("time_to_first_token_seconds", (step.now_ns - request.arrival_ns) / 1e9)
        for gap_ns, times in gaps.items():
            self._histograms["inter_token_latency_seconds"].add(gap_ns / 1e9, times)
        self._count("generation_tokens", generated)
        self._add("iteration_tokens_total", computed + generated)

    def _end(self, entry: Entry, now_ns: int) -> None:
        """A request has all its tokens."""
        request: Any = entry.request
        arrival, first = request.arrival_ns / 1e9, request.first_token_ns / 1e9
        begun, last = request.first_scheduled_ns / 1e9, request.last_token_ns / 1e9
        self._count("request_success", 1, entry.reason)
        self._add("e2e_request_latency_seconds", now_ns / 1e9 - arrival)
        self._add("request_queue_time_seconds", begun - arrival)
        self._add("request_prefill_time_seconds", first - begun)
        self._add("request_inference_time_seconds", last - begun)
        self._add("request_decode_time_seconds", last - first)
        self._add("request_num_preemptions", entry.preemptions)
        self._add(
            "request_prefill_kv_computed_tokens", request.input_length - request.cached_tokens
        )
        self._add("request_prompt_tokens", request.input_length)
        self._add("request_generation_tokens", entry.tokens)
        self._add(
            "request_time_per_output_token_seconds", (last - first) / max(entry.tokens - 1, 1)
        )
        if request.max_new_tokens:
            self._add("request_params_max_tokens", request.max_new_tokens)
        family = entry.family or (entry,)
        if all(each.reason for each in family):
            self._add("request_params_n", len(family))
            self._add("request_max_num_generation_tokens", max(each.tokens for each in family))

    def _count(self, name: str, number: float, value: str = "") -> None:
        self._values[name, value] += number

    def _add(self, name: str, value: float) -> None:
        self._histograms[name].add(value)


def history(scrapes: Iterable[Iterable[Metric]]) -> str:
    """The OpenMetrics text of several scrapes, each with its time, in order."""
    from prometheus_client.openmetrics.exposition import generate_latest

    families: dict[str, tuple[Metric, dict[Any, list[Any]]]] = {}
    for scrape in scrapes:
        for family in scrape:
            _, series = families.setdefault(family.name, (family, {}))
            for sample in family.samples:
                # OpenMetrics wants the samples of a series together; the buckets of a histogram are
                # one.
                key = tuple(pair for pair in sorted(sample.labels.items()) if pair[0] != "le")
                series.setdefault(key, []).append(sample)
    for family, series in families.values():
        family.samples = [sample for each in series.values() for sample in each]
    merged: Any = SimpleNamespace(collect=lambda: [family for family, _ in families.values()])
    return str(generate_latest(merged, "allow-utf-8").decode())  # type: ignore[no-untyped-call]


class Again(NamedTuple):
    """What the clients of a finished run would have heard."""

    batches: list[Published] | None
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
    used = {key: value for key, value in meta["config"].items() if key not in FILES}
    refuse_code(named_code(used), trusted, "timeline: the run has")
    if meta["engine_errors"] or meta["trace"]["format"] == "served":
        raise ConfigError(
            "timeline: a run whose requests came over HTTP, or one that went on after an"
            " engine error, cannot be replayed; collect its metrics while it runs"
        )
    trace, config = to_repeat(meta, "timeline")
    parts, steps = assemble(config), Steps()
    metrics = EngineMetrics(parts, parts.model.name, lambda now_ns: start_s + now_ns / 1e9)
    events = KVEvents(int(parts.blocks.block_size), made_up_tokens, parts.config.vllm_version)
    publishes = parts.offload is None and parts.blocks.report(events)
    batches, scrapes, every_ns = list[Published](), list[Any](), round(interval_s * 1e9)

    def scrape(at_ns: int) -> None:
        scrapes.append([*metrics.collect(start_s + at_ns / 1e9)])

    def took(batch: Batch, step: Step) -> None:
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
