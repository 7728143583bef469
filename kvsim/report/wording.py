"""Sums up in sentences: a run, and what a router made of its replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from kvsim.core.schema import BLOCKED, LEG_LABELS, LEGS
from kvsim.core.vectors import added
from kvsim.results.load import State, load_words, state_of
from kvsim.results.metrics import LATENCIES
from kvsim.results.numerals import (
    MISSING,
    count,
    milliseconds,
    number,
    percent,
    plural,
    seconds,
    show,
    signed,
    size,
)
from kvsim.results.statistics import LISTED, ratio

Tone = Literal["plain", "warning", "bad"]


TONES: dict[State, Tone] = {
    **dict.fromkeys(("overloaded", "rejecting"), "bad"),
    **dict.fromkeys(("backlogged", "never steady"), "warning"),
}
"""How alarming the load was; steady and unknown loads are not."""


class Bound(NamedTuple):
    """What keeps requests in the queue."""

    head: str
    """What the head of the queue did."""
    causes: tuple[str, ...]
    """The values of `BLOCKED` that mean it."""
    lever: str


BOUNDS = {
    "memory-bound": Bound(
        "lacked blocks", ("blocks", "watermark", "swapped", "preempted"), "more blocks would help"
    ),
    "bound by max_num_seqs": Bound(
        "lacked a slot", ("slots",), "a higher --max-num-seqs would help"
    ),
    "bound by max_num_batched_tokens": Bound(
        "waited behind prefills of others",
        ("tokens",),
        "faster prefill, or more of it found in the cache, would help",
    ),
    "bound by max_loras": Bound(
        "waited for running adapters", ("loras",), "a higher --max-loras would help"
    ),
}
"""What a run is called if the head of the queue was refused most of the time → what that means."""
_COMPUTE = "faster or more GPUs would help"
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
_MOST, _SOME, _LITTLE = 0.5, 0.1, 0.01
"""The share that is most of it, one that is worth a word, and one that alarms nobody."""


class Remark(NamedTuple):
    """One sentence and how alarming it is."""

    text: str
    tone: Tone = "plain"


def verdict(summary: Mapping[str, Any]) -> list[Remark]:
    """What is wrong, what happened to the requests, how the run ended, what preemption cost."""
    remarks = [*diagnosis(summary), fate(summary), *remedies(summary), *_outcome(summary)]
    remarks += [*_engine_errors(summary), _preemption(summary)]
    waits = summary["watermark_wait_s"]
    if waits:
        steps = plural(summary["watermark_wait_steps"], "step")
        text = f"For {seconds(waits)} only the watermark held the head of the queue back ({steps})."
        remarks.append(Remark(text))
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
    """The outcome in few words: `Steady`, `Memory-bound, backlogged`, `Deadlock`, `Engine stopped:
    KIND`; `Finished` where there is no more to say."""
    kind = str(_outcome_of(summary).get("kind") or "unknown").replace("-", " ")
    if kind != "finished":
        return _capital(kind if kind == "deadlock" else f"engine stopped: {kind}")
    state, bounds = state_of(summary), [name for name, _ in _bounds(summary)]
    load = [] if state == "unknown" or (state == "steady" and bounds) else [state]
    # An alarming load comes first; otherwise what bounds it says more.
    names = [*load, *bounds] if TONES.get(state) == "bad" else [*bounds, *load]
    return _capital(", ".join(names) or kind)


def diagnosis(summary: Mapping[str, Any]) -> list[Remark]:
    """What a finished run suffers from, why, and what would help: the first sentence everywhere.
    A second one has the load, where the first one says what kept requests in the queue."""
    if not (finished(summary) and summary.get("num_requests")):
        return []
    state, found = state_of(summary), _bounds(summary)
    load = load_words(summary) if summary["completed"] else "nothing was completed"
    said = [] if found else [load]
    if state == "rejecting":
        total = plural(summary["num_requests"], "request")
        said.insert(0, f"{count(summary['rejected'])} of {total} rejected")
    said += _lacking(summary, state, found)
    if cure := _cure(summary):
        said.append(cure)
    tone = TONES.get(state, "warning" if found or _pressed(summary) else "plain")
    first = Remark(f"{outcome_title(summary)}: {'; '.join(said)}.", tone)
    return [first, Remark(f"{_capital(load)}.", tone)] if found else [first]


def _lacking(
    summary: Mapping[str, Any], state: State, found: Sequence[tuple[str, float]]
) -> Iterator[str]:
    """What requests lacked, how many ran, and what would help; nothing if they lacked nothing."""
    for name, share in found:
        head = "the heads of the queues" if "replicas" in summary else "the head of the queue"
        yield f"{head} {BOUNDS[name].head} {percent(share)} of the time"
    if found or state in ("overloaded", "backlogged"):
        ran = summary["running_mean"] or 0.0
        there = ran + added(summary[f"{each}_mean"] or 0.0 for each in ("waiting", "swapped"))
        yield f"on average, {number(ran)} of {number(there)} requests ran"
        shares = _refused(summary)
        worst = max(shares, key=lambda name: shares[name])
        yield BOUNDS[worst].lever if shares[worst] > _SOME else _COMPUTE
    elif state != "rejecting" and (pressed := _pressed(summary)):
        yield f"{percent(pressed)} of the requests were preempted"
        yield BOUNDS["memory-bound"].lever


def diagnosis_of(record: Mapping[str, Any]) -> list[Remark]:
    """The diagnosis of a run of a search, from its record."""
    replicas = (record.get("config") or {}).get("replicas")
    several = {"replicas": range(replicas)} if replicas else {}
    return diagnosis({**record["figures"], **several, "meta": {"outcome": record["outcome"]}})


def _refused(summary: Mapping[str, Any]) -> dict[str, float]:
    """For what share of the time the head of the queue was refused, by the names in `BOUNDS`; of
    flat figures, too, as the runs of a search have them."""
    whole_s = summary["duration"] * len(summary.get("replicas", [summary])) or 1
    flat = {cause: summary.get(f"head_blocked_s.{cause}", 0.0) for cause in BLOCKED[1:]}
    blocked_s = summary.get("head_blocked_s") or flat
    return {
        name: added(blocked_s[cause] for cause in bound.causes) / whole_s
        for name, bound in BOUNDS.items()
    }


def _pressed(summary: Mapping[str, Any]) -> float:
    """The share of the requests that were preempted; 0 if it is not worth a word."""
    share = (summary.get("preempted_requests") or 0) / summary["num_requests"]
    return share if share > _SOME else 0.0


def _bounds(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The name in `BOUNDS` that the run has, and for what share of the time; at most one."""
    if not (finished(summary) and summary["duration"]):
        return []
    return [(name, share) for name, share in _refused(summary).items() if share > _MOST]


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


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
        tokens = plural(meta.get("block_size") or 0, "token")
        parts.append(f"{count(meta['num_gpu_blocks'])} GPU blocks of {tokens}")
    parts.append(f"prefix caching {'on' if meta.get('prefix_caching') else 'off'}")
    return " · ".join(str(part) for part in parts if part)


