"""Columns of requests."""

from __future__ import annotations

from functools import partial

from kvsim.core.schema.column import FLOAT, TEXT, Column, Source, Table, part, seconds

_trace = partial(Column, source=Source.TRACE)
_request = partial(Column, source=Source.REQUEST)
_instant = partial(Column, unit="ns", source=Source.REQUEST, null=True)
_text = partial(Column, unit="", type=TEXT)
_phase = partial(Column, unit="s", source=Source.PHASE, type=FLOAT, null=True)
_time = partial(part, source=Source.TIME)
_prompt = partial(part, source=Source.PROMPT)

_ABOUT = """\
One row per request, in trace order.

The ledger splits the time of a request, from its arrival to its end, so that every moment counts
once and the parts add up to the nanosecond. While it waits for its first step, nothing else of a
step counts. All who wait do so for the reason of the head of the queue, until the next step begins;
with asynchronous scheduling that is the reason of the step that runs, composed one step before.

With prefix caching it also splits the prompt tokens at the first admission: `num_cached_tokens` and
the `ledger: prompt tokens`, in the order in which a prompt has them. What preemptions cost comes on
top: `recached_tokens` were found again, `recomputed_tokens` were not.
"""

REQUESTS = Table(
    "requests",
    _ABOUT,
    (
        _text("id", meaning="from the trace, or the number of the row", source=Source.TRACE),
        _request("index", "", "place in the trace, from 0"),
        _text("session", meaning="of which it is a turn, or empty", source=Source.TRACE),
        _text("lora", meaning="the adapter that it names, or empty", source=Source.ADAPTERS),
        _text("status", meaning="`completed`, `rejected` or `aborted`", source=Source.ENDING),
        _text("reason", meaning="why it did not complete; else empty", source=Source.ENDING),
        *map(seconds, ("released", "client_queue", "arrival", "first_scheduled", "first_token")),
        seconds("finish"),
        _trace("input_length", "tokens", "of the prompt"),
        _trace("output_length", "tokens", "that one sample has in the trace"),
        _request("output_tokens", "tokens", "generated, of all samples"),
        _trace("priority", "", "lower is served first", least=-(1 << 31)),
        _request("n", "sequences", "sampled from the prompt"),
        _phase("queue_s", meaning="from arrival to first step"),
        _phase("ttft_s", meaning="from arrival to first token (TTFT)"),
        _phase("tpot_s", meaning="per token after the first (TPOT); null for one token"),
        _phase("e2el_s", meaning="from arrival to last token (E2EL)"),
        _request("num_preemptions", "", "how often it was preempted"),
        _request(
            "num_cached_tokens",
            "tokens",
            "prompt tokens whose computation a prefix hit saved at the first admission",
            label="hit",
        ),
        _request(
            "tier1_hit_tokens",
            "tokens",
            "of `num_cached_tokens`, loaded from the tier in CPU memory, or from a prefill engine",
        ),
        _request("tier2_hit_tokens", "tokens", "of `num_cached_tokens`, from the tier below it"),
        _request("recached_tokens", "tokens", "the same at later admissions, after a preemption"),
        _request("recomputed_tokens", "tokens", "computed, lost to a preemption, computed again"),
        _request("swapped_out_blocks", "blocks", "copied to the CPU, in all"),
        _request("swapped_in_blocks", "blocks", "copied back to the GPU, in all"),
        _request("blocked_steps", "steps", "that refused it at the head of the queue"),
        _instant("released_ns", meaning="the client wants to send it"),
        _request("client_queue_ns", "ns", "wait for one of the client's `max_concurrency` slots"),
        _instant("arrival_ns", meaning="the engine gets it; latencies count from here"),
        _instant("first_scheduled_ns", meaning="its first step begins"),
        _instant("first_token_ns", meaning="its first token exists"),
        _instant("finish_ns", meaning="it ended"),
        _time(
            "waiting_step_ns",
            "waiting for the current step",
            "composed before it arrived, or in flight before its own step",
        ),
        _time(
            "waiting_slots_ns",
            "waiting for a slot (max_num_seqs)",
            "the head of the queue is refused for `max_num_seqs`",
        ),
        _time(
            "waiting_prefills_ns",
            "waiting behind prefills of others",
            "the head is refused for `max_num_batched_tokens`",
        ),
        _time(
            "waiting_blocks_ns", "waiting for free blocks", "the head is refused: too few are free"
        ),
        _time(
            "waiting_watermark_ns",
            "waiting, held by the watermark",
            "the head is refused for blocks that the watermark holds",
        ),
        _time(
            "waiting_swap_ins_ns",
            "waiting behind swapped requests",
            "the head is refused because swapped requests go first",
        ),
        _time(
            "waiting_preemptions_ns",
            "waiting behind preemptions",
            "the head is refused because of a preemption in that step",
        ),
        _time(
            "waiting_loras_ns",
            "waiting for an adapter's place",
            "nobody else can be admitted, and who waits has another adapter (`max_loras`)",
        ),
        _time(
            "waiting_tier_ns",
            "waiting for a store, or a load of another request",
            "what it could load is being stored, or another request loads it",
        ),
        _time(
            "waiting_load_ns",
            "waiting for its load",
            "before its first step: the queue of the link, the copy, and the rest of the step that"
            " reports it",
        ),
        _time("own_prefill_ns", "own prefill", "kernels of its steps up to the first token"),
        _time(
            "own_decode_ns",
            "own decode",
            "kernels of later steps; of steps with prompts of others, what they would take"
            " without those",
        ),
        _time(
            "interference_ns",
            "interference by prefills of others",
            "the rest of the kernels of such steps; of steps without any decode, all",
        ),
        _time(
            "accepted_drafts_ns",
            "verifying accepted drafts",
            "what drafts add to the kernels of later steps, by the share that is accepted",
        ),
        _time("rejected_drafts_ns", "verifying rejected drafts", "the rest of it"),
        _time("drafting_ns", "drafting", "the drafter makes drafts at the end of its steps"),
        _time(
            "preempted_waiting_ns",
            "preempted, waiting",
            "without blocks, until it is admitted again",
        ),
        _time("reload_ns", "load after a preemption", "as `waiting_load_ns`, until it is reported"),
        _time(
            "recompute_ns",
            "recompute",
            "kernels of steps that compute what a preemption threw away",
        ),
        _time("swap_out_ns", "swap-out", "copied to the CPU, with others in the same step"),
        _time("swapped_waiting_ns", "swapped out, waiting", "its blocks are on the CPU"),
        _time("swap_in_ns", "swap-in", "copied back, with others in the same step"),
        _time("swap_stall_ns", "held up by swaps of others", "copies of others block the step"),
        _time(
            "link_queue_ns",
            "queue of the link",
            "the wait for the link, by its own copies or by those of others; loads within a step",
        ),
        _time(
            "flush_stall_ns",
            "held up by flushes",
            "its steps wait for stores of blocks that are reused",
        ),
        _time(
            "stage_wait_ns",
            "waiting for stages of the pipeline",
            "they still have the step before its own, its last token is not known, or activations"
            " are on their way",
        ),
        _time(
            "rank_stall_ns",
            "held up by slower ranks",
            "its steps wait for the slowest of the data-parallel ranks that step together",
        ),
        _time(
            "deferred_free_ns",
            "passed over, blocks are released late",
            "it needs a block of a request whose last step is still in flight",
        ),
        _time(
            "host_overhead_ns",
            "host overhead",
            "the host's part of its steps, and time between steps",
        ),
        _prompt(
            "last_block_tokens",
            "last-token rule",
            "found, but at least one token has to be computed",
        ),
        _prompt(
            "evicted_tokens",
            "evicted before reuse",
            "computed before; they, or a block before them, were evicted since",
        ),
        _prompt(
            "concurrent_tokens",
            "being computed by another request",
            "a request admitted earlier was to compute them",
        ),
        _prompt(
            "partial_block_tokens",
            "lost to block granularity",
            "computed before, but not as a whole block of this prompt",
        ),
        _prompt(
            "other_salt_tokens",
            "another cache salt",
            "computed before, but only under another cache salt",
        ),
        _prompt("cold_tokens", "cold", "never computed before"),
        _prompt(
            "unreached_tokens",
            "not reached",
            "its blocks were lost, it was given up, or the run ended before",
        ),
    ),
)

REQUEST_COLUMNS = REQUESTS.names(Source.REQUEST)
"""What `kvsim.core.rows.RequestRows` adds, in order."""
