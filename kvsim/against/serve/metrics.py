"""The Prometheus metrics of vLLM 0.33.0: names, labels, buckets, and when each changes.

Sources: `v1/metrics/loggers.py` (`PrometheusStatLogger`), `v1/metrics/stats.py`,
`v1/metrics/buckets.py`, `v1/engine/output_processor.py`. Times are simulated ones. Not there: what
nothing here can change (sleep, multi-modal caches, queue limits of the front end), and metrics of
Python and of the HTTP server.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvsim.against.serve.watch import Entry, Step
from kvsim.core.batch import Batch
from kvsim.run.assembly import Parts

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip # noqa: E501
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip # noqa: E501
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip # noqa: E501
_ITERATION = (1, *(2.0**power for power in range(3, 15)))
_N = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_TOKENS: tuple[float, ...] = ()
"""1, 2, 5, 10, ... up to `max_model_len`."""

GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "num_requests_waiting_by_reason": (
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling"
        " capacity; 'deferred' = deferred by transient constraints (LoRA budget, KV transfer,"
        " blocked status). Sum of all reasons equals vllm:num_requests_waiting."
    ),
    "engine_sleep_state": (
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake;"
        " weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
    ),
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
COUNTERS = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": (
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of"
        " number of queried tokens."
    ),
    "external_prefix_cache_hits": (
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of"
        " number of cached tokens."
    ),
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_by_source": "Number of prompt tokens by source.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "prompt_tokens_cached_by_source": (
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host"
        " (offloaded to DRAM), disk, p2p (transferred from another vLLM instance) or"
        " external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits +"
        " vllm:external_prefix_cache_hits."
    ),
    "generation_tokens": "Number of generation tokens processed.",
    "request_success": "Count of successfully processed requests.",
}
LABELLED = {
    "num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "engine_sleep_state": ("sleep_state", ("awake", "weights_offloaded", "discard_all")),
    "prompt_tokens_by_source": (
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached_by_source": (
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    "request_success": ("finished_reason", ("stop", "length", "abort", "error", "repetition")),
}
"""Name → a further label, and its values."""
HISTOGRAMS = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", _TOKENS),
    "request_generation_tokens": ("Number of generation tokens processed.", _TOKENS),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _ITERATION),
    "request_max_num_generation_tokens": (
        "Histogram of maximum number of requested generation tokens.",
        _TOKENS,
    ),
    "request_params_n": ("Histogram of the n request parameter.", _N),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", _TOKENS),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _TTFT),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _ITL),
    "request_time_per_output_token_seconds": (
        "Histogram of time_per_output_token_seconds per request.",
        _ITL,
    ),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _LATENCY),
    "request_queue_time_seconds": (
        "Histogram of time spent in WAITING phase for request.",
        _LATENCY,
    ),
    "request_inference_time_seconds": (
        "Histogram of time spent in RUNNING phase for request.",
        _LATENCY,
    ),
    "request_prefill_time_seconds": (
        "Histogram of time spent in PREFILL phase for request.",
        _LATENCY,
    ),
    "request_decode_time_seconds": (
        "Histogram of time spent in DECODE phase for request.",
        _LATENCY,
    ),
    "request_num_preemptions": (
        "Histogram of the number of times a request was preempted.",
        _PREEMPTIONS,
    ),
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        _TOKENS,
    ),
}


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


class Served(NamedTuple):
    """What labels say of an engine."""

    model_name: str
    max_model_len: int
    caching: bool
    offloads: bool
    cache: dict[str, str]
    """Labels of `cache_config_info`."""


def served(parts: Parts, model_name: str) -> Served:
    """What labels say of an engine."""
    config = parts.config
    assert isinstance(config.max_model_len, int)
    cache = {
        "block_size": config.block_size,
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": parts.blocks.needs_keys,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "num_gpu_blocks": parts.memory.num_gpu_blocks,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
    }
    return Served(
        model_name,
        config.max_model_len,
        parts.blocks.needs_keys,
        parts.offload is not None,
        {**{key: str(value) for key, value in cache.items()}, "engine": "0"},
    )


class EngineMetrics:
    """All metrics of one engine: a listener of its steps, and a collector of a registry."""

    def __init__(self, of: Served) -> None:
        self._of = of
        self._labels = {"model_name": of.model_name, "engine": "0"}
        self._values: dict[tuple[str, str], float] = defaultdict(float)
        self._values["engine_sleep_state", "awake"] = 1
        tokens = [
            float(each * 10**power)
            for power in range(len(str(of.max_model_len)))
            for each in (1, 2, 5)
            if each * 10**power <= of.max_model_len
        ]
        self._histograms = {
            name: Histogram(bounds or tokens) for name, (_, bounds) in HISTOGRAMS.items()
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
                further, values = LABELLED.get(name, ("", ("",)))
                labels = [*self._labels, *filter(None, [further])]
                family: Any = kind(f"vllm:{name}", about, labels=labels)
                for value in values:
                    given = [*self._labels.values(), *filter(None, [value])]
                    family.add_metric(given, self._values[name, value], timestamp=at)
                yield family
        for name, histogram in self._histograms.items():
            yield histogram.family(f"vllm:{name}", HISTOGRAMS[name][0], self._labels, at)
        cache = self._of.cache
        about = "Information of the LLMEngine CacheConfig"
        info = GaugeMetricFamily("vllm:cache_config_info", about, labels=[*cache])
        info.add_metric([*cache.values()], 1, timestamp=at)
        yield info

    def _admit(self, entry: Entry) -> None:
        """A request was given its first blocks: what was looked up, and found."""
        request: Any = entry.request
        if not self._of.caching:
            return
        loaded = request.tier1_hit_tokens + request.tier2_hit_tokens
        found = request.cached_tokens - loaded
        self._count("prefix_cache_queries", request.input_length)
        self._count("prefix_cache_hits", found)
        self._count("prompt_tokens_cached_by_source", found, "device")
        if self._of.offloads:
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
                key = tuple(pair for pair in sorted(sample.labels.items()) if pair[0] != "le")
                series.setdefault(key, []).append(sample)
    for family, series in families.values():
        family.samples = [sample for each in series.values() for sample in each]
    merged: Any = _Fixed([family for family, _ in families.values()])
    return str(generate_latest(merged).decode())  # type: ignore[no-untyped-call]


class _Fixed:
    """A registry of what was collected."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """All of it."""
        return self._families
