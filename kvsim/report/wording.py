"""Sums a run up in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from kvsim.core.sums import added
from kvsim.results.load import State, load_words, state_of
from kvsim.results.numerals import count, number, percent, plural, seconds

Tone = Literal["plain", "warning", "bad"]


UNSTEADY: dict[State, Tone] = {"overloaded": "bad", "never steady": "warning"}
"""What a run that did not keep up is called, and how alarming it is."""


BOUNDS = {
    "memory-bound": ("lacked blocks", ("blocks", "watermark", "swapped", "preempted")),
    "bound by max_num_seqs": ("lacked a slot", ("slots",)),
    "bound by max_num_batched_tokens": ("waited behind prefills of others", ("tokens",)),
    "bound by max_loras": ("waited for running adapters", ("loras",)),
}
"""What a run is called if the head of the queue was refused most of the time → what the head did,
and the values of `BLOCKED` that mean it."""
REMEDIES = {
    "too-long": "raise --max-model-len, or choose a --model with longer sequences; without chunked"
    " prefill, raise --max-num-batched-tokens, too",
    "never-fits": "give the engine more blocks: a larger GPU, --tensor-parallel-size,"
    " --gpu-memory-utilization or --num-gpu-blocks-override",
    "queue-full": "raise max_queued_requests, add replicas, or lower --request-rate",
    "predecessor-rejected": "they follow a rejected request of their conversation: see its remedy",
    "lost-by-engine": "give the engine more memory; the real one loses them, too",
    "not-served": "see the rejections of the engine that computes prompts",
}
"""Why a request was rejected → what to do about it."""
_MOST = 0.5
"""The share of the time that is most of it."""


class Remark(NamedTuple):
    """One sentence and how alarming it is."""

    text: str
    tone: Tone = "plain"


def verdict(summary: Mapping[str, Any]) -> list[Remark]:
    """What happened to the requests, how the run ended, its load, and what preemption cost.

    The load comes first if the engine did not keep up, then what bound the run, if anything did.
    """
    ending = [*bound(summary), fate(summary), *remedies(summary), *_outcome(summary)]
    load = _load(summary)
    remarks = [*load, *ending] if state_of(summary) in UNSTEADY else [*ending, *load]
    remarks += [*_engine_errors(summary), _preemption(summary)]
    waits = summary["watermark_wait_s"]
    if waits:
        remarks.append(
            Remark(
                f"For {seconds(waits)} only the watermark held the head of the queue back"
                f" ({plural(summary['watermark_wait_steps'], 'step')})."
            )
        )
    if summary["meta"].get("oracles"):
        oracles = ", ".join(summary["meta"]["oracles"])
        remarks.append(Remark(f"ORACLE: {oracles} sees the future; no engine can do that."))
    return remarks + _extrapolation(summary["meta"].get("cost") or {})


def measured(meta: Mapping[str, Any]) -> bool:
    """Whether step times come from measurements on the hardware in question."""
    return bool((meta.get("cost") or {}).get("kind") == "measured")


def time_source(meta: Mapping[str, Any]) -> str:
    """`MEASURED`, `SCALED` or `ESTIMATED`, with the source that the cost model names."""
    cost = meta.get("cost") or {}
    source = cost.get("source")
    label = {"measured": "MEASURED", "scaled": "SCALED"}.get(str(cost.get("kind")), "ESTIMATED")
    return f"{label} step times ({source})" if source else f"{label} step times"


def assumed(meta: Mapping[str, Any]) -> list[str]:
    """The settings that nobody gave, by who chose them: `block_size 16, ... (vLLM V1 0.33.0)`."""
    by_source: dict[str, list[str]] = {}
    for key, default in (meta.get("assumed") or {}).items():
        words = f"{key} {setting_words(default['value'])}"
        by_source.setdefault(default["source"], []).append(words)
    return [f"{', '.join(settings)} ({source})" for source, settings in by_source.items()]


def setting_words(value: object) -> str:
    """The value of a setting: `on`, `off`, or as it is."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def outcome_title(summary: Mapping[str, Any]) -> str:
    """The outcome in few words: `Finished`, `Finished, memory-bound`, `Deadlock`, `Engine stopped:
    KIND`."""
    kind = str(_outcome_of(summary).get("kind") or "unknown").replace("-", " ")
    named = kind if kind in ("finished", "deadlock") else f"engine stopped: {kind}"
    return ", ".join((named[0].upper() + named[1:], *(name for name, _ in _bounds(summary))))


def bound(summary: Mapping[str, Any]) -> list[Remark]:
    """For what the head of the queue was refused most of the time, if it was, in a finished run."""
    head = "the heads of the queues" if "replicas" in summary else "the head of the queue"
    return [
        Remark(
            f"{name[0].upper()}{name[1:]}: {head} {BOUNDS[name][0]} {percent(share)} of the time;"
            f" on average, {number(summary['running_mean'])} requests ran and"
            f" {number(summary['waiting_mean'])} waited.",
            "warning",
        )
        for name, share in _bounds(summary)
    ]


