"""Declares every column of a result once: for memory, Parquet files and the reference.

```
StepRows ──► STEPS         RequestRows, trace ──► REQUESTS      + in files: seconds, made of the
 ledger  ──► its kernels               ledger ──► its parts       nanoseconds of the same name
```

`python docs/site/reference.py` makes `docs/reference/columns.md` of it.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from functools import partial
from typing import NamedTuple

INTEGER, FLOAT, TEXT = "int64", "float64", "string"
"""Types of columns, under the names of pyarrow's types."""


class Source(Enum):
    """What the values of a column come from."""

    STEP = "step"
    STATE = "engine, after composing"
    SGLANG = "SGLang, after composing"
    DRAFTS = "speculative decoding"
    STAGES = "pipeline"
    KERNEL = "ledger: time of the step"
    TRACE = "trace"
    ADAPTERS = "trace that names adapters"
    REQUEST = "request"
    ENDING = "end of the request"
    SECONDS = "nanoseconds"
    PHASE = "difference of instants"
    TIME = "ledger: time of the request"
    PROMPT = "ledger: prompt tokens"
    TRANSITION = "log of transitions"
    BLOCK_MAP = "watcher of blocks"
    ROUTING = "decision of the router"
    HANDOVER = "prefill/decode split"
    LEG = "prefill/decode split: time of the request"


OPTIONAL = Source.DRAFTS, Source.STAGES, Source.SGLANG, Source.ADAPTERS, Source.PROMPT
"""Sources of which a result has all columns, or none: what not all runs have."""


class Column(NamedTuple):
    """One column of a table."""

    name: str
    unit: str
    meaning: str
    source: Source
    type: str = INTEGER
    null: bool = False
    """Whether a value can be null, because the event never happened or is undefined. In memory,
    null is -1."""
    least: int = 0
    """The smallest value of an integer that is not null."""
    label: str = ""
    """The short name of a part of a whole, for display."""
    codes: tuple[tuple[str, str], ...] = ()
    """For values that are indexes: the name and the meaning of each value, from 0 on."""

    @property
    def derived(self) -> bool:
        """Whether only files have the column."""
        return self.source in (Source.SECONDS, Source.PHASE)


class Table(NamedTuple):
    """A Parquet file and its columns, in the file and in memory."""

    name: str
    """Name of the file, without its suffix."""
    about: str
    """What a row stands for, and what several columns have in common."""
    columns: tuple[Column, ...]

    def names(self, *sources: Source) -> tuple[str, ...]:
        """Returns the names of the columns that come from these sources, in order."""
        return tuple(column.name for column in self.columns if column.source in sources)

    def labels(self, source: Source) -> dict[str, str]:
        """Returns column → label for the columns of this source that have a label."""
        return {c.name: c.label for c in self.columns if c.source is source and c.label}

    def expected(self, names: Container[str]) -> tuple[Column, ...]:
        """Returns the columns that a result must have if it has `names`."""
        kept = {column.source for column in self.columns if column.name in names}
        return tuple(c for c in self.columns if c.source not in OPTIONAL or c.source in kept)

    def held(self, names: Container[str]) -> tuple[Column, ...]:
        """Returns the `expected` columns that are also held in memory."""
        return tuple(column for column in self.expected(names) if not column.derived)


def part(name: str, label: str, meaning: str, source: Source) -> Column:
    """Returns a column that is a part of a whole. Its name ends with its unit."""
    return Column(name, name.rpartition("_")[2], meaning, source, label=label)


def seconds(of: str) -> Column:
    """Returns a column that holds the values of `{of}_ns` in seconds."""
    return Column(f"{of}_s", "s", f"`{of}_ns` in seconds", Source.SECONDS, FLOAT, null=True)


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

TABLES = (REQUESTS, STEPS, TRANSITIONS, BLOCK_MAP, ROUTING, HANDOVERS)
