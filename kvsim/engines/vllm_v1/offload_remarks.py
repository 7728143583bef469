"""What may surprise a user of a tier in CPU memory, told where it happened."""

from __future__ import annotations

from collections.abc import Mapping

PENDING, LOADED_BY_OTHERS, OWN_STORES = "pending", "loaded_by_others", "own_stores"
"""Why a request was told to wait: what it could load is being stored; another request loads it; it
was preempted, and its own stores are under way."""
ANSWERS, REFUSED, PREEMPTED, FLUSHED = "answers", "refused", "preempted", "flushed"
"""A prompt went on where an answer was not stored; a store found no room; transfers for which a
step waited because of a preemption; all transfers for which steps waited."""


def remarks(happened: Mapping[str, int]) -> list[str]:
    """Returns a line for each surprise. `happened`: event → how often it happened in a run."""
    texts = {
        ANSWERS: "{} follow-up prompts found no stored answer: by default the tier stores prompts"
        " only; with offload_prompt_only = false it stores answers, too",
        REFUSED: "{} stores found no room and stored nothing: a step stores all new chunks of a"
        " request or none, and tries again in the next step; raise --kv-offloading-size",
        PENDING: "{} requests waited for a hit that was still on its way to CPU memory, even where"
        " computing it would have taken less time",
        LOADED_BY_OTHERS: "{} requests waited until another one had loaded the same prefix, and"
        " then hit it on the GPU",
        OWN_STORES: "{} requests waited after a preemption until their own stores were over",
        PREEMPTED: "{} transfers of preempted requests held up a whole step",
        FLUSHED: "{} stores held up a whole step, because the blocks that they read were reused;"
        " they include those of preempted requests",
    }
    lines = (text.format(f"{happened[name]:,}") for name, text in texts.items() if happened[name])
    return [f"KV offload: {line}" for line in lines]
