"""Which decode kernel to launch: vLLM's rule, or the one that was measured to be faster."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from kvsim_kernels.pages import PARTITION_TOKENS, PLAIN, Attention, Pages

Version = Literal["v1", "v2"]
Rule = Callable[[int, int, int], Version]
"""(max_seq_len, num_seqs, num_query_heads) -> version."""


def vllm_rule(max_seq_len: int, num_seqs: int, num_query_heads: int) -> Version:
    """vLLM's choice: v1 if max_seq_len <= 8192 and (one partition or seqs x heads > 512).

    Heads are those of one tensor-parallel rank. Under CUDA graphs vLLM passes
    `max_seq_len_to_capture` (default 8192), not the batch's maximum. Source: vLLM 0.6.3.post1,
    `vllm/attention/ops/paged_attn.py:117-129`.
    """
    partitions = -(-max_seq_len // PARTITION_TOKENS)
    fits = max_seq_len <= 8192 and (partitions == 1 or num_seqs * num_query_heads > 512)
    return "v1" if fits else "v2"


@dataclass(frozen=True)
class DecodeTiming:
    """Measured time of both kernels at one shape, microseconds."""

    max_seq_len: int
    num_seqs: int
    v1_us: float
    v2_us: float


def measured_best(timings: Iterable[DecodeTiming]) -> Rule:
    """A rule that picks the faster kernel at the nearest measured shape.

    Nearness is the ratio of lengths times the ratio of sequence counts; a tie goes to the timing
    given first. The timings belong to one model, so the head count does not enter. Raises
    ValueError without timings.
    """
    table = tuple(timings)
    if not table:
        raise ValueError("measured_best needs at least one timing")

    def rule(max_seq_len: int, num_seqs: int, num_query_heads: int) -> Version:
        nearest = min(
            table,
            key=lambda timing: (
                _ratio(timing.max_seq_len, max_seq_len) * _ratio(timing.num_seqs, num_seqs)
            ),
        )
        return "v1" if nearest.v1_us <= nearest.v2_us else "v2"

    return rule


def decode(
    query: torch.Tensor,
    pages: Pages,
    attention: Attention = PLAIN,
    *,
    max_seq_len: int,
    rule: Rule = vllm_rule,
) -> torch.Tensor:
    """Paged decode by the kernel that `rule` chooses; shapes as in `triton_decode.decode_v1`."""
    from kvsim_kernels.triton_decode import decode_v1, decode_v2

    if rule(max_seq_len, query.shape[0], query.shape[1]) == "v1":
        return decode_v1(query, pages, attention)
    return decode_v2(query, pages, attention, max_seq_len=max_seq_len)


def _ratio(one: int, other: int) -> float:
    """How many times the larger number is the smaller, both taken as at least 1."""
    low, high = sorted((max(1, one), max(1, other)))
    return high / low
