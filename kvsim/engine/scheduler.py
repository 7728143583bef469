"""What every scheduler is: a policy that composes steps out of moves of a batch.

```python
class Mine(VllmV1):
    def compose(self, batch, now_ns):
        batch.waiting = deque(sorted(batch.waiting, key=lambda request: request.input_length))
        return super().compose(batch, now_ns)
```

`kvsim run --engine mine:Mine`. Whatever a class overrides decides: short cuts are taken only where
nothing is overridden that they stand for (`kvsim.fast.known`).
"""

from __future__ import annotations

from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
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

    Requests that it is shown say what their clients said. How long an output becomes is the
    mechanism's knowledge: `Batch.token` says whether a token was the last one.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    watermark_blocks: int = 0
    """Blocks that admissions leave free; a run notes it down."""
    longest_sequence: int | None = None
    """Tokens at which a sequence ends, whatever it says; None: no limit."""
    chunked: bool = True
    """Whether a prompt may be spread over steps; if not, `max_num_batched_tokens` must hold the
    longest."""
    whole_blocks: bool = False
    """Whether chunks end on block boundaries, so that the token budget must be whole blocks."""
    in_flight: int = 1
    """Steps that are composed before the oldest is settled, the new one included."""
    counts_composed: bool = False
    """Whether `Sequence.computed` counts tokens from when their step is composed; if not, from when
    it is settled."""
    names_blocks: bool = True
    """Whether it looks at block ids: entries of tables, references of pools. One of your own that
    does not may be served by a prefix cache that keeps no ids, with less work."""
    lingers: bool = False
    """Whether a request takes part in one more step after its last token."""

    def arrive(self, batch: Batch, request: Request) -> None:
        """Take a request in, or turn it away (`Batch.refuse`)."""
        batch.arrive(request)

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        """Decide what the next step does, through the moves of `batch`."""
        raise NotImplementedError

    def overlap(self, batch: Batch, now_ns: int) -> None:
        """What the engine's host does while the model runs: nothing."""

    def settle(self, batch: Batch, plan: Plan, now_ns: int) -> None:
        """The step's time has passed: tokens exist, samples fork, requests end."""
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
        """Whether one token is all that a running request takes on, in each step until it ends."""
        return request.n == 1 and not request.sequences[0].prompt_stage

    def grow_one(self, batch: Batch, request: Request) -> None:
        """Give a request that only decodes slots for its next token; there are blocks for it."""
        batch.grow(request)

    def run_one(self, batch: Batch, request: Request) -> None:
        """Put a request that only decodes, and has its slots, into the plan."""
        batch.run_decode(request)

    def last_tokens(self, batch: Batch, requests: list[Request]) -> None:
        """These requests, in running order, have their last token: end them.

        They have left those that decode together, unless the scheduler `lingers`.
        """
        for request in requests:
            batch.complete(request)


def compute(request: Request, tokens: int) -> None:
    """The KV of `tokens` more tokens of each unfinished sequence of a request exists."""
    for sequence in request.sequences:
        if sequence.state <= SWAPPED:
            sequence.computed = known = sequence.computed + tokens
            if known == sequence.length:
                sequence.prompt_stage = False


def sample(batch: Batch, request: Request) -> None:
    """Each running sequence of a request has one more token; those who have their last one end.

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
    """A sequence and `children` forked from it have one more token each."""
    forked = [sequence.child(number) for number in range(children)]
    for sampled in (*forked, sequence):
        if batch.token(sampled):
            sampled.state = FINISHED
    batch.fork(sequence, forked)
    if sequence.state == FINISHED:
        batch.end_sequence(sequence)