def _bounds(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The name in `BOUNDS` that the run has, and for what share of the time; at most one."""
    if not (finished(summary) and summary["duration"]):
        return []
    whole_s = summary["duration"] * len(summary.get("replicas", [summary]))
    shares = {
        name: added(summary["head_blocked_s"][cause] for cause in causes) / whole_s
        for name, (_, causes) in BOUNDS.items()
    }
    return [(name, share) for name, share in shares.items() if share > _MOST]


def finished(summary: Mapping[str, Any]) -> bool:
    """Whether the run finished, instead of the engine stopping."""
    return bool(_outcome_of(summary).get("kind") == "finished")


def subject(meta: Mapping[str, Any]) -> str:
    """What was simulated: engine, model, hardware and block pool."""
    config = meta.get("config") or {}
    parts = [meta.get("engine") or config.get("engine")]
    if meta.get("model"):
        parts.append(f"{meta['model']} on {meta.get('hardware', 'unknown hardware')}")
    if meta.get("num_gpu_blocks"):
        parts.append(
            f"{count(meta['num_gpu_blocks'])} GPU blocks of {meta.get('block_size')} tokens"
        )
    parts.append(f"prefix caching {'on' if meta.get('prefix_caching') else 'off'}")
    return " · ".join(str(part) for part in parts if part)


def _outcome_of(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    return summary["meta"].get("outcome") or {}


def _load(summary: Mapping[str, Any]) -> list[Remark]:
    """Offered and served rates."""
    if not (summary["completed"] and finished(summary)):
        return []
    return [Remark(load_words(summary), UNSTEADY.get(state_of(summary), "plain"))]


def fate(summary: Mapping[str, Any]) -> Remark:
    """What became of the requests."""
    total, completed = summary["num_requests"], summary["completed"]
    if not total:
        return Remark("No requests.", "warning")
    within = f" in {seconds(summary['duration'])}"
    if completed == total:
        return Remark(f"{plural(total, 'request')} completed{within}, none rejected.")
    parts = [f"{count(completed)} completed"]
    if summary["rejected"]:
        reasons = summary["rejected_by_reason"]
        named = ", ".join(
            reason if len(reasons) == 1 else f"{count(n)} {reason}" for reason, n in reasons.items()
        )
        parts.append(f"{count(summary['rejected'])} rejected ({named})")
    if aborted := summary.get("aborted"):
        parts.append(f"{count(aborted)} given up by their clients")
    if summary["unfinished"]:
        parts.append(f"{count(summary['unfinished'])} unfinished")
    return Remark(f"{plural(total, 'request')}{within}: {', '.join(parts)}.", "warning")


def remedy_of(summary: Mapping[str, Any], reason: str) -> str:
    """What to do about requests that were rejected for this reason; empty if nothing is known.

    Where the engine would have stopped, that is what its rule says.
    """
    errors = summary["meta"].get("engine_errors") or []
    own = {str(error["kind"]): str(error.get("remedy") or "") for error in errors}
    return REMEDIES.get(reason) or own.get(reason, "")


def remedies(summary: Mapping[str, Any]) -> list[Remark]:
    """What to do about the requests that were rejected, by reason."""
    found = [(reason, remedy_of(summary, reason)) for reason in summary["rejected_by_reason"]]
    return [
        Remark(f"Remedy for {reason}: {remedy}.", "warning") for reason, remedy in found if remedy
    ]


def _outcome(summary: Mapping[str, Any]) -> list[Remark]:
    if finished(summary):
        return []
    outcome = _outcome_of(summary)
    where = []
    if outcome.get("time_s") is not None:
        where.append(f"after {seconds(outcome['time_s'])}")
    if outcome.get("step") is not None:
        where.append(f"at step {count(outcome['step'])}")
    explanation = _sentence(outcome.get("explanation"))
    if outcome.get("request") and str(outcome["request"]) not in explanation.split():
        where.append(f"on request {outcome['request']}")
    what = f"{outcome_title(summary)} {' '.join(where)}".strip()
    remarks = [Remark(f"{what}. {explanation[0].upper()}{explanation[1:]}", "bad")]
    if outcome.get("remedy"):
        remarks.append(Remark(f"Remedy: {_sentence(outcome['remedy'])}", "bad"))
    if outcome.get("rule"):
        remarks.append(Remark(f"Rule of the engine: {_sentence(outcome['rule'])}", "bad"))
    return remarks


def _engine_errors(summary: Mapping[str, Any]) -> list[Remark]:
    """Requests refused at arrival because the engine would have died or got stuck on them."""
    errors = summary["meta"].get("engine_errors") or []
    if not errors:
        return []
    kinds = ", ".join(sorted({str(error["kind"]).replace("-", " ") for error in errors}))
    refused = plural(len(errors), "request")
    return [
        Remark(
            f"{refused} refused at arrival, because the engine would have stopped: {kinds}.", "bad"
        )
    ]


def _preemption(summary: Mapping[str, Any]) -> Remark:
    total = summary["num_preemptions"]
    if not total:
        return Remark("No preemptions.")
    by_mode = summary["num_preemptions_by_mode"]
    costs = []
    if by_mode["recompute"]:
        again = plural(summary["recomputed_tokens"], "token")
        costs.append(f"{count(by_mode['recompute'])} by recompute, {again} computed again")
    if by_mode["swap"]:
        moved = f"{plural(summary['swapped_out_blocks'], 'block')} out,"
        moved += f" {count(summary['swapped_in_blocks'])} back in"
        busy = summary["link_busy_share"]
        link = f", link busy {percent(busy)} of the time" if busy else ""
        costs.append(f"{count(by_mode['swap'])} by swap, {moved}{link}")
    share = percent(summary["preempted_requests"] / summary["num_requests"])
    return Remark(
        f"{plural(total, 'preemption')}, in {share} of the requests: {'; '.join(costs)}.", "warning"
    )


def _extrapolation(cost: Mapping[str, Any]) -> list[Remark]:
    """A warning where the cost model priced steps that its profile does not cover."""
    outside = cost.get("extrapolated_ns")
    if not outside:
        return []
    share = percent(outside / cost["priced_ns"])
    return [Remark(f"{share} of the step time was priced outside the profile.", "warning")]


def _sentence(text: Any) -> str:
    words = str(text or "no explanation").strip()
    return words if words.endswith((".", "!", "?")) else f"{words}."
