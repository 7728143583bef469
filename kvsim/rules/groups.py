"""Questions that schedulers ask about a request and its sequences."""

from __future__ import annotations

from kvsim.engine.request import SWAPPED, Request


def width(request: Request) -> int:
    """Returns the most sequences that a request may come to have (vLLM 0.6.3 `sequence.py`,
    `SequenceGroup.get_max_num_running_seqs`)."""
    sequences = request.sequences
    if request.n == 1:
        return int(sequences[0].state <= SWAPPED)
    if request.n > len(sequences):
        return request.n
    return sum([s.state <= SWAPPED for s in sequences])


def count(request: Request, state: int) -> int:
    """Returns the number of sequences of a request in this state."""
    sequences = request.sequences
    if len(sequences) == 1:
        return int(sequences[0].state == state)
    return sum([s.state == state for s in sequences])


def by_priority(request: Request) -> tuple[int, int]:
    """Sort key of the priority policy: smaller keys are served first."""
    return request.priority, request.arrival_ns
