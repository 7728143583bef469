"""Writes the parts of a page that are not charts: cards, tables, where time went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvsim.report import wording
from kvsim.report.html import Html, element, key_of, panel, strip, table
from kvsim.report.metrics import LATENCIES
from kvsim.report.numerals import count, percent, seconds, show
from kvsim.report.phases import PHASES, Floats, completed
from kvsim.report.statistics import STATISTICS, ratio

SLOWEST = 15
PHASE_LABELS = {
    "client_queue": "client queue",
    "queue": "queue",
    "prefill": "prefill, to the first token",
    "decode": "decode, preemptions included",
}
HIT_RATES = (
    (
        "prefix_cache_hit_rate",
        "Prompt tokens, first admissions",
        "vLLM V1: hits over queries; what a preempted request finds again does not count",
    ),
    (
        "prefix_cache_hit_rate_with_preempted",
        "Tokens, re-admissions included",
        "adds what preempted requests found again or had to compute again",
    ),
    (
        "prefix_cache_block_hit_rate",
        "Block look-ups",
        "vLLM 0.6.3: look-ups of full blocks that found one",
    ),
    (
        "prefix_cache_request_hit_share",
        "Requests with any hit",
        "share of admitted requests",
    ),
)


def tags(summary: Mapping[str, Any]) -> Html:
    """Labels for how the run ended and where its step times come from."""
    ended = "good" if wording.finished(summary) else "bad"
    timed = "good" if wording.measured(summary["meta"]) else "warning"
    return element(
        "p",
        element("span", wording.outcome_title(summary), class_=f"tag {ended}"),
        element("span", wording.time_source(summary["meta"]), class_=f"tag {timed}"),
        class_="tags",
    )


def cards(summary: Mapping[str, Any]) -> Html:
    """The key figures at a glance."""
    shown = [_throughput_card(summary), *_goodput_card(summary)]
    shown += [_latency_card(summary, kind) for kind in ("ttft", "tpot", "e2el")]
    shown += [_memory_card(summary), _preemption_card(summary), *_cache_card(summary)]
    shown.append(
        _card(
            "Waiting in the queue",
            show(summary["mean_queue_ms"], "ms"),
            f"mean; at most {count(summary['waiting_max'])} requests",
        )
    )
    return element("dl", *shown, class_="cards")


def latency_table(summary: Mapping[str, Any]) -> Html:
    """All statistics of all latencies."""
    columns = [name for name in STATISTICS if name != "median"]
    rows = [
        [label, *(show(summary[f"{name}_{kind}_ms"], "ms") for name in columns)]
        for kind, label in LATENCIES.items()
    ]
    return panel(None, table(["", *columns], rows))


def hit_rate_table(summary: Mapping[str, Any]) -> Html:
    """The hit rate under each definition in use."""
    rows = [[label, meaning, show(summary[key], "share")] for key, label, meaning in HIT_RATES]
    return panel(None, table(["Hit rate of", "Definition", ""], rows, text_columns=2))


def slowest_table(requests: Mapping[str, Any], durations: Mapping[str, Floats]) -> Html:
    """The completed requests with the longest E2EL, and where their time went."""
    e2el = durations["e2el"]
    order = np.argsort(-np.nan_to_num(e2el, nan=-1.0), kind="stable")
    picked = [int(i) for i in order[:SLOWEST] if not np.isnan(e2el[i])]
    longest = max((_life(durations, i) for i in picked), default=0.0)
    rows = []
    for i in picked:
        tokens = f"{count(requests['input_length'][i])} + {count(requests['output_length'][i])}"
        rows.append(
            [
                element("span", requests["id"][i], class_="id"),
                _strip(durations, i, longest),
                seconds(e2el[i] / 1e9),
                seconds(durations["ttft"][i] / 1e9),
                tokens,
                count(requests["num_preemptions"][i]),
                seconds(requests["arrival_ns"][i] / 1e9),
            ]
        )
    head = ["Request", "Where its time went", "E2EL", "TTFT", "Prompt + output tokens"]
    head += ["Preemptions", "Arrived at"]
    seen = {name: PHASE_LABELS[name] for name in PHASES if any(durations[name][i] for i in picked)}
    return panel(None, _phase_key(seen), table(head, rows, text_columns=2))


def rejected_table(summary: Mapping[str, Any], requests: Mapping[str, Any]) -> Html:
    """Rejected requests by reason, with the first few of each."""
    rows = []
    for reason, number in summary["rejected_by_reason"].items():
        names = [
            str(id)
            for id, status, why in zip(
                requests["id"], requests["status"], requests["reason"], strict=True
            )
            if status == "rejected" and (str(why) or "unknown") == reason
        ]
        shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
        share = ratio(number, summary["num_requests"])
        example = element("span", shown, class_="id")
        rows.append([reason, example, count(number), show(share, "share")])
    return panel(None, table(["Reason", "Requests", "Number", "Share"], rows, text_columns=2))


def mean_phases(requests: Mapping[str, Any], durations: Mapping[str, Floats]) -> Html:
    """Where the time of the mean completed request went; there must be one."""
    done = completed(requests)
    means = {name: np.array([float(np.mean(durations[name][done]))]) for name in PHASES}
    whole = _life(means, 0)
    words = {
        name: f"{PHASE_LABELS[name]}: {seconds(means[name][0] / 1e9)},"
        f" {percent(means[name][0] / whole)}"
        for name in PHASES
        if means[name][0]
    }
    return panel(None, _strip(means, 0, whole), _phase_key(words))


def _throughput_card(summary: Mapping[str, Any]) -> Html:
    return _card(
        "Output throughput",
        show(summary["output_throughput"], "tokens/s"),
        f"{show(summary['request_throughput'], 'requests/s')},"
        f" {show(summary['total_token_throughput'], 'tokens/s')} with prompts",
    )


def _goodput_card(summary: Mapping[str, Any]) -> list[Html]:
    if summary["request_goodput"] is None:
        return []
    goals = summary["meta"]["goodput"].items()
    limits = ", ".join(f"{LATENCIES[kind]} ≤ {show(ms, 'ms')}" for kind, ms in goals)
    share = ratio(summary["request_goodput"], summary["request_throughput"])
    detail = f"{show(share, 'share')} of completed: {limits}"
    return [_card("Goodput", show(summary["request_goodput"], "requests/s"), detail)]


def _latency_card(summary: Mapping[str, Any], kind: str) -> Html:
    return _card(
        f"{LATENCIES[kind]} p50",
        show(summary[f"p50_{kind}_ms"], "ms"),
        f"p99 {show(summary[f'p99_{kind}_ms'], 'ms')},"
        f" mean {show(summary[f'mean_{kind}_ms'], 'ms')}",
    )


def _memory_card(summary: Mapping[str, Any]) -> Html:
    total = summary["meta"].get("num_gpu_blocks")
    return _card(
        "KV cache in use",
        show(summary["kv_cache_usage_mean"], "share"),
        f"mean; at most {show(summary['kv_cache_usage_max'], 'share')}"
        f" of {show(total, 'blocks')} blocks",
    )


def _preemption_card(summary: Mapping[str, Any]) -> Html:
    by_mode = summary["num_preemptions_by_mode"]
    costs = []
    if by_mode["recompute"]:
        costs.append(f"{count(summary['recomputed_tokens'])} tokens computed again")
    if by_mode["swap"]:
        costs.append(f"{count(summary['swapped_out_blocks'])} blocks swapped out")
    return _card("Preemptions", count(summary["num_preemptions"]), ", ".join(costs) or "none")


def _cache_card(summary: Mapping[str, Any]) -> list[Html]:
    if not summary["meta"].get("prefix_caching"):
        return []
    detail = (
        f"{count(summary['prefix_cache_hit_tokens'])} of"
        f" {count(summary['prefix_cache_query_tokens'])} prompt tokens"
    )
    return [_card("Prefix cache hit rate", show(summary["prefix_cache_hit_rate"], "share"), detail)]


def _card(label: str, value: str, detail: str) -> Html:
    return element(
        "div",
        element("dt", label),
        element("dd", value, class_="value"),
        element("dd", detail, class_="detail"),
        class_="card",
    )


def _life(durations: Mapping[str, Floats], i: int) -> float:
    return float(sum(durations[name][i] for name in PHASES))


def _strip(durations: Mapping[str, Floats], i: int, longest: float) -> Html:
    """A bar whose parts have the lengths of the phases of request `i`."""
    return strip(
        (
            f"var(--phase-{name})",
            ratio(float(durations[name][i]), longest) or 0.0,
            f"{PHASE_LABELS[name]}: {seconds(durations[name][i] / 1e9)}",
        )
        for name in PHASES
    )


def _phase_key(words: Mapping[str, str]) -> Html:
    """The legend of a strip, with the words for each phase."""
    return key_of((f"var(--phase-{name})", text) for name, text in words.items())
