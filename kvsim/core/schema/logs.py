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
