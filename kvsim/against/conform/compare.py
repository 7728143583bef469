"""Where two step logs part, and what that means in words."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

from kvsim.against.conform.record import Record

MEANINGS = {
    "step": "the steps are numbered differently",
    "time": "the steps happen at different times",
    "added": "different requests had arrived",
    "snapshot": "other reports of the workers",
    "inflight": "other requests in flight",
    "load": "other requests in flight",
    "qps": "other rates of requests",
    "tiers": "other overlaps with the caches below the GPU's",
    "cand": "the workers stand differently",
    "match": "another part of the prompt is known",
    "branch": "another rule decides",
    "set": "the worker is drawn from others",
    "chosen": "another worker is chosen",
    "state": "the same decision, but other books after it",
    "rejected": "other requests were turned away",
    "mode": "another kind of step",
    "prefill": "other prompts, chunk sizes or prefix hits",
    "decode": "other requests decode, or in another order",
    "retracted": "other requests were retracted",
    "preempted": "another victim, or another means of preemption",
    "aborted": "other requests were aborted",
    "swapped_out": "other requests were swapped out",
    "swapped_in": "other requests came back from the CPU",
    "ignored": "other requests were given up",
    "waiting": "the waiting queues differ in length",
    "running": "the running queues differ in length",
    "swapped": "the swapped queues differ in length",
    "chunked": "another prompt is unfinished",
    "full": "one engine finds its running batch full",
    "free": "other numbers of free token slots",
    "evictable": "other cached tokens that no request holds",
    "protected": "other cached tokens that requests hold",
    "rows": "other numbers of free request slots",
    "ratio": "another ratio of expected new tokens",
    "free_gpu_blocks": "other numbers of free GPU blocks",
    "free_cpu_blocks": "other numbers of free CPU blocks",
    "batched_tokens": "other charges to the token budget",
    "blocks_to_copy": "other copies on write",
    "blocks_to_swap_in": "other numbers of blocks swapped in",
    "blocks_to_swap_out": "other numbers of blocks swapped out",
    "q": "the queues have another order",
    "bt": "the same decisions, but other physical blocks",
    "kv": "the same decisions, but other token slots",
    "finished": "other requests finished",
    "free_gpu_blocks_end": "other numbers of blocks were given back",
    "free_end": "other numbers of token slots were given back",
    "evictable_end": "other tokens entered the cache",
    "drain": "one log processes a pending result without scheduling",
    "error": "one engine ended here",
}
"""Field of a record → what a difference in it means. In order of cause: the first one that differs
is the one to look at."""


class Divergence(NamedTuple):
    """The first record in which two logs differ."""

    record: int
    step: int | None
    fields: dict[str, tuple[Any, Any]]
    """Differing field → the values of the two logs, in order of cause."""

    def __str__(self) -> str:
        field, (a, b) = next(iter(self.fields.items()))
        meaning = MEANINGS.get(field, "the records differ")
        others = ", ".join(list(self.fields)[1:])
        also = f"; also {others}" if others else ""
        step = "" if self.step is None else f", step {self.step}"
        return f"record {self.record}{step}: {meaning} ({field}: {a} | {b}{also})"


def first_divergence(one: list[Record], other: list[Record]) -> Divergence | None:
    """The first difference; None where the logs are equal.

    Extra fields do no harm. Of an error record only step, time and kind count.
    """
    for number, (a, b) in enumerate(zip_longest(one, other)):
        fields = _differences(a, b)
        if fields:
            return Divergence(number, (a or b or {}).get("step"), fields)
    return None


def error_kind(record: Record | None) -> str | None:
    """`deadlock`, `max_steps` or `engine error`; None for a step."""
    if record is None or "error" not in record:
        return None
    text = str(record["error"])
    if text.startswith("deadlock"):
        return "deadlock"
    return text if text == "max_steps" else "engine error"


def _differences(a: Record | None, b: Record | None) -> dict[str, tuple[Any, Any]]:
    if a is None or b is None:
        missing = "the log ends"
        return {"error": (missing if a is None else "a step", missing if b is None else "a step")}
    if error_kind(a) != error_kind(b):
        return {"error": (a.get("error", "a step"), b.get("error", "a step"))}
    ignored = {"error"} if "error" in a else set()
    shared = [key for key in (*MEANINGS, *a) if key in a and key in b and key not in ignored]
    different = {key: (a[key], b[key]) for key in shared if a[key] != b[key]}
    if ("drain" in a) != ("drain" in b):
        different["drain"] = ("drain" in a, "drain" in b)
    return different
