"""Columns of steps."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from struct import Struct

from kvsim.schema.column import Column, Source, Table, part, seconds

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

Census = tuple[int, int, int, int, int, int]
"""How many blocks are in which state: GPU blocks used, idle with content, and blank; CPU blocks
used; empty token slots in used GPU blocks; free GPU blocks that no admission can use."""

CENSUS = STEP_COLUMNS[STEP_COLUMNS.index("used_blocks") : STEP_COLUMNS.index("blocked")]
"""The columns of a `Census`."""


def packer(*columns: str) -> Callable[..., bytes]:
    """Returns a function that makes a row as bytes from the values of these columns, in the order
    of `STEP_COLUMNS`. All others are 0."""
    return Struct("".join("q" if name in columns else "8x" for name in STEP_COLUMNS)).pack


pack = packer(*STEP_COLUMNS)
"""A row as bytes, from the values of `STEP_COLUMNS`."""

_STATE = "waiting", "running", *CENSUS, "blocked", "finished"

decode_row = packer(
    *("start_ns", "end_ns", "decode_seqs", "context_tokens", "batched_tokens"),
    *("preempted_recompute", "ignored", *_STATE),
)
"""The row of a step of decodes alone, from these values in order."""

prompt_row = packer(
    *("start_ns", "end_ns", "prefill_seqs", "prefill_tokens", "cached_tokens", "decode_seqs"),
    *("context_tokens", "batched_tokens", "ignored", *_STATE),
)
"""The row of a step with prompts, without preemptions, from these values in order."""


def step_row(
    *,
    start_ns: int = 0,
    end_ns: int = 0,
    transfer_ns: int = 0,
    link_wait_ns: int = 0,
    flush_ns: int = 0,
    rank_wait_ns: int = 0,
    prefill_seqs: int = 0,
    prefill_tokens: int = 0,
    cached_tokens: int = 0,
    decode_seqs: int = 0,
    context_tokens: int = 0,
    batched_tokens: int = 0,
    preempted_recompute: int = 0,
    preempted_swap: int = 0,
    swapped_in: int = 0,
    swap_out_blocks: int = 0,
    swap_in_blocks: int = 0,
    copied_blocks: int = 0,
    ignored: int = 0,
    waiting: int = 0,
    running: int = 0,
    swapped: int = 0,
    census: Census = (0, 0, 0, 0, 0, 0),
    blocked: int = 0,
    finished: int = 0,
) -> bytes:
    """A step as bytes, for `Recorder.packed`; what is not given is 0.

    `census`: the columns from `used_blocks` to `stranded_blocks`, as `Tables.census` returns them.
    """
    return pack(
        start_ns, end_ns, transfer_ns, link_wait_ns, flush_ns, rank_wait_ns, prefill_seqs,
        prefill_tokens, cached_tokens, decode_seqs, context_tokens, batched_tokens,
        preempted_recompute, preempted_swap, swapped_in, swap_out_blocks, swap_in_blocks,
        copied_blocks, ignored, waiting, running, swapped, *census, blocked, finished,
    )  # fmt: skip


def completed_row(
    row: bytes,
    start_ns: int,
    end_ns: int,
    transfer_ns: int = 0,
    link_wait_ns: int = 0,
    flush_ns: int = 0,
    rank_wait_ns: int = 0,
    finished: int = 0,
) -> bytes:
    """A row that was made when its step was composed, with what is known when it is over."""
    times = _TIMES.pack(start_ns, end_ns, transfer_ns, link_wait_ns, flush_ns, rank_wait_ns)
    return times + row[_TIMES.size : _FINISHED_AT] + _FINISHED.pack(finished) + row[_FINISHED_END:]


def finished_row(row: bytes, finished: int) -> bytes:
    """A row that was complete, but for who finishes with the step."""
    return row[:_FINISHED_AT] + _FINISHED.pack(finished) + row[_FINISHED_END:]


def gauge_row(values: Iterable[int]) -> bytes:
    """The end of a row: the values of columns that one engine has beyond `STEP_COLUMNS`."""
    return array("q", values).tobytes()


_TIMES, _FINISHED = Struct("6q"), Struct("q")
_FINISHED_AT = STEP_COLUMNS.index("finished") * _FINISHED.size
_FINISHED_END = _FINISHED_AT + _FINISHED.size
