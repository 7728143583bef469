"""What one prefill of SGLang 0.5.23 takes on (`managers/schedule_policy.py`, `PrefillAdder`)."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from kvsim.core.batch import Batch
from kvsim.core.request import Request
from kvsim.engines.sglang.manager import Group, SglangTables, Standing
from kvsim.engines.sglang.server import Environment

CONTINUE: Final = 0
NO_TOKEN: Final = 1
OTHER: Final = 2
"""Whether a prefill can take on more; if not, whether memory is used up, reservations included, or
another limit is reached."""

UNLIMITED: Final = 1 << 60

Life = tuple[float, int]
"""The tokens that a request is still expected to generate, and the tokens that its end frees."""


class NewTokenRatio:
    """The share of the announced output tokens that requests are expected to generate
    (`managers/scheduler_components/new_token_ratio_tracker.py`)."""

    now: float
    """The share in this step."""
    ppm: i64
    """The same in parts per million."""
    lowest: float
    highest: float
    """Its bounds so far."""
    _first: float
    _least: float
    _decay: float

    def __init__(self, environment: Environment, conservativeness: float) -> None:
        """It falls from its initial to its smallest value in a number of decode steps.
        `conservativeness` multiplies both. Raises `ValueError` for values that no server starts
        with or that make the share negative."""
        for name, value in (
            ("schedule_conservativeness", conservativeness),
            *zip(environment._fields[:2], environment[:2], strict=True),
        ):
            if not value >= 0:
                raise ValueError(f"{name}: {value:g} is negative; use 0 or more")
        if not environment.new_token_ratio_decay_steps > 0:
            raise ValueError("new_token_ratio_decay_steps: use a number of steps above 0")
        first = min(float(environment.init_new_token_ratio) * float(conservativeness), 1.0)
        self._first = first
        self._least = min(first * float(environment.min_new_token_ratio_factor), 1.0)
        self._decay = (first - self._least) / float(environment.new_token_ratio_decay_steps)
        self.lowest = self.highest = first
        self.reset()

    def decay(self) -> None:
        """Lowers the share in a decode step that has memory for all requests."""
        if self.now != self._least:
            self._set(max(self.now - self._decay, self._least))

    def estimate(self, generated_tokens: int, limit_tokens: int) -> None:
        """Sets the share after a retraction, from what the remaining requests have generated and
        may generate."""
        self._set(min(1.0, generated_tokens / (limit_tokens + 1)))

    def reset(self) -> None:
        """Resets the share after the engine was idle."""
        self._set(self._first)

    def _set(self, share: float) -> None:
        self.now = share
        self.lowest, self.highest = min(self.lowest, share), max(self.highest, share)
        self.ppm = round(1e6 * share)


class Surprises:
    """How often a run met what a user may not expect."""

    arrived: i64 = 0
    ignore_eos: i64 = 0
    """Of those who arrived, those that ignore the end of sequence."""
    stuck: i64 = 0
    """Prompts that never fit."""
    reserved: i64 = 0
    """Refusals although memory was free."""
    retracted: i64 = 0
    aborted: i64 = 0
    """Of the retracted requests, those that found the queue full."""
    forgotten: i64 = 0
    """Unfinished prompts that the engine lost sight of, because it cut another."""

    def remarks(self, ratio: NewTokenRatio) -> list[str]:
        """Returns a line for each surprise."""
        found = []
        if self.reserved:
            found.append(
                f"{self.reserved:,} times, the head of the queue was refused though memory was"
                " free: SGLang keeps it for what running requests are expected to generate, and"
                " wants room for all that the new one may generate; clients that announce"
                " max_new_tokens need less"
            )
        if self.retracted:
            found.append(
                f"{self.retracted:,} retractions; the new-token ratio was between"
                f" {ratio.lowest:.3f} and {ratio.highest:.3f}. A higher schedule_conservativeness"
                " admits less and retracts less"
            )
        if self.aborted:
            found.append(
                f"{self.aborted:,} retracted requests were aborted, because max_queued_requests"
                " counts them like new ones"
            )
        if 0 < self.arrived == self.ignore_eos:
            found.append(
                "every request ignores the end of sequence, so SGLang reserves all that each may"
                " generate, and the new-token ratio has no effect; requests that may stop early are"
                " admitted sooner, and may be retracted"
            )
        if self.stuck:
            found.append(
                f"{self.stuck:,} prompts need nearly the whole pool: SGLang wants room for a page"
                " more, so it never admits them, and they block the queue for ever"
            )
        if self.forgotten:
            found.append(
                f"{self.forgotten:,} times, a prompt was cut while another was unfinished: SGLang"
                " goes on with the later one, and the other decodes without the rest"
            )
        return found


class Adder:
    """The tokens of memory and of computation that are left for a prefill, and what it took on."""

    blocks: SglangTables
    page_size: i64
    chunk_tokens: i64
    """Most prompt tokens that a step computes; 0: no limit."""
    max_prefill_tokens: i64
    max_requests: i64
    clip_tokens: i64
    """Most tokens that any request is expected to generate."""
    shortest_first: bool
    """Whether a chunk leaves room for shorter prefills."""
    batch: Batch
    running: Group
    ratio: float
    chosen: list[Request]
    """The requests of the step. Their chunks end at `Standing.end`."""
    unfinished: Request | None
    """The request whose prompt remains unfinished after this step."""
    surprises: Surprises
    left_prefill: i64
    left_chunk: i64
    reserved: float
    """Memory that is in use by this step, or expected to be used later by all."""
    used: i64
    """The part in use."""
    _lives: list[Life] | None

    def __init__(
        self,
        page_size: i64,
        chunk_tokens: i64,
        max_prefill_tokens: i64,
        max_requests: i64,
        clip_tokens: i64,
        shortest_first: bool,
        surprises: Surprises,
    ) -> None:
        self.page_size, self.surprises = page_size, surprises
        self.chunk_tokens, self.max_prefill_tokens = chunk_tokens, max_prefill_tokens
        self.max_requests, self.clip_tokens = max_requests, clip_tokens
        self.shortest_first = shortest_first

    def begin(
        self,
        batch: Batch,
        blocks: SglangTables,
        running: Group,
        unfinished: Request | None,
        ratio: float,
        riders: i64,
    ) -> None:
        """The budgets before anything is chosen. `riders`: decodes that share the step."""
        self.batch, self.blocks = batch, blocks
        self.running, self.ratio = running, ratio
        self.chosen, self.unfinished = [], unfinished
        self._lives = None
        self.left_prefill = self.max_prefill_tokens - riders
        self.left_chunk = self.chunk_tokens - riders if self.chunk_tokens else UNLIMITED
        self.reserved, self.used = float(riders) + self.expected(running.members), riders

    def expected(self, requests: list[Request]) -> float:
        """The tokens that running requests are still expected to generate."""
        expected: float = 0.0
        ratio: float = self.ratio
        clip: i64 = self.clip_tokens
        most: float = float(clip)
        for request in requests:
            standing: Standing = request.standing
            rest: i64 = standing.longest - request.length
            share: float = 1.0 if request.ignore_eos else ratio
            # In the engine's order of operations: sums of floats depend on it.
            expected += (most if rest >= clip else float(rest)) * share
        return expected

    @property
    def left(self) -> float:
        """Memory that is neither in use nor reserved for expected tokens."""
        return float(self.blocks.available_tokens) - self.reserved

    def paged(self, tokens: i64) -> i64:
        """The token slots of the pages that hold so many tokens."""
        return self.blocks.pages_of(tokens) * self.page_size

    def state(self) -> i64:
        """Whether the budgets allow more."""
        available: i64 = self.blocks.available_tokens
        if available <= self.used or float(available) <= self.reserved:
            return NO_TOKEN
        return OTHER if self.left_prefill <= 0 or self.left_chunk <= 0 else CONTINUE

    def is_free(self, request: Request) -> bool:
        """Whether memory that is not in use would hold the rest of a prompt."""
        standing: Standing = request.standing
        rest: i64 = request.length - standing.prefix
        return self.paged(rest) + self.page_size <= self.blocks.available_tokens - self.used

    def go_on(self, request: Request) -> None:
        """Continues an unfinished prompt. SGLang does not test whether memory suffices for it."""
        standing: Standing = request.standing
        rest: i64 = request.length - standing.prefix
        most: i64 = min(self.left_chunk, i64(self.left))
        # Without memory left, the engine goes on with a whole chunk all the same.
        if most <= 0:
            most = self.left_chunk
        if self.shortest_first:
            most = min(most, self._spared(rest))
        if rest <= most:
            self._take(request, rest, min(standing.limit, self.clip_tokens))
            self.unfinished = None
        else:
            self._take(request, most, 0)

    def _spared(self, rest: i64) -> i64:
        """The tokens that a chunk leaves to shorter prefills that wait."""
        left: i64 = self.left_chunk
        if left < 2 * self.page_size:
            return left
        kept: i64 = 0
        for request in self.batch.waiting:
            standing: Standing = request.standing
            paged: i64 = self.paged(standing.work)
            if standing.work >= rest or kept + paged > left - self.page_size:
                break
            kept += paged
        return self._down(left - kept) if kept else left

    def add(self, request: Request) -> i64:
        """Tries to take on the head of the queue."""
        standing: Standing = request.standing
        standing.prefix = self.blocks.look_up(request, request.length - 1)
        standing.considered = request.length
        if len(self.chosen) >= self.max_requests:
            return OTHER
        if request.ignore_eos and not self.blocks.needs_keys:
            return self._add_exactly(request)
        # What it hits is not there to be evicted.
        self.blocks.tree.lock(standing.node)
        state: i64 = self._add(request, standing)
        self.blocks.tree.unlock(standing.node)
        return state

    def _add(self, request: Request, standing: Standing) -> i64:
        rest: i64 = request.length - standing.prefix
        expected: i64 = min(max(standing.longest - request.length, 0), self.clip_tokens)
        # `>=`: exactly enough is refused.
        if float(rest + expected + self.page_size) >= self.left:
            return NO_TOKEN
        paged: i64 = self.paged(rest)
        if self.chunk_tokens == 0 and self.chosen and paged >= self.left_prefill:
            return OTHER
        if paged > self.left_chunk:
            if self.shortest_first and self.unfinished is not None:
                return OTHER
            # A chunk ends at a page, counted from the start of the prompt.
            rest = self._down(standing.prefix + self._down(self.left_chunk)) - standing.prefix
            if rest <= 0:
                return OTHER
        self._admit(request, rest)
        return self.state()

    def _add_exactly(self, request: Request) -> i64:
        """Tries to take on a request that ignores the end of sequence, where nothing is cached: if
        memory suffices until all requests have ended one by one (`add_one_req_ignore_eos`)."""
        rest: i64 = request.length
        need: i64 = self.paged(rest) + self.page_size
        now: i64 = self.blocks.available_tokens - self.used
        if need > now or float(need) > self.left:
            return NO_TOKEN
        own: Life = self._life(request)
        if self._lives is None:
            everybody = [request, *self.running.members, *self.chosen]
            lives = [each for each in map(self._life, everybody) if each[0] > 0]
            lives.sort(key=lambda each: each[0])
        else:
            lives = self._lives
            if own[0] > 0:
                later = [at for at, each in enumerate(lives) if each[0] >= own[0]]
                # Like the engine, it puts the longest-lived one before the last one, not after it.
                lives.insert(later[0] if later else -1, own)
        self._lives = lives
        freed = 0
        for place, (left, tokens) in enumerate(lives):
            behind = len(lives) - place
            # When this request ends, it and those behind it have each grown by `left` tokens. What
            # is free now and what ended before must hold that, and a token for each.
            if int(now - need) + freed - left * behind <= behind:
                return NO_TOKEN
            freed += tokens
        self._admit(request, min(rest, self.left_chunk))
        return self.state()

    def _life(self, request: Request) -> Life:
        standing: Standing = request.standing
        share = 1.0 if request.ignore_eos else self.ratio
        left = float(standing.limit) * share - float(request.length - request.input_length)
        return left, request.length

    def _admit(self, request: Request, tokens: i64) -> None:
        """Takes on `tokens` tokens of the head of the queue and locks its cached pages."""
        standing: Standing = request.standing
        self.blocks.admit(request)
        self.batch.waiting.popleft()
        self.batch.join(request)
        standing.retracted = False
        cut: bool = standing.prefix + tokens < request.length
        # The engine does not deduct what was generated before a retraction.
        self._take(request, tokens, 0 if cut else min(standing.limit, self.clip_tokens))
        if cut:
            self.surprises.forgotten += self.unfinished is not None
            self.unfinished = request

    def _take(self, request: Request, tokens: i64, expected: i64) -> None:
        """Takes on `tokens` tokens of a prompt whose request is expected to generate `expected`
        tokens."""
        standing: Standing = request.standing
        standing.end = standing.prefix + tokens
        self.chosen.append(request)
        paged: i64 = self.paged(tokens)
        self.reserved += float(paged + self.page_size + expected)
        self.used += paged + self.page_size
        self.left_prefill -= paged
        self.left_chunk -= paged

    def _down(self, tokens: i64) -> i64:
        return tokens // self.page_size * self.page_size
