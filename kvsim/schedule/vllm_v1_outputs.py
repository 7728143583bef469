"""What ends a request of vLLM V1 (`v1/core/sched/utils.py`, `check_stop`).

The engine knows the length of an output beforehand: it is `max_tokens` of a request that ignores
the end of sequence, as replayed requests do.
"""

from __future__ import annotations

from kvsim.request import Request, Sequence
from kvsim.schedule.batch import Batch


def process_token(batch: Batch, request: Request, max_model_len: int) -> bool:
    """Book a token that was sampled; answers whether the request has ended with it.

    A sequence can hold `max_model_len` tokens.
    """
    sequence = request.sequences[0]
    batch.token(sequence)
    length = sequence.length
    if length < max_model_len and length - request.input_length < request.output_length:
        return False
    batch.end_sequence(sequence)
    batch.finish(request)
    return True


def wants_no_more(sequence: Sequence) -> bool:
    """Whether the tokens sampled by steps in flight are the last ones it wants."""
    if not sequence.placeholders:
        return False
    request = sequence.request
    certain = sequence.computed + 2 - sequence.placeholders
    return certain >= request.input_length + request.output_length
