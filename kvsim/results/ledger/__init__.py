"""Says where the time of every request and step, and every prompt token, went: exact sums."""

from __future__ import annotations

from kvsim.core.schema import BLOCKED, REQUESTS, STEPS, Source

KERNELS = STEPS.names(Source.KERNEL)
"""Columns of steps."""
TIME_PARTS = REQUESTS.names(Source.TIME)
"""Columns of requests, in order."""
PROMPT_PARTS = ("num_cached_tokens", *REQUESTS.names(Source.PROMPT))

KERNEL_LABELS = {
    name: label
    for source in (Source.KERNEL, Source.STAGES, Source.STEP)
    for name, label in STEPS.labels(source).items()
}
"""Labels of the columns that add up to a whole step: its kernels and its other times. Only
pipelines have those of stages."""
TIME_LABELS = REQUESTS.labels(Source.TIME)
"""Labels for people; those of waiting times begin with `waiting`."""
PROMPT_LABELS = REQUESTS.labels(Source.REQUEST) | REQUESTS.labels(Source.PROMPT)

WAITING_FOR = dict(zip(BLOCKED, TIME_PARTS, strict=False))
"""Value of `BLOCKED` → the part of a request that waits through such a step."""
