"""What more memory or a better eviction could add to the prefix cache of a configuration."""

from __future__ import annotations

from kvsim.explain.cachelab.study import Asked, study_trace
from kvsim.explain.cachelab.wording import sentences
from kvsim.machine.memory import block_bytes
from kvsim.run.assembly import assemble
from kvsim.settings.config import RunConfig
from kvsim.workload.reuse import Counting
from kvsim.workload.trace import Trace


def cache_sentences(trace: Trace, config: RunConfig) -> list[str]:
    """The hits of a cache as large as the pool, alone; none where nothing can hit."""
    parts = assemble(config)
    if not parts.blocks.needs_keys or not any(row.content for row in trace.rows):
        return []
    study = study_trace(
        trace,
        Counting(parts.blocks.block_size),
        Asked(
            [parts.blocks.gpu.size], block_bytes=block_bytes(parts.model, parts.config), points=0
        ),
    )
    return [f"Prefix cache alone: {sentence}" for sentence in sentences(study)]
