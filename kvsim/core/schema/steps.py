"""Columns of steps."""

from __future__ import annotations

from functools import partial

from kvsim.core.schema.column import Column, Source, Table, part, seconds

_step = partial(Column, source=Source.STEP)
_state = partial(Column, source=Source.STATE)
_sglang = partial(Column, source=Source.SGLANG)
_kernel = partial(part, source=Source.KERNEL)
_drafts = partial(Column, source=Source.DRAFTS)
_stages = partial(part, source=Source.STAGES)

_BLOCKED = (
    ("", "no request waits, or none was refused"),
    ("slots", "`max_num_seqs`"),
    ("tokens", "`max_num_batched_tokens`"),
    ("blocks", "too few free blocks"),
    ("watermark", "enough free blocks, but the watermark holds them"),
    ("swapped", "prompts wait until every swapped request is back"),
    ("preempted", "a preemption in this step"),
    ("loras", "`max_loras`: those who wait have other adapters than those who run"),
)
BLOCKED = tuple(name for name, _ in _BLOCKED)
"""Names of the values of column `blocked`."""

STEPS = Table(
    "steps",
    "One row per step. Kernels, swap copies, the wait for the link, flushes and the wait for slower"
    " ranks add up to its time.",
    (
        seconds("start"),
        seconds("end"),
        _step("start_ns", "ns", "it is composed"),
        _step("end_ns", "ns", "its tokens exist"),
        _step("transfer_ns", "ns", "on the link", label="swap copies"),
        _step("link_wait_ns", "ns", "before its copies", label="waiting for the link"),
        _step("flush_ns", "ns", "for stores of blocks that it reuses", label="flushed stores"),
        _step("rank_wait_ns", "ns", "for the slowest rank", label="waiting for slower ranks"),
        _step("prefill_seqs", "requests", "with prompt tokens in this step"),
        _step("prefill_tokens", "tokens", "prompt tokens computed; prefix hits are not among them"),
        _step("cached_tokens", "tokens", "prompt tokens whose computation a prefix hit saved"),
        _step("decode_seqs", "sequences", "that produce one more token"),
        _step("context_tokens", "tokens", "of these sequences, those of this step included"),
        _step("batched_tokens", "tokens", "charged to `max_num_batched_tokens`"),
        _step("preempted_recompute", "requests", "preempted; their KV is computed again"),
        _step("preempted_swap", "requests", "preempted; their blocks are copied to the CPU"),
        _step("swapped_in", "requests", "whose blocks are copied back to the GPU"),
        _step("swap_out_blocks", "blocks", "copied to the CPU"),
        _step("swap_in_blocks", "blocks", "copied back to the GPU"),
        _step("copied_blocks", "blocks", "copied on write"),
        _step("ignored", "requests", "that the engine gave up"),
        _state("waiting", "requests", "in the waiting queue"),
        _state("running", "requests", "in the batch"),
        _state("swapped", "requests", "with their blocks on the CPU"),
        _state("used_blocks", "blocks", "of the GPU, in a table of a request"),
        _state("cached_blocks", "blocks", "of the GPU, in no table; their content can be hit"),
        _state("free_blocks", "blocks", "of the GPU, in no table, without content"),
        _state("cpu_used_blocks", "blocks", "of the CPU, in a table of a request"),
        _state(
            "empty_slots", "slots", "of used GPU blocks without a token: internal fragmentation"
        ),
        _state("stranded_blocks", "blocks", "free, unfit for admissions: external fragmentation"),
        _state("blocked", "", "why the head of the waiting queue was refused", codes=_BLOCKED),
        _step("finished", "requests", "that end with this step"),
        _sglang(
            "protected_blocks",
            "blocks",
            "of `used_blocks`, in the radix tree; the rest are private to a request",
        ),
        _sglang(
            "new_token_ratio_ppm",
            "ppm",
            "new-token ratio: share of the announced tokens that requests are expected to generate",
        ),
        _stages("send_ns", "sending activations", "from each stage of the pipeline to the next"),
        _stages(
            "stage_wait_ns",
            "waiting for stages",
            "which still have the step before it, or for the last tokens of its requests",
        ),
        _drafts("verified_seqs", "sequences", "whose drafts it verifies"),
        _drafts("draft_tokens", "tokens", "drafts that it verifies"),
        _drafts("accepted_tokens", "tokens", "of these, accepted"),
        _kernel("host_ns", "host", "the host's part, and what nothing else explains"),
        _kernel("dense_ns", "linear layers", "but for the logits"),
        _kernel("attention_decode_ns", "attention, decode", "one token per sequence"),
        _kernel("attention_prefill_ns", "attention, prompts", "the rest of a step with prompts"),
        _kernel("head_ns", "logits", "of the tokens sampled"),
        _kernel("copies_ns", "copied blocks", "copy-on-write"),
        _kernel("drafter_ns", "drafter", "makes the drafts of the next step"),
        _kernel(
            "unexplained_ns",
            "not explained by the cost model",
            "all of the step, where it names no kernels",
        ),
    ),
)

STEP_COLUMNS = STEPS.names(Source.STEP, Source.STATE)
"""Columns recorded for every step, in the order of its row."""

STAGE_COLUMNS = STEPS.names(Source.STAGES)
"""Columns that a row of a pipeline has after these (`Host.gauges`)."""

SGLANG_COLUMNS = STEPS.names(Source.SGLANG)
"""Columns that a row of SGLang has after these (`Scheduler.gauges`)."""
