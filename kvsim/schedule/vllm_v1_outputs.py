"""What ends a request of vLLM V1 (`v1/core/sched/utils.py`, `check_stop`)."""

from __future__ import annotations

from kvsim.batch.batch import Batch
from kvsim.request import Request, Sequence


def stops(sequence: Sequence, max_model_len: int, coming: int = 0) -> bool:
    """Whether a sequence has its last token, or will have it when `coming` more are known.

    The engine can know it beforehand: the length is `max_tokens` of a request that ignores the end
    of sequence, as replayed requests do. A sequence can hold `max_model_len` tokens.
    """
    request = sequence.request
    length = sequence.length + coming
    return length >= max_model_len or length - request.input_length >= request.output_length


def stops_after(sequence: Sequence, max_model_len: int) -> int:
    """Tokens until `stops` becomes true, those that are coming left out; 0: it will be then."""
    request = sequence.request
    end = request.input_length + request.output_length
    if end > max_model_len:
        end = max_model_len
    left = end - sequence.length - sequence.placeholders
    return left if left > 0 else 0


def process_token(batch: Batch, request: Request, max_model_len: int) -> bool:
    """Book a token that was sampled; answers whether the request has ended with it."""
    sequence = request.sequences[0]
    batch.token(sequence)
    if not stops(sequence, max_model_len):
        return False
    batch.complete(request)
    return True
