"""What vLLM 0.6.3.post1 has scheduled becomes its batch (`core/scheduler.py`, `schedule`)."""

from __future__ import annotations

from kvsim.batch.batch import Batch
from kvsim.request import Request
from kvsim.schedule import vllm063_deaths as deaths

Admissions = list[tuple[Request, int, int]]
"""Request, tokens that it takes on, tokens charged to the budget."""

Entries = list[tuple[Request, int]]
"""Request that was running or swapped, tokens that it takes on."""


def by_stage(entries: Entries) -> tuple[Entries, Entries]:
    """Prefills and decodes, each in order."""
    prefills = [entry for entry in entries if entry[0].sequences[0].prompt_stage]
    decodes = [entry for entry in entries if not entry[0].sequences[0].prompt_stage]
    return prefills, decodes


def run(batch: Batch, prompts: Admissions, others: Entries) -> None:
    """Put the entries of the batch into the plan, in batch order.

    The first sequence decides what a request counts as. So a request whose first sample has ended
    and whose last one is computed again is a decode, of all the tokens it was admitted with.
    """
    for request, tokens, charged in prompts:
        if not request.sequences[0].prompt_stage:
            batch.run_decode(request, tokens)
        else:
            _prefill(batch, request, tokens, charged)
    for request, tokens in others:
        if not request.sequences[0].prompt_stage:
            batch.run_decode(request)
        else:
            _prefill(batch, request, tokens, tokens)


def _prefill(batch: Batch, request: Request, tokens: int, charged: int) -> None:
    if len(request.sequences) > 1:
        raise deaths.prefill_of_many(request)
    batch.run_prefill(request, tokens, charged)
