"""Paged blocks without a prefix cache."""

from __future__ import annotations

from kvsim.blocks.tables import Tables


class Naive(Tables):
    """Paged blocks, none shared between requests (vLLM without `enable_prefix_caching`)."""
