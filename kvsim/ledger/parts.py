"""Names of the parts that times and prompt tokens are split into, and what they mean.

**Time of a request**, from its arrival to its end, in nanoseconds; every moment counts once.

Before its first step, and nothing else of a step counts while it waits:

* `waiting_step`: the step under way. It arrived when that step was composed already, or its own
  begins only when that one ends (asynchronous scheduling).
* `waiting_slots`, `waiting_prefills`, `waiting_blocks`, `waiting_watermark`, `waiting_swap_ins`,
  `waiting_preemptions`: steps whose head of the queue was refused, for `max_num_seqs`; for
  `max_num_batched_tokens`, so that all are behind prefills of others; for too few free blocks; for
  blocks that the watermark holds; because swapped requests go first; because of a preemption in
  that step. All who wait do so for the reason of the head, until the next step begins. With
  asynchronous scheduling that is the reason of the step that runs, composed one step before.

While it runs:

* `own_prefill`: kernels of the steps from its first one to its first token.
* `own_decode`: kernels of later steps; of steps with prompts of others, what they would take
  without those.
* `interference`: what is left of the kernels of such steps; of steps without any decode, all.
* `recompute`: kernels of steps that compute again what a preemption threw away.
* `swap_stall`: copies of others, which block the step.
* `link_queue`: the wait for the link, be it for its own copies or for those of others.
* `host_overhead`: the host's part of its steps, and the time between steps.

After a preemption:

* `preempted_waiting`: without blocks, until it is admitted again.
* `swap_out`, `swap_in`: being copied, with those that are copied in the same step.
* `swapped_waiting`: with its blocks on the CPU.

**Prompt tokens** at the first admission:

* `num_cached`: the hits.
* `last_block`: found, but computed for the rule that at least one token must be.
* `evicted`: computed before; they, or a block before them, were evicted since.
* `concurrent`: a request admitted earlier was still to compute them.
* `partial_block`: computed before, but not as a whole block of this prompt.
* `other_salt`: computed before, under another cache salt only. (A scope is no such thing: it says
  that equal ids mean different tokens.)
* `cold`: never computed before.
* `unreached`: it lost its blocks, was given up, or the run ended, before its prompt was so far.

That is also their order in a prompt.

What preemptions cost comes on top: `recached_tokens` were found again, `recomputed_tokens` not.
"""

from __future__ import annotations

from kvsim.recorder import BLOCKED

_TIME = {
    "waiting_step": "waiting for the step under way",
    "waiting_slots": "waiting for a slot (max_num_seqs)",
    "waiting_prefills": "waiting behind prefills of others",
    "waiting_blocks": "waiting for free blocks",
    "waiting_watermark": "waiting, held by the watermark",
    "waiting_swap_ins": "waiting behind swapped requests",
    "waiting_preemptions": "waiting, closed by a preemption",
    "own_prefill": "own prefill",
    "own_decode": "own decode",
    "interference": "interference by prefills of others",
    "preempted_waiting": "preempted, waiting",
    "recompute": "recompute",
    "swap_out": "swap-out",
    "swapped_waiting": "swapped out, waiting",
    "swap_in": "swap-in",
    "swap_stall": "held up by swaps of others",
    "link_queue": "queue of the link",
    "host_overhead": "host overhead",
}
TIME_PARTS = tuple(f"{name}_ns" for name in _TIME)
"""Columns of requests, in order; with `PROMPT_PARTS` and `KERNELS` see above."""
TIME_LABELS = {f"{name}_ns": label for name, label in _TIME.items()}
"""For people; those of times to wait begin with `waiting`."""

WAITING_FOR = dict(zip(BLOCKED, TIME_PARTS, strict=False))
"""Value of `recorder.BLOCKED` → the part of a request that waits through such a step."""

_PROMPT = {
    "num_cached": "hit",
    "last_block": "last-token rule",
    "evicted": "evicted for capacity",
    "concurrent": "being computed by another request",
    "partial_block": "lost to block granularity",
    "other_salt": "another cache salt",
    "cold": "cold",
    "unreached": "not reached",
}
PROMPT_PARTS = tuple(f"{name}_tokens" for name in _PROMPT)
PROMPT_LABELS = {f"{name}_tokens": label for name, label in _PROMPT.items()}

_KERNELS = {
    "host": "host",
    "dense": "linear layers",
    "attention_decode": "attention, decode",
    "attention_prefill": "attention, prompts",
    "head": "logits",
    "copies": "copied blocks",
    "unexplained": "not explained by the cost model",
}
KERNELS = tuple(f"{name}_ns" for name in _KERNELS)
"""Columns of steps."""
KERNEL_LABELS = {f"{name}_ns": label for name, label in _KERNELS.items()} | {
    "transfer_ns": "swap copies",
    "link_wait_ns": "waiting for the link",
}
"""Also of the two columns that make the sum the whole step."""
