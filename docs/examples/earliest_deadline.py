"""Earliest deadline first, under vLLM V1.

    PYTHONPATH=docs/examples kvsim run --trace docs/examples/tenants.jsonl \
        --engine earliest_deadline:EarliestDeadline --max-num-seqs 8

The trace says within how many seconds each request is wanted (`deadline_s`): 2 or 5, or 60. The
mean TTFT falls from 5.62 s to 4.79 s, and the p99 rises from 11.3 to 11.6 s.
"""

from kvsim.core.batch import Batch
from kvsim.core.request import Request
from kvsim.engines import VllmV1Async


def due_ns(request: Request) -> float:
    """When a request is wanted; never, if nobody says so."""
    deadline_s: float = request.extra.get("deadline_s", float("inf"))
    return request.arrival_ns + 1e9 * deadline_s


class EarliestDeadline(VllmV1Async):
    """Sorts the waiting queue before requests are admitted."""

    def before_admissions(self, batch: Batch, now_ns: int) -> None:
        batch.waiting = sorted(batch.waiting, key=due_ns)