def _outcome_of(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    return summary["meta"].get("outcome") or {}


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
    meta = summary["meta"]
    fits = (meta.get("assumed") or {}).get("max_model_len", {})
    if reason == "too-long" and fits.get("source") == "the most that fits":
        return (
            f"give the engine more than {plural(meta['num_gpu_blocks'], 'block')}: max_model_len"
            f" {count(fits['value'])} is the most that fits into them"
        )
    errors = meta.get("engine_errors") or []
    own = {str(error["kind"]): str(error.get("remedy") or "") for error in errors}
    return REMEDIES.get(reason) or own.get(reason, "")


def remedies(summary: Mapping[str, Any]) -> list[Remark]:
    """What to do about the requests that were rejected, by reason, unless the diagnosis says it."""
    found = [(reason, remedy_of(summary, reason)) for reason in summary["rejected_by_reason"]]
    said = ("", _cure(summary))
    return [
        Remark(f"Remedy for {reason}: {remedy}.", "warning")
        for reason, remedy in found
        if remedy not in said
    ]


def _cure(summary: Mapping[str, Any]) -> str:
    """What to do about most rejected requests; empty where few were rejected, or why is unknown."""
    own = {**(summary.get("rejected_by_reason") or {}), "predecessor-rejected": 0}
    chief = max(own, key=lambda reason: own[reason])
    rejecting = finished(summary) and state_of(summary) == "rejecting"
    return remedy_of(summary, chief) if rejecting and own[chief] else ""


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
    remarks = [Remark(f"{what}. {_capital(explanation)}", "bad")]
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
    text = f"{refused} refused at arrival, because the engine would have stopped: {kinds}."
    return [Remark(text, "bad")]


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
    """How much the cost model priced that its profile does not cover; a warning if it matters."""
    outside, whole = (cost.get(f"{name}_ns") for name in ("extrapolated", "priced"))
    if not (outside and whole):
        return []
    share = outside / whole
    text = f"{percent(share)} of the step time is extrapolated beyond measured kernel times."
    return [Remark(text, "warning" if share > _LITTLE else "plain")]


def _sentence(text: Any) -> str:
    words = str(text or "no explanation").strip()
    return words if words.endswith((".", "!", "?")) else f"{words}."


def latency_rows(summary: Mapping[str, Any], statistics: Sequence[str] = LISTED) -> list[list[str]]:
    """A row for each latency: its name and these statistics."""
    return [
        [label, *(show(summary[f"{name}_{kind}_ms"], "ms") for name in statistics)]
        for kind, label in LATENCIES.items()
    ]


def tier_figures(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """What a run copied to and from the tiers below the GPU: label and parts of each line. None
    without a KV connector."""
    moved = summary["meta"].get("kv_offload")
    if not moved:
        return []
    lines = [
        (
            way,
            [
                plural(moved[f"{way}_blocks"], "block"),
                size(moved[f"{way}_bytes"]),
                f"{seconds(moved[f'{way}_copy_s'])} of copies",
            ],
        )
        for way in ("stored", "loaded")
    ]
    below = summary["tier2_hit_tokens"]
    hits = [f"{count(summary['tier1_hit_tokens'])} prompt tokens loaded from CPU memory"]
    hits += [f"{count(below)} from {moved.get('storage', 'the tier below')}"] * bool(below)
    waits = [
        text.format(count(moved[key]))
        for key, text in (
            ("waited_for_stores", "{} requests for a store"),
            ("waited_for_loads_of_others", "{} for the load of another"),
            ("flushed_jobs", "{} stores held up a step"),
            ("refused_stores", "{} stores refused for lack of room"),
        )
        if moved.get(key)
    ]
    flushed = summary["flush_s"]
    waits += [f"steps waited {seconds(flushed)}"] * bool(flushed)
    return [*lines, ("hits", hits), *([("waits", waits)] if waits else [])]


CAUSE_WORDS = {
    "load": ("load", "the better replica was known, and busier, or another rule decided"),
    "stale_index": ("stale index", "its index took the chosen replica to have as much, or more"),
    "index_cap": ("index cap", "its index, four characters a token, ends before prompts differ"),
    "tie": ("tie", "the better replica was in the draw, and was not drawn"),
    "no_index": ("no index", "the router does not look at prompts"),
}
"""Cause of a regret → its name, and what it means."""

BOUND_WORDS = {
    "as_sent_tokens": "as sent: each replica its own cache",
    "by_session_tokens": "each session whole on one replica",
    "pooled_tokens": "pooled cache: one as large as all together",
    "pooled_optimum_tokens": "pooled cache, optimal eviction",
    "unlimited_tokens": "unlimited cache",
}
"""Figure of `kvsim.fleet.figures` → what it is."""

REPLICA_HEAD = ("sent", "prompt tokens", "hits", "preempted", "KV mean", "TTFT p99", "ended")
REGRET_HEAD = ("regret", "decisions", "tokens", "of prompt")
HITS_HEAD = ("prompt tokens", "tokens", "of prompt")
LEG_HEAD = ("leg", "mean")

Rows = list[list[str]]
REPLICAS, TRIP = "replicas", "legs of a request"
REGRETS, HITS = "why the best replica was not chosen", "where hits came from"


def routing_tables(summary: Mapping[str, Any]) -> dict[str, tuple[Sequence[str], Rows]]:
    """The tables of a fleet, each with its head, by title: `REPLICAS`, and `TRIP`, `REGRETS` and
    `HITS` where there is something to show."""
    named = zip(replica_names(summary), replica_rows(summary), strict=True)
    replicas = [[name, *row] for name, row in named]
    tables: dict[str, tuple[Sequence[str], Rows]] = {
        REPLICAS: (("replica", *REPLICA_HEAD), replicas)
    }
    if legs := leg_rows(summary):
        tables[TRIP] = LEG_HEAD, legs
    if (routing := summary["routing"]) and summary["meta"]["prefix_caching"]:
        if regrets := regret_rows(routing):
            tables[REGRETS] = REGRET_HEAD, regrets
        tables[HITS] = HITS_HEAD, hit_rows(routing)
    return tables


def fleet_title(summary: Mapping[str, Any]) -> str:
    """`3 replicas behind sglang-cache_aware`."""
    number, name = len(summary["replicas"]), summary["meta"]["router"]["name"]
    if roles := summary["meta"].get("roles"):
        prefill = roles.count("prefill")
        decode = plural(number - prefill, "decode replica")
        return f"{plural(prefill, 'prefill replica')} and {decode} behind {name}"
    return f"{number} replica{'' if number == 1 else 's'} behind {name}"


def replica_names(summary: Mapping[str, Any]) -> list[str]:
    """`0`, or `0 prefill` in a prefill/decode split, for each replica."""
    roles = summary["meta"].get("roles") or [""] * len(summary["replicas"])
    return [f"{number} {role}".rstrip() for number, role in enumerate(roles)]


def leg_rows(summary: Mapping[str, Any]) -> Rows:
    """A row for each leg of a request in a prefill/decode split, with the columns `LEG_HEAD`;
    none without one."""
    figures = summary.get("handovers")
    if not figures:
        return []
    means = {name: figures[f"mean_{name.removesuffix('_ns')}_ms"] for name in LEGS}
    return [[LEG_LABELS[name], show(mean, "ms")] for name, mean in means.items()]


def _handover_remarks(figures: Mapping[str, Any]) -> list[Remark]:
    """What requests waited for, what moved between the engines, and whose lease ran out."""
    moved = plural(figures["handovers"], "prompt")
    prefill, decode, *network = (
        figures[f"mean_{name}_ms"]
        for name in ("prefill_queue", "decode_queue", "handshake", "network_queue", "transfer")
    )
    volume = size(figures["moved_bytes"])
    remarks = [Remark(f"{volume} of KV moved from prefill to decode, of {moved}.")]
    if prefill is not None:
        waits = f"{milliseconds(prefill)} for the prefill side, {milliseconds(decode)} for the"
        waits += f" decode side, and {milliseconds(added(network))} for the network"
        remarks.append(Remark(f"On average, a request waited {waits}."))
    if lost := figures["leases_run_out"]:
        text = (
            f"{plural(lost, 'lease')} ran out: the prefill side released blocks that the decode"
            " side had not read, and a real engine would read what came after them; raise"
            " kv_lease_duration, or give the decode side more replicas."
        )
        remarks.append(Remark(text, "warning"))
    return remarks


def fleet_verdict(summary: Mapping[str, Any]) -> list[Remark]:
    """What became of the requests, what the router lost, and how even the load was."""
    remarks = [*diagnosis(summary), fate(summary), *remedies(summary)]
    if not finished(summary):
        remarks.insert(0, Remark(f"A replica stopped. {outcome_title(summary)}.", "bad"))
    routing = summary["routing"]
    if routing and summary["meta"]["prefix_caching"]:
        remarks.append(Remark(_regret_words(routing)))
        if routing["bounds"]:
            remarks.append(Remark(_bounds_words(routing)))
    if "handovers" in summary:
        remarks += _handover_remarks(summary["handovers"])
    if summary["load_imbalance"] is not None and len(summary["replicas"]) > 1:
        times = number(summary["load_imbalance"])
        text = f"The busiest replica had {times} times as many requests as the mean one."
        remarks.append(Remark(text))
    return remarks


def _share(tokens: float, routing: Mapping[str, Any]) -> str:
    return show(ratio(tokens, routing["prompt_tokens"]), "share")


def _regret_words(routing: Mapping[str, Any]) -> str:
    cached, best = (_share(routing[key], routing) for key in ("cached_tokens", "best_tokens"))
    said = f"{cached} of prompt tokens were cached where they were sent"
    lost = routing["regret_tokens"]
    if not any(lost.values()):
        return f"{said}, and no other replica ever had more."
    worst = max(lost, key=lost.__getitem__)
    whole = sum(lost.values())
    part = "All" if lost[worst] == whole else percent(lost[worst] / whole)
    reason = f"{part} of the loss: {CAUSE_WORDS[worst][1]}."
    return f"{said}; the best replica each time had {best}. {reason}"


def _bounds_words(routing: Mapping[str, Any]) -> str:
    bounds = routing["bounds"]
    sent, pooled, most = (
        _share(bounds[f"{name}_tokens"], routing) for name in ("as_sent", "pooled", "unlimited")
    )
    return (
        f"From the order of the requests alone, these caches could hit {sent}, one cache as large"
        f" as all of them {pooled}, and one without limit {most}."
    )


def replica_rows(summary: Mapping[str, Any]) -> Rows:
    """A row for each replica, with the columns `REPLICA_HEAD`."""
    return [
        [
            count(each["num_requests"]),
            count(each["total_input_tokens"]),
            show(each["prefix_cache_hit_rate"], "share"),
            count(each["num_preemptions"]),
            show(each["kv_cache_usage_mean"], "share"),
            MISSING if each["p99_ttft_ms"] is None else milliseconds(each["p99_ttft_ms"]),
            each["outcome"],
        ]
        for each in summary["replicas"]
    ]


def regret_rows(routing: Mapping[str, Any]) -> Rows:
    """A row for each cause that cost anything, and their sum, with the columns `REGRET_HEAD`; none
    where nothing was lost."""
    tokens, decisions = routing["regret_tokens"], routing["regret_decisions"]
    rows = [
        [name, count(decisions[cause]), count(tokens[cause]), _share(tokens[cause], routing)]
        for cause, (name, _) in CAUSE_WORDS.items()
        if decisions[cause]
    ]
    lost = sum(tokens.values())
    return rows and [
        *rows,
        ["together", count(sum(decisions.values())), count(lost), _share(lost, routing)],
    ]


_HITS = (
    ("hit_tokens", "hit", False),
    ("luck_tokens", "by chance: cached in a replica drawn at random", False),
    ("affinity_tokens", "by affinity: more of them in the chosen one", True),
    ("waiting_tokens", "gained or lost while requests waited", True),
    ("best_tokens", "cached in the best replica each time", False),
    ("duplicate_tokens", "cached in further replicas, too", False),
)
"""Figure, what it is, and whether it is a difference."""


def hit_rows(routing: Mapping[str, Any]) -> Rows:
    """Where hits came from, and what other ways could have hit, with the columns `HITS_HEAD`."""
    rows = []
    for key, words, change in _HITS:
        tokens, share = routing[key], ratio(routing[key], routing["prompt_tokens"])
        if change and share is not None:
            changed = f"{tokens:+,.0f}".replace("-", "−")
            rows.append([words, changed, signed(round(share, 4), "share")])
        else:
            rows.append([words, count(tokens), show(share, "share")])
    bounds = routing["bounds"] or {}
    return rows + [
        [words, count(bounds[key]), _share(bounds[key], routing)]
        for key, words in BOUND_WORDS.items()
        if key in bounds
    ]
