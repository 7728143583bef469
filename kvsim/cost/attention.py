"""Roofline of the attention of a step, by groups of layers that keep the same of a sequence.

| layers | arithmetic | traffic |
|---|---|---|
| full attention | query x key, probability x value: per head and pair of tokens | keys and values |
| sliding window | as above, of pairs within the window | of tokens within the window |
| latent, decodes | products with the latent vector itself ("absorbed") | latent vectors |
| latent, prompts | as full attention, of the key and value sizes of a head | latent vectors |
| linear | three products with the recurrent state, per token | the state, read and written |

Of several decodes only the sum of their contexts is known. So a window counts as if all were of the
mean length, which is an upper bound. What a chunk spends on unpacking the latent vectors of its
context is not counted. Source of the absorbed form: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvsim.models import DTYPE_BYTES, KvGroup, Shard
from kvsim.sums import added

if TYPE_CHECKING:
    from kvsim.cost.explain import Floats, Ints


class _Prices(NamedTuple):
    """Nanoseconds of all layers of one group."""

    window: int | None
    pair_ns: float
    """Per pair of tokens that a prompt attends to."""
    read_ns: float
    """Per token whose keys and values a prompt reads."""
    decode_ns: float
    """Per token of the context of a decode."""


class Attention:
    """Times of attention on one GPU.

    `flop_ns` and `byte_ns` are the nanoseconds of one operation and of one byte.
    """

    def __init__(self, shard: Shard, kv_dtype: str, flop_ns: float, byte_ns: float) -> None:
        self._keeping: list[_Prices] = []
        self._state_ns = 0.0
        """Per sequence: reading and writing its state."""
        self._token_ns = 0.0
        """Per token: the arithmetic of linear attention."""
        for group in shard.kv_groups:
            if group.kind == "linear_attention":
                self._add_linear(shard, group, flop_ns, byte_ns)
            else:
                self._keeping.append(_prices(shard, group, kv_dtype, flop_ns, byte_ns))
        self.context_ns = added(p.decode_ns for p in self._keeping if p.window is None)
        """Per token of context of decodes, in layers without a window."""
        self.windows = [(p.window, p.decode_ns) for p in self._keeping if p.window is not None]
        """(tokens that it keeps, nanoseconds per token of context) of each sliding window."""
        self.sequence_ns = max(self._state_ns, self._token_ns)
        """Per decode, in layers of linear attention."""
        self.by_context = not (self.windows or self.sequence_ns)
        """Whether decodes take their summed context times `context_ns`, and nothing else."""

    def decodes_ns(self, sequences: int, context_tokens: int) -> float:
        """Nanoseconds of one token of each of `sequences` with `context_tokens` in all."""
        ns = context_tokens * self.context_ns
        for window, token_ns in self.windows:
            ns += min(context_tokens, sequences * window) * token_ns
        if self.sequence_ns:
            ns += sequences * self.sequence_ns
        return ns

    def many_decodes_ns(self, sequences: Ints, context_tokens: Ints) -> Floats:
        """`decodes_ns` of many steps."""
        import numpy as np

        ns = np.asarray(context_tokens * self.context_ns, np.float64)
        for window, token_ns in self.windows:
            ns += np.minimum(context_tokens, sequences * window) * token_ns
        return ns + sequences * self.sequence_ns

    def prompts_ns(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Nanoseconds of prompt chunks, each a pair of its tokens and those before it."""
        pairs = read = 0
        for new, context in chunks:
            pairs += new * context + new * (new + 1) // 2
            read += context + new
        ns = 0.0
        for window, pair_ns, read_ns, _ in self._keeping:
            if window is not None:
                pairs_seen, tokens_seen = _seen_in_window(chunks, window)
                ns += max(pairs_seen * pair_ns, tokens_seen * read_ns)
            else:
                ns += max(pairs * pair_ns, read * read_ns)
        if self.sequence_ns:
            tokens = sum(new for new, _ in chunks)
            ns += max(tokens * self._token_ns, len(chunks) * self._state_ns)
        return ns

    def _add_linear(self, shard: Shard, group: KvGroup, flop_ns: float, byte_ns: float) -> None:
        linear = shard.model.linear
        assert linear is not None
        states = group.layers * linear.recurrent_elements / shard.tensor_parallel_size
        self._token_ns += 2 * 3 * states * flop_ns
        self._state_ns += 2 * group.layers * group.state_bytes * byte_ns


def _prices(shard: Shard, group: KvGroup, kv_dtype: str, flop_ns: float, byte_ns: float) -> _Prices:
    latent = shard.model.latent
    read_ns = group.layers * group.elements * DTYPE_BYTES[kv_dtype] * byte_ns
    # One multiplication and one addition each.
    if latent is None:
        prompt_flops = decode_flops = 4 * group.layers * shard.heads * shard.model.head_dim
    else:
        key = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        absorbed = 2 * latent.kv_lora_rank + latent.qk_rope_head_dim
        prompt_flops = 2 * group.layers * shard.heads * (key + latent.v_head_dim)
        decode_flops = 2 * group.layers * shard.heads * absorbed
    pair_ns = prompt_flops * flop_ns
    return _Prices(group.window, pair_ns, read_ns, max(decode_flops * flop_ns, read_ns))


def _seen_in_window(chunks: Iterable[tuple[int, int]], window: int) -> tuple[int, int]:
    """Pairs of tokens that prompt chunks attend to, and tokens whose keys and values they read."""
    pairs = read = 0
    for new, context in chunks:
        growing = min(max(window - context, 0), new)  # tokens that still see everything before
        pairs += growing * context + growing * (growing + 1) // 2 + (new - growing) * window
        read += min(context, window) + new
    return pairs, read
