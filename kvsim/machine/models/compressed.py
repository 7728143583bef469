"""Counts what layers of compressed attention have and keep (DeepSeek-V4).

Sources: vLLM 0.33.0, models/deepseek_v4/attention.py and compressor.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvsim.machine.models.parts import Compressed, Indexer, KvGroup


def compressed_attention(
    parts: Compressed,
    index: int,
    hidden: int,
    width: int,
    heads: int,
    tp: int,
    indexer: Indexer | None,
) -> tuple[int, int]:
    """Weights of the products of a layer with its hyper-connections, and its vectors.

    `heads`: those of one of `tp` GPUs, each of `width` elements.
    """
    outputs, queries = parts.o_groups * parts.o_lora_rank, heads * width
    products = hidden * (parts.q_lora_rank + width) + parts.q_lora_rank * queries
    products += queries * parts.o_lora_rank + outputs // tp * hidden
    streams = parts.hc_mult
    vectors = parts.q_lora_rank + width + heads
    vectors += 2 * (2 + streams) * streams * streams * hidden if streams > 1 else 0
    ratio = parts.compress_ratios[index]
    if ratio > 1:
        overlap = 2 if ratio == 4 else 1
        products += 2 * hidden * overlap * width
        vectors += ratio * overlap * width
    if ratio == 4 and indexer is not None:
        products += indexer.parameters(hidden, parts.q_lora_rank)
        products += 3 * hidden * indexer.index_head_dim  # it compresses, too
    return products, vectors


def compressed_groups(
    parts: Compressed,
    layers: range,
    width: int,
    heads: int,
    window: int | None,
    index: Indexer | None,
) -> Iterator[KvGroup]:
    """What layers keep; vectors are stored in 8 bits with a scale for every 64 elements, those of
    the position in 16 (`head_bytes`)."""
    plain = width - parts.qk_rope_head_dim
    entry = plain + 2 * parts.qk_rope_head_dim + plain // 64 + 1
    pair = 2 * heads * width
    ratios = [parts.compress_ratios[layer] for layer in layers]
    group = KvGroup("sliding_attention", len(ratios), 0, 1, window)
    yield group._replace(further_bytes=entry, pair_elements=pair)
    for ratio in sorted({ratio for ratio in ratios if ratio > 1}):
        number, indexer = ratios.count(ratio), index if ratio == 4 else None
        group = KvGroup("compressed_attention", number, 0, 1, every=ratio, further_bytes=entry)
        chosen = None if indexer is None else indexer.index_topk * ratio
        yield group._replace(pair_elements=pair // ratio, attended=chosen)
        if indexer is not None:
            group = indexer.group(number)
            yield group._replace(pair_elements=group.pair_elements // ratio, every=ratio)
