"""What the row of a step says of the batch (`kvsim.recorder.STEP_COLUMNS`)."""

from __future__ import annotations

from kvsim.batch.batch import Batch
from kvsim.plan import RECOMPUTE, Plan


def composed_columns(batch: Batch, plan: Plan) -> tuple[int, ...]:
    """The columns that are known when a step is composed: all between its times and `finished`."""
    computed = cached = recomputes = 0
    for tokens, _ in plan.chunks:
        computed += tokens
    for prefill in plan.prefills:
        cached += prefill.cached
    for _, means in plan.preempted:
        recomputes += means == RECOMPUTE
    return (
        len(plan.prefills),
        computed,
        cached,
        plan.decode_seqs,
        plan.context_tokens,
        plan.batched_tokens,
        recomputes,
        len(plan.preempted) - recomputes,
        len(plan.swapped_in),
        len(plan.swaps_out),
        len(plan.swaps_in),
        len(plan.copies),
        len(plan.ignored),
        len(batch.waiting),
        batch.num_running,
        len(batch.swapped),
        *batch.blocks.census(),
        plan.blocked,
    )
