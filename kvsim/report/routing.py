"""Says what a router made of its replicas, in words and in rows that terminal and page share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvsim.core.schema import LEG_LABELS, LEGS
from kvsim.core.sums import added
from kvsim.report.wording import Remark, diagnosis, fate, finished, outcome_title, remedies
from kvsim.results.numerals import (
    MISSING,
    count,
    milliseconds,
    number,
    percent,
    plural,
    show,
    signed,
    size,
)
from kvsim.results.statistics import ratio

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
    tables: dict[str, tuple[Sequence[str], Rows]] = {
        REPLICAS: (("replica", *REPLICA_HEAD), named_rows(summary))
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
    remarks = [
        Remark(f"{size(figures['moved_bytes'])} of KV moved from prefill to decode, of {moved}.")
    ]
    if prefill is not None:
        waits = f"{milliseconds(prefill)} for the prefill side, {milliseconds(decode)} for the"
        waits += f" decode side, and {milliseconds(added(network))} for the network"
        remarks.append(Remark(f"On average, a request waited {waits}."))
    if lost := figures["leases_run_out"]:
        remarks.append(
            Remark(
                f"{plural(lost, 'lease')} ran out: the prefill side released blocks that the decode"
                " side had not read, and a real engine would read what came after them; raise"
                " kv_lease_duration, or give the decode side more replicas.",
                "warning",
            )
        )
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
        remarks.append(
            Remark(f"The busiest replica had {times} times as many requests as the mean one.")
        )
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


def named_rows(summary: Mapping[str, Any]) -> Rows:
    """The `replica_rows`, each behind the name of its replica."""
    each = zip(replica_names(summary), replica_rows(summary), strict=True)
    return [[name, *row] for name, row in each]


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
