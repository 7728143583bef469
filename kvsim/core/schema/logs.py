"""Columns of the log of transitions and of the block map."""

from __future__ import annotations

from functools import partial

from kvsim.core.schema.column import Column, Source, Table

_transition = partial(Column, source=Source.TRANSITION)
_map = partial(Column, source=Source.BLOCK_MAP)


_KINDS = (
    ("scheduled", "first admitted by a step that waits for one in flight"),
    ("preempted", "lost its blocks; value: tokens whose KV existed"),
    ("swapped_out", "value: blocks"),
    ("swapped_in", "value: blocks"),
    ("readmitted", "has blocks again after it was preempted"),
    ("caught_up", "a chunk that computes nothing for the second time, before the first token"),
    ("recovered", "a chunk that leaves but the newest token: a decode, unless `resumed` follows"),
    ("resumed", "the last chunk of a re-admitted request: it decodes from the end of the step on"),
    ("held", "the KV that it could load is still being stored, or another request loads it"),
    ("looked_up", "after `held`: it is known what it can load"),
    ("loading", "waiting, it has blocks into which KV is loaded; value: tokens"),
    ("loaded", "its load is over"),
    ("reloading", "as `loading`, after it was preempted"),
    ("reloaded", "as `loaded`, after it was preempted"),
    ("passed_over", "running, it gets no slot: blocks are released late"),
    ("continued", "after `passed_over`: it gets its slot"),
)
KINDS = tuple(name for name, _ in _KINDS)
"""Names of the values of a transition's column `kind`."""

TRANSITIONS = Table(
    "transitions",
    "One row per preemption, swap, load and re-admission, in order of composing.",
    (
        _transition("request", "", "its `index`"),
        _transition("kind", "", "what happened", codes=_KINDS),
        _transition("time_ns", "ns", "start of the step in which it shows"),
        _transition("value", "tokens or blocks", "as `kind` says; else 0"),
    ),
)

BLOCK_MAP = Table(
    "block_map",
    "One row per sample and group of neighbouring blocks; a sample holds until the next one.",
    (
        _map("time_ns", "ns", "when the sample was taken"),
        _map("on_cpu", "", "1: blocks of the CPU pool, or chunks of a tier in CPU memory"),
        _map(
            "first_block", "", "the group's first block, counted from the pool's first usable one"
        ),
        _map("blocks", "blocks", "in the group"),
        _map("free_blocks", "blocks", "in no table, without content"),
        _map("cached_blocks", "blocks", "in no table, content can be hit"),
        _map("owned_blocks", "blocks", "in tables of one request"),
        _map("shared_blocks", "blocks", "in tables of several requests"),
        _map("kept_blocks", "blocks", "in no table: a declared prefix, a reservation, a leak"),
        _map("storing_blocks", "blocks", "of the tier, being written"),
        _map("loading_blocks", "blocks", "of the tier, being read"),
        _map("owner", "", "index of the request that owns most owned blocks; -1: none", least=-1),
        _map("owner_blocks", "blocks", "owned by it"),
    ),
)


_decision = partial(Column, source=Source.ROUTING, null=True)

_CAUSES = (
    ("", "nothing: no eligible replica had more of the prompt than the chosen one"),
    ("load", "the router knew the better replica, and load or another rule decided against it"),
    ("stale_index", "its index took the chosen replica to have as much, or more"),
    ("index_cap", "its index ends before the prompts differ (`Router.index_limit_tokens`)"),
    ("tie", "the better replica was in the draw, and was not drawn"),
    ("no_index", "the router keeps no index of prompts"),
)
CAUSES = tuple(name for name, _ in _CAUSES)
"""Names of the values of a decision's column `cause`."""

ROUTING = Table(
    "routing",
    "One row per request of the trace, as its router decided; null: it was sent to nobody. Cached"
    " tokens are those that an admission at that moment would find in the engine's real cache,"
    " which no router sees. `best_tokens - cached_tokens` is the regret of a decision.",
    (
        Column("request", "", "its `index` in the trace", Source.ROUTING),
        _decision("time_ns", "ns", "when the router decided"),
        _decision("replica", "", "the chosen one"),
        _decision("cached_tokens", "tokens", "of its prompt, in the cache of the chosen replica"),
        _decision("best_replica", "", "an eligible one with the most; the chosen one if it has"),
        _decision("best_tokens", "tokens", "cached there"),
        _decision("cause", "", "why the chosen replica had less than the best", codes=_CAUSES),
        _decision("expected_tokens", "tokens", "cached, as the router took the chosen one to have"),
        _decision("best_expected_tokens", "tokens", "the same of the best replica"),
        _decision("eligible", "replicas", "that could be chosen"),
        _decision("eligible_tokens", "tokens", "cached in all of them together"),
        _decision("candidates", "replicas", "among which the router drew"),
        _decision("in_flight", "requests", "sent to the chosen replica before, and not over"),
        _decision("least_in_flight", "requests", "the fewest of an eligible replica"),
    ),
)


_handover = partial(Column, source=Source.HANDOVER, null=True)


def _part(name: str, label: str, meaning: str) -> Column:
    return Column(name, "ns", meaning, Source.LEG, null=True, label=label)


HANDOVERS = Table(
    "handovers",
    "One row per request of the trace in a prefill/decode split. The parts of the time of a request"
    " that completed add up to its E2EL, to the nanosecond, and all but the last to its TTFT; null"
    " for the others.",
    (
        Column("request", "", "its `index` in the trace", Source.HANDOVER),
        _handover("prefill_replica", "", "that computed its prompt; null: none was asked"),
        _handover("decode_replica", "", "that generated its output; null: none was asked"),
        _handover("moved_bytes", "bytes", "of KV that the decode engine read, on all its GPUs"),
        _handover("lease_ran_out", "", "1: the prefill engine released the blocks unread"),
        _part("prefill_queue_ns", "queue, prefill side", "until its first step there"),
        _part("prefill_ns", "prefill", "until its prompt is computed"),
        _part("decode_queue_ns", "queue, decode side", "until its blocks are allocated there"),
        _part("handshake_ns", "handshake", "the two engines meet for the first time"),
        _part("network_queue_ns", "queue of the network", "behind transfers of others"),
        _part("transfer_ns", "transfer", "of its KV"),
        _part("resume_ns", "resume delay", "end of the current step, and a wait for a slot"),
        _part("last_token_ns", "last prompt token again", "until its first token"),
        _part("decode_ns", "decode", "until its last token"),
    ),
)
LEGS = HANDOVERS.names(Source.LEG)
"""Parts of the time of a request, in order."""
LEG_LABELS = HANDOVERS.labels(Source.LEG)
