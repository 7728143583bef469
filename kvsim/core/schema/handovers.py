"""Columns of the handovers of a prefill/decode split."""

from __future__ import annotations

from functools import partial

from kvsim.core.schema.column import Column, Source, Table

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
