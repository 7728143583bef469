"""Knobs of vLLM 0.6.3.post1, and what its scheduler asks with them in every step."""

from __future__ import annotations

from kvsim.batch.batch import Batch
from kvsim.batch.pace import Moves, Terms
from kvsim.blocks.tables import Tables, waiting_sequence
from kvsim.recorder import BLOCKED
from kvsim.request import RUNNING, Request
from kvsim.schedule import vllm063_deaths as deaths
from kvsim.schedule.groups import count, width
from kvsim.schedule.means import Prices, by_width, make_means, recompute
from kvsim.schedule.requeue import make_requeue
from kvsim.schedule.victims import Victim, tail
from kvsim.schedule.vllm063_outputs import stops_after

SLOTS, TOKENS, BLOCKS, WATERMARK = map(BLOCKED.index, ("slots", "tokens", "blocks", "watermark"))


class Rules:
    """What does not change from step to step, and what is asked in each."""

    ahead = False
    counts_composed = False
    lingers = False

    def __init__(
        self,
        *,
        block_size: int,
        num_gpu_blocks: int,
        max_model_len: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = False,
        enable_prefix_caching: bool = False,
        preemption_mode: str | None = None,
        scheduling_policy: str = "fcfs",
        watermark: float = 0.01,
        victim: Victim | None = None,
        requeue: str | None = None,
        prices: Prices | None = None,
    ) -> None:
        if max_num_batched_tokens is None:
            max_num_batched_tokens = 512 if enable_chunked_prefill else max(max_model_len, 2048)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked = enable_chunked_prefill
        self.whole_blocks = enable_prefix_caching
        """Chunks end on block boundaries."""
        self.priority = scheduling_policy == "priority" and not enable_chunked_prefill
        self.means = make_means(preemption_mode, prices, self.priority)
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.victim = victim or tail
        self.requeue = make_requeue(requeue, sorts=self.priority)
        self.prompt_limit = (
            max_model_len if enable_chunked_prefill else min(max_model_len, max_num_batched_tokens)
        )
        self._tokens = 0
        self._seqs = 0
        self._check()
        self._start()

    def _start(self) -> None:
        """State of a variant of the engine."""

    def _check(self) -> None:
        """Refuse at start-up what the engine refuses (`config.py`, `SchedulerConfig`)."""
        tokens = self.max_num_batched_tokens
        if tokens < self.max_model_len and not self.chunked:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_model_len ({self.max_model_len}):"
                " raise it, lower --max-model-len, or use --enable-chunked-prefill"
            )
        if tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({tokens}) is below max_num_seqs ({self.max_num_seqs}):"
                " every running sequence needs one token a step"
            )

    # -- rules -----------------------------------------------------------------------------------

    def _new_tokens(self, request: Request, state: int, chunking: bool, saved: int = 0) -> int:
        """Tokens that the sequences of a request in `state` would be charged for in this step."""
        number = 0
        tokens = -saved
        for sequence in request.sequences:
            if sequence.state == state:
                number += 1
                tokens += sequence.length - sequence.computed if sequence.prompt_stage else 1
        if chunking and number == 1:
            if self.whole_blocks and self.max_num_batched_tokens % self.block_size:
                raise deaths.chunk_of_part_blocks(request)
            left = self.max_num_batched_tokens - self._tokens
            if tokens > left:
                tokens = left - left % self.block_size if self.whole_blocks else left
        return tokens

    def _saved(self, batch: Batch, request: Request) -> int:
        """Tokens of a waiting request that it is not charged for, because of hits."""
        left = self.max_num_batched_tokens - self._tokens
        if self.chunked and left < (self.block_size if self.whole_blocks else 1):
            return 0
        sequence = waiting_sequence(request)
        return batch.blocks.hit_tokens(sequence, batch.blocks.match(sequence))

    def _fits(self, tokens: int, seqs: int) -> bool:
        return (
            self._tokens + tokens <= self.max_num_batched_tokens
            and self._seqs + seqs <= self.max_num_seqs
        )

    def turns_away(self, blocks: Tables, tokens: int, need: int) -> str:
        """Why a waiting request is given up (`pace.Sprinter.turns_away`)."""
        if tokens > self.prompt_limit:
            return "too-long"
        return "never-fits" if blocks.admission_total - need < self._watermark(blocks) else ""

    def _never(self, batch: Batch, need: int) -> bool:
        """Whether an admission that needs so many blocks can never be.

        `core/block_manager.py:108`; likewise `_hindrance`.
        """
        blocks = batch.blocks
        return blocks.admission_total - need < self._watermark(blocks)

    def _hindrance(self, batch: Batch, request: Request, need: int, asked: int) -> int:
        """Why a waiting request has to wait, as an index into `BLOCKED`; 0: it has not.

        `need`: the blocks that it takes; `asked`: the tokens that have to fit the budget.
        """
        blocks, seqs = batch.blocks, self._seqs + width(request) - 1
        return self.refusal(blocks, blocks.admission_free, need, asked, self._tokens, seqs)

    def refusal(
        self, blocks: Tables, free: int, need: int, asked: int, tokens: int, seqs: int
    ) -> int:
        """The rule behind it, in numbers (`pace.Sprinter.refusal`)."""
        left = free - need
        if left < self.watermark_blocks and left < self._watermark(blocks):
            return WATERMARK if left >= 0 else BLOCKS
        if tokens + asked > self.max_num_batched_tokens:
            return TOKENS
        return SLOTS if seqs >= self.max_num_seqs else 0

    def refuses_from(self, blocked: int, need: int) -> int:
        """Fewer blocks would make another reason, unless it is the last one."""
        return {BLOCKS: 0, WATERMARK: need}.get(blocked, need + self.watermark_blocks)

    def _watermark(self, blocks: Tables) -> int:
        return self.watermark_blocks if blocks.grows else 0

    def _preempt(self, batch: Batch, victim: Request, pairs: list[tuple[int, int]]) -> str:
        """Take the blocks of a victim; answers the means (S:1454)."""
        means = self.means(victim, batch)
        if means == "swap":
            pairs.extend(batch.swap_out(victim))
            return means
        if count(victim, RUNNING) != 1:
            raise deaths.recompute_of_many(victim)
        batch.preempt(victim)
        return means

    # -- requests that decode together -----------------------------------------------------------

    def decodes(self, request: Request) -> int:
        """Steps until a running request ends, if it is of one sequence and past its prompt."""
        sequence = request.sequences[0]
        if request.n > 1 or sequence.prompt_stage:
            return 0
        return stops_after(sequence, self.max_model_len)

    def last_tokens(self, batch: Moves, requests: list[Request]) -> None:
        """End requests that decode together with others."""
        for request in requests:
            batch.complete(request)

    def grow_one(self, batch: Moves, request: Request) -> None:
        """Slots for the next token of a request that decodes together with others."""
        batch.grow(request)

    def terms(self, blocks: Tables) -> Terms | None:
        """What its steps have in common (`kvsim.batch.stretch`)."""
        rule = blocks.hits_save
        if self.priority or not blocks.grows or rule.charged or rule.blocks:
            return None
        recomputes = self.victim is tail and self.means in (by_width, recompute)
        room = (blocks.admission_total - self.watermark_blocks) * blocks.block_size
        return Terms(
            mixes=self.chunked,
            chunked=self.chunked,
            by_chunk=False,
            prompts_first=True,
            max_num_batched_tokens=self.max_num_batched_tokens,
            longest=min(self.prompt_limit, room),
            spare=blocks.spare_block,
            requeue=self.requeue if recomputes and not self.chunked else None,
            blocked=0,
        )

    def undisturbed(self, batch: Moves) -> bool:
        """Whether nobody is swapped out."""
        return not batch.swapped
