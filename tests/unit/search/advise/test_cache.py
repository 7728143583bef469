"""What `kvsim advise` adds about the prefix cache of its best settings."""

from __future__ import annotations

from kvsim.search.advice import cache_sentences
from kvsim.settings.config import make_config
from kvsim.workload import open_trace

SETTINGS = {
    "model": "llama-3.1-8b",
    "engine": "vllm-v1",
    "num_gpu_blocks_override": 4096,
    "max_model_len": 32_768,
}


def test_the_pool_beside_one_of_twice_the_size_and_the_optimum() -> None:
    said = cache_sentences(open_trace("agents"), make_config(SETTINGS))
    first, second = (" ".join(sentence.split()) for sentence in said)
    # The figures of docs/how-to/cache.md, for 8 GiB.
    assert first.startswith("Prefix cache alone: At 8.0 GiB, LRU finds 30.0 % of the prompt tokens")
    assert "Twice the memory gives +10.8 points with LRU" in second


def test_nothing_is_said_where_nothing_can_hit() -> None:
    off = make_config({**SETTINGS, "enable_prefix_caching": False})
    assert cache_sentences(open_trace("agents"), off) == []
