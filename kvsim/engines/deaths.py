"""How real engines die: outcomes of runs that come to a place where the engine raises."""

from __future__ import annotations

from kvsim.core.request import Request
from kvsim.errors import EngineStopped

_V1 = "AssertionError @ v1/core/sched/scheduler.py"

DEATHS: dict[str, tuple[str, str, str]] = {
    # vLLM V1
    "batch-too-large": (
        "request {id} was preempted by a request of better priority after the step had scheduled"
        " it, and stayed in the batch",
        "use --scheduling-policy fcfs, or a release from 0.10.2 on",
        _V1,
    ),
    "padding-cut": (
        "request {id} was padded to {padded} tokens, and long_prefill_token_threshold cut it to"
        " {most}",
        "set --long-prefill-token-threshold to 0, or to {padded} at least",
        _V1,
    ),
    "state-of-drafts": (
        "request {id}: a step with drafts passes over a whole block of a group with states, and the"
        " engine looks for the key of tokens that are not known yet",
        "draft fewer tokens than a block holds (num_speculative_tokens)",
        "AssertionError @ v1/core/block_pool.py, _get_partial_block_hash",
    ),
    # vLLM 0.6.3.post1
    "swapped-request-in-waiting-queue": (
        "request {id} was preempted for a better priority and swapped out, but the engine put it on"
        " the waiting queue, where it must not be swapped",
        "use --preemption-mode recompute together with --scheduling-policy priority",
        "AssertionError @ core/scheduler.py:883",
    ),
    "recompute-of-parallel-samples": (
        "request {id} has several running samples, and the engine can recompute only single"
        " sequences",
        "leave --preemption-mode to the engine, or use swap",
        "AssertionError @ core/scheduler.py:{line}",
    ),
    "prefill-of-parallel-samples": (
        "request {id} was down to one of its samples, was preempted by recompute and admitted"
        " again; the engine asserts that a prompt belongs to a single sequence",
        "use --preemption-mode swap, or a larger pool",
        "AssertionError @ core/scheduler.py:1277",
    ),
    "stopped-but-not-ended": (
        "request {id} is longer than max_model_len and was stopped before its prompt was complete;"
        " the engine expects it to have ended by the next step",
        "raise --max-model-len, or leave out requests that are longer",
        "AssertionError @ core/scheduler.py:541",
    ),
    "chunk-of-part-blocks": (
        "with chunked prefill and prefix caching, the engine refuses the first chunk unless"
        " max_num_batched_tokens is a multiple of block_size",
        "make --max-num-batched-tokens a multiple of --block-size",
        "ValueError @ core/scheduler.py, _get_num_new_tokens",
    ),
    "freed-while-swapped": (
        "request {id} was freed while its blocks were on the CPU; the prefix cache looks for them"
        " on the GPU",
        "use --preemption-mode recompute together with priorities and prefix caching",
        "KeyError @ core/block/prefix_caching_block.py:507",
    ),
    "swap-space-exhausted": (
        "request {id} had to be swapped out, which needs {need} CPU blocks, and {free} were free",
        "raise --swap-space (GiB of CPU memory), or use --preemption-mode recompute",
        "{rule}",
    ),
    # vLLM 0.3.3
    "double-free": (
        "a block of request {id} was freed more often than it was taken: with a sliding window its"
        " table repeats blocks, and the engine miscounts them",
        "use --preemption-mode recompute, n = 1, or a model without a sliding window",
        "ValueError @ core/block_manager.py:45",
    ),
    # nano-vllm
    "nothing-schedulable": (
        "request {id} ({length} tokens), at the head of the waiting queue, cannot be scheduled, and"
        " nothing is running; the engine asserts that every step does something",
        "raise --num-gpu-blocks-override or --max-num-batched-tokens",
        "{rule}",
    ),
    # SGLang
    "prefill-out-of-memory": (
        "a prefill needs {need:,} pages, {free:,} are free: the next chunk of a prompt is taken on"
        " without a look at memory",
        "give the engine more memory, or lower schedule_conservativeness no further",
        "RuntimeError @ srt/mem_cache/allocation.py:170",
    ),
}
"""Name → what happened, the remedy, and the place in the engine's source where it raises."""

_UNNAMED = "batch-too-large", "padding-cut", "prefill-out-of-memory"
"""Those whose kind is `engine-error`; the others have their name."""


def died(name: str, request: Request, **values: object) -> EngineStopped:
    """The outcome of this name, at a request. `values`: what its texts mention beside the id."""
    what, remedy, rule = (
        text.format(id=request.id, **values) if "{" in text else text for text in DEATHS[name]
    )
    kind = "engine-error" if name in _UNNAMED else name
    return EngineStopped(kind, request.id, what, remedy, rule)
