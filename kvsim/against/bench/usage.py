"""Counts what a process has used: CPU time and memory, as Unix accounts for them."""

from __future__ import annotations

import sys

from kvsim.errors import ConfigError

try:
    import resource
except ImportError:  # Windows
    raise ConfigError(
        "bench: Windows does not report the CPU time of a process this way; use WSL, Linux or macOS"
    ) from None


def cpu_s() -> float:
    """User and system time of this process so far."""
    return _cpu_s(resource.RUSAGE_SELF)


def children_cpu_s() -> float:
    """User and system time of the child processes that have ended."""
    return _cpu_s(resource.RUSAGE_CHILDREN)


def peak_rss_mb() -> float:
    """The most memory that this process has held."""
    return _peak_rss_mb(resource.RUSAGE_SELF)


def children_peak_rss_mb() -> float:
    """The most memory that one of the child processes that have ended has held."""
    return _peak_rss_mb(resource.RUSAGE_CHILDREN)


def _peak_rss_mb(whose: int) -> float:
    peak = resource.getrusage(whose).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def _cpu_s(whose: int) -> float:
    usage = resource.getrusage(whose)
    return usage.ru_utime + usage.ru_stime
