"""The base class of schedulers: policies that compose steps from the moves of a batch.

```python
class Mine(VllmV1):
    def compose(self, batch, now_ns):
        batch.waiting = deque(sorted(batch.waiting, key=lambda request: request.input_length))
        return super().compose(batch, now_ns)
```

Run it with `kvsim run --engine mine:Mine`. Overridden methods always count: short cuts apply only
where none of the methods that they reproduce is overridden (`kvsim.fast.known`).
"""

from __future__ import annotations

from kvsim.engine.batch import Batch
from kvsim.engine.plan import NOTHING_MOVED, Moved, Plan
from kvsim.engine.request import FINISHED, RUNNING, SWAPPED, Request, Sequence

Asked = tuple[list[int], int, int, int, int]
"""What a waiting request asks for:

1. its hits, as `Tables.match` returned them;
2. the tokens that are not charged to the token budget because of hits;
3. the tokens that are, if it is admitted;
4. the tokens that must fit the rest of the budget where prompts are not cut;
5. the free blocks that it must find.
"""


class Scheduler:
    """Decides what each step of an engine does.

    The constructor may name any setting of a run: `block_size`, `num_gpu_blocks`, `max_model_len`,
    `max_num_seqs`, `max_num_batched_tokens`, `enable_chunked_prefill`, `enable_prefix_caching`,
    `preemption_mode`, `prices` (`rules.means.Prices`; None unless the mode is `auto`),
    `scheduling_policy`, `victim` (`rules.victims.Victim`; None: its own rule), `watermark`,
    arguments of its own, or `**settings` for all of them. A `ValueError` is a refusal to start.

    A scheduler sees what clients declared. Only the batch knows how long an output becomes:
    `Batch.token` returns whether a token was the last one.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    watermark_blocks: int = 0
    """Number of blocks that admissions leave free. It is recorded in the result."""
    longest_sequence: int | None = None
    """Length in tokens at which every sequence ends; None for no limit."""
    chunked: bool = True
    """Whether a prompt may be spread over steps. If not, `max_num_batched_tokens` must hold the
    longest prompt."""
    whole_blocks: bool = False
    """Whether chunks end on block boundaries, so that the token budget must be a multiple of the
    block size."""
    in_flight: int = 1
    """Number of steps composed before the oldest is settled, including the new one."""
    counts_composed: bool = False
    """Whether `Sequence.computed` counts tokens as soon as their step is composed; if not, when it
    is settled."""
    names_blocks: bool = True
    """Whether it reads block ids: entries of tables, references of pools. If your scheduler does
    not, set it to False: a faster prefix cache without ids may then be used."""
    ends_early: bool = False
    """Whether it ends requests that their clients give up (`abort`); if not, they go on."""
    lingers: bool = False
    """Whether a request takes part in one more step after its last token, as in vLLM 0.6.3's
    asynchronous output processing."""
    gauged: tuple[str, ...] = ()
    """Columns of `kvsim.schema.STEPS` that its steps have beyond those of every engine."""

    def arrive(self, batch: Batch, request: Request) -> None:
        """Accepts a new request into the waiting queue, or rejects it (`Batch.refuse`)."""
        batch.arrive(request)

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Composes the next step through the moves of `batch`, and returns its plan."""
        raise NotImplementedError

    def abort(self, batch: Batch, request: Request) -> bool:
        """Ends a request that its client gave up. Returns whether it was in progress. Asked only of
        schedulers that have `ends_early` set."""
        raise NotImplementedError

    def remarks(self) -> list[str]:
        """Returns what a reader of the result should know about this run, one line each."""
        return []

    def gauges(self, batch: Batch) -> tuple[int, ...]:
        """Returns the values of `gauged` in the step composed last."""
        return ()

    def overlap(self, batch: Batch, now_ns: int) -> None:
        """Work that the engine's host does while the model runs. By default there is none."""

    def waits(self, batch: Batch, plan: Plan, start_ns: int, next_ns: float) -> Moved:
        """Returns how long a step that begins at `start_ns` waits for transfers before it computes.
        The next request arrives at `next_ns`. Asked only where `Plan.waits`."""
        return NOTHING_MOVED

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """Settles a step once its time has passed: tokens exist, samples fork, requests end."""
        batch.now_ns = now_ns
        batch.publish(plan)
        before = len(batch.ended)
        for request, tokens, samples in batch.to_book(plan):
            compute(request, tokens)
            if samples:
                sample(batch, request)
        if len(batch.ended) > before:
            batch.remove_ended()

    # -- requests that decode together (`Batch.decode_together`) ---------------------------------

    def only_decodes(self, request: Request) -> bool:
        """Whether a running request takes on exactly one token in each step until it ends."""
        return request.n == 1 and not request.sequences[0].prompt_stage

    def grow_one(self, batch: Batch, request: Request) -> None:
        """Gives a request that only decodes a slot for its next token. There are enough blocks."""
        batch.grow(request)

    def run_one(self, batch: Batch, request: Request) -> None:
        """Adds a request that only decodes, and has its slot, to the plan."""
        batch.run_decode(request)

    def last_tokens(self, batch: Batch, requests: list[Request]) -> None:
        """Ends these requests, given in running order, which have their last token.

        They no longer belong to the requests that decode together, unless the scheduler `lingers`.
        """
        for request in requests:
            batch.complete(request)


def compute(request: Request, tokens: int) -> None:
    """Books that the KV of `tokens` more tokens of each unfinished sequence of a request exists."""
    for sequence in request.sequences:
        if sequence.state <= SWAPPED:
            sequence.computed = known = sequence.computed + tokens
            if known == sequence.length:
                sequence.prompt_stage = False


def sample(batch: Batch, request: Request) -> None:
    """Books one more token of each running sequence of a request, and ends those with their last
    one.

    All samples share the blocks of the prompt: the first token forks the sequence (vLLM
    0.6.3.post1 `engine/output_processor/single_step.py`).
    """
    if request.n == 1:
        if batch.token(request.sequences[0]):
            batch.complete(request)
        return
    for sequence in [s for s in request.sequences if s.state == RUNNING]:
        children = request.n - 1 if len(request.sequences) == 1 else 0
        sample_sequence(batch, sequence, children)
    if all(s.state == FINISHED for s in request.sequences):
        batch.finish(request)


def sample_sequence(batch: Batch, sequence: Sequence, children: int) -> None:
    """Books one more token of a sequence and of each of the `children` forked from it."""
    forked = [sequence.child(number) for number in range(children)]
    for sampled in (*forked, sequence):
        if batch.token(sampled):
            sampled.state = FINISHED
    batch.fork(sequence, forked)
    if sequence.state == FINISHED:
        batch.end_sequence(sequence)
