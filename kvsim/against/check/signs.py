"""Reads off the times of requests what an engine had at work at once, as a client can see it.

From its first token to its last, a request is in the batch, and its tokens are in the KV cache. So
the most requests between the two show a limit of the batch, and the most tokens one of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvsim.against.matched import Matched
from kvsim.results.phases import Floats
from kvsim.workload.trace import Row

_MOMENTS = 1000
_AT_A_PEAK = 99
"""Percentile of all moments that counts as the most: a client's clock blurs single moments."""


class Signs(NamedTuple):
    """What was at work at once."""

    requests: int
    """The most requests between their first and their last token."""
    share: float
    """Share of the time in which there were as many, or one fewer."""
    tokens: float
    """The most tokens that such requests held."""


def signs(pairs: Matched, rows: Sequence[Row]) -> tuple[Signs, Signs] | None:
    """Those of the measured run and of its replay; None where arrivals or times are not known."""
    rows = [rows[i] for i in pairs.rows]
    sides = pairs.measured_s, pairs.predicted_s
    known = all(not np.isnan(side[kind]).any() for side in sides for kind in ("ttft", "e2el"))
    if not known or any(row.arrival_ns is None for row in rows):
        return None
    sent = np.array([row.arrival_ns for row in rows], dtype=np.float64) / 1e9
    lengths = np.array([(row.input_length, row.output_length) for row in rows], dtype=np.float64)
    real, ours = (_signs(sent + side["ttft"], sent + side["e2el"], lengths) for side in sides)
    return real, ours


def _signs(first_s: Floats, last_s: Floats, lengths: Floats) -> Signs:
    moments = np.linspace(first_s.min(), last_s.max(), _MOMENTS)
    requests, tokens = np.zeros(_MOMENTS), np.zeros(_MOMENTS)
    for first, last, (prompt, output) in zip(first_s, last_s, lengths, strict=True):
        low, high = np.searchsorted(moments, (first, last))
        requests[low:high] += 1
        done = (moments[low:high] - first) / max(last - first, 1e-9)
        tokens[low:high] += prompt + output * done
    most = round(float(np.percentile(requests, _AT_A_PEAK)))
    share = float((requests >= most - 1).mean())
    return Signs(most, share, float(np.percentile(tokens, _AT_A_PEAK)))
