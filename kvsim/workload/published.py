"""Quantiles of public traces, to which synthetic ones are fitted.

Each table is a list of points (share of the values that are at most this, value); draw with
`draw`. Measured on the published files:

- Azure/AzurePublicDataset, LLM inference traces of 2023, CC-BY-4.0 (P. Patel et al., "Splitwise:
  Efficient generative LLM inference using phase splitting", ISCA 2024);
- kvcache-ai/Mooncake, FAST25 conversation trace, Apache-2.0 (R. Qin et al., "Mooncake: Trading
  More Storage for Less Computation", FAST 2025);
- callanjfox/kv-cache-tester, 100 Claude Code sessions of WEKA, Apache-2.0.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from random import Random

from kvsim.core.sums import added

Quantiles = tuple[tuple[float, float], ...]


def draw(quantiles: Quantiles, random: Random) -> int:
    """A random whole number with these quantiles, linear in between."""
    share = random.random()
    above = bisect_right(quantiles, share, key=lambda point: point[0])
    (low_share, low), (high_share, high) = quantiles[above - 1], quantiles[above]
    return round(low + (high - low) * (share - low_share) / (high_share - low_share))


def mean(quantiles: Quantiles) -> float:
    """The mean of the values of `draw`, before rounding."""
    return added((q - p) * (low + high) / 2 for (p, low), (q, high) in pairwise(quantiles))


AZURE_CODE_INPUT: Quantiles = (
    (0, 3),
    (0.05, 75),
    (0.1, 147),
    (0.25, 578),
    (0.5, 1469),
    (0.75, 2745),
    (0.9, 5188),
    (0.95, 7303),
    (0.99, 7436),
    (1, 7437),
)
"""Prompt tokens; mean 2,048."""

AZURE_CODE_OUTPUT: Quantiles = (
    (0, 6),
    (0.1, 7),
    (0.25, 9),
    (0.5, 13),
    (0.75, 24),
    (0.9, 55),
    (0.95, 90),
    (0.99, 251),
    (0.995, 359),
    (0.999, 825),
    (1, 1899),
)
"""Output tokens; mean 27.9."""

AZURE_CODE_GAP_US: Quantiles = (
    (0, 0),
    (0.05, 100),
    (0.1, 200),
    (0.25, 2100),
    (0.5, 63_800),
    (0.75, 104_000),
    (0.9, 272_900),
    (0.95, 400_800),
    (0.99, 2_205_100),
    (0.995, 9_978_300),
    (0.999, 79_232_500),
    (1, 217_169_000),
)
"""Microseconds between arrivals; mean 389,653, coefficient of variation 13.15."""

MOONCAKE_OUTPUT: Quantiles = (
    (0, 1),
    (0.05, 10),
    (0.1, 24),
    (0.25, 157),
    (0.5, 350),
    (0.75, 472),
    (0.9, 597),
    (0.95, 698),
    (0.99, 1119),
    (1, 2000),
)
"""Output tokens; mean 343."""

WEKA_GROWTH: Quantiles = (
    (0, 0),
    (0.1, 0),
    (0.25, 44),
    (0.5, 274),
    (0.75, 993),
    (0.9, 2731),
    (0.95, 5104),
    (0.99, 16_152),
    (1, 23_830),
)
"""Tokens that a turn adds to prompt and output of the turn before, cut at the 99.5 % quantile."""

WEKA_OUTPUT: Quantiles = (
    (0, 1),
    (0.05, 88),
    (0.1, 101),
    (0.25, 137),
    (0.5, 212),
    (0.75, 427),
    (0.9, 865),
    (0.95, 1464),
    (0.99, 4659),
    (1, 5900),
)
"""Output tokens, cut at the 99.5 % quantile."""

WEKA_THINK_MS: Quantiles = (
    (0, 0),
    (0.05, 3000),
    (0.1, 4000),
    (0.25, 5000),
    (0.5, 10_000),
    (0.75, 38_000),
    (0.8, 60_000),
    (1, 60_000),
)
"""Think times in milliseconds, cut at 60 s as in the replay tool of the same authors."""

WEKA_REWRITES = 0.069
"""Share of turns that do not extend the turn before but rewrite history."""
