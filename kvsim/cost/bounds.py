"""The roofline of a step: nanoseconds of each kernel, of its arithmetic or its traffic
(`kvsim.cost.formulas`).

Attention is counted by groups of layers that keep the same of a sequence:

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

from mypy_extensions import i64

from kvsim.core.plan import Plan
from kvsim.core.vectors import added
from kvsim.cost.experts import AllReduces, Routing, exchange
from kvsim.cost.sustained import Parts, Sustained
from kvsim.machine.hardware import Hardware
from kvsim.machine.memory import block_bytes, expert_parallel_size, kv_dtype
from kvsim.machine.models import DTYPE_BYTES, KvGroup, Model, Shard
from kvsim.settings.config import RunConfig


class _Prices:
    """Nanoseconds of all layers of one group."""

    window: i64
    """Tokens that they keep; 0: all."""
    pair_ns: float
    """Per pair of tokens that a prompt attends to."""
    read_ns: float
    """Per token whose keys and values a prompt reads."""
    decode_ns: float
    """Per token of the context of a decode."""

    def __init__(self, window: int, pair_ns: float, read_ns: float, decode_ns: float) -> None:
        self.window, self.pair_ns = window, pair_ns
        self.read_ns, self.decode_ns = read_ns, decode_ns


class Attention:
    """Times of attention on one GPU.

    `flop_ns` and `byte_ns` are the nanoseconds of one operation and of one byte.
    """

    context_ns: float
    """Per token of context of decodes, in layers without a window."""
    sequence_ns: float
    """Per decode, in layers of linear attention."""
    _keeping: list[_Prices]
    _windows: list[_Prices]
    _state_ns: float
    """Per sequence: reading and writing its state."""
    _token_ns: float
    """Per token: the arithmetic of linear attention."""

    def __init__(self, shard: Shard, kv_dtype: str, flop_ns: float, byte_ns: float) -> None:
        self._keeping, self._state_ns, self._token_ns = [], 0.0, 0.0
        for group in shard.kv_groups:
            if group.kind == "linear_attention":
                self._add_linear(shard, group, flop_ns, byte_ns)
            else:
                self._keeping.append(_prices(shard, group, kv_dtype, flop_ns, byte_ns))
        self._windows = [prices for prices in self._keeping if prices.window]
        self.context_ns = added([each.decode_ns for each in self._keeping if not each.window])
        # A decode is one token of one sequence: it reads and writes its state, or multiplies with
        # it.
        self.sequence_ns = max(self._state_ns, self._token_ns)

    def decodes_ns(self, sequences: i64, context_tokens: i64) -> float:
        """Nanoseconds of one token of each of `sequences` with `context_tokens` in all."""
        ns = float(context_tokens) * self.context_ns
        for group in self._windows:
            ns += float(min(context_tokens, sequences * group.window)) * group.decode_ns
        return ns + float(sequences) * self.sequence_ns

    def prompts_ns(self, chunks: list[tuple[int, int]]) -> float:
        """Nanoseconds of prompt chunks, each a pair of its tokens and those before it."""
        ns = 0.0
        # One launch serves all chunks, so the bound is that of their sums, not of each chunk.
        for group in self._keeping:
            pairs, read = _seen(chunks, group.window)
            ns += max(float(pairs) * group.pair_ns, float(read) * group.read_ns)
        if self.sequence_ns:
            tokens = float(sum([new for new, _ in chunks]))
            ns += max(tokens * self._token_ns, float(len(chunks)) * self._state_ns)
        return ns

    def _add_linear(self, shard: Shard, group: KvGroup, flop_ns: float, byte_ns: float) -> None:
        linear = shard.model.linear
        assert linear is not None
        states = group.layers * linear.recurrent_elements / shard.tensor_parallel_size
        # Three products, each a multiplication and an addition per element of the state.
        self._token_ns += 2 * 3 * states * flop_ns
        self._state_ns += 2 * group.layers * group.state_bytes * byte_ns


def _prices(shard: Shard, group: KvGroup, kv_dtype: str, flop_ns: float, byte_ns: float) -> _Prices:
    latent = shard.model.latent
    read_ns = group.layers * group.token_bytes(DTYPE_BYTES[kv_dtype]) * byte_ns
    # One multiplication and one addition each.
    prompt_flops = decode_flops = 2 * group.layers * group.pair_elements
    if latent is not None and group.kind == "latent_attention":
        absorbed = 2 * latent.kv_lora_rank + latent.qk_rope_head_dim
        decode_flops = 2 * group.layers * shard.heads * absorbed
    pair_ns, window = prompt_flops * flop_ns, group.window or group.attended or 0
    return _Prices(window, pair_ns, read_ns, max(decode_flops * flop_ns, read_ns))


def _seen(chunks: list[tuple[int, int]], window: i64) -> tuple[i64, i64]:
    """Pairs of tokens that prompt chunks attend to, and tokens whose keys and values they read."""
    pairs: i64 = 0
    read: i64 = 0
    for new_tokens, before in chunks:
        new: i64 = new_tokens
        context: i64 = before
        growing: i64 = new  # tokens that still see everything before
        if window:
            growing = min(max(window - context, 0), new)
        # They see context + 1, context + 2, ... tokens; every later one sees `window`.
        pairs += growing * context + growing * (growing + 1) // 2 + (new - growing) * window
        read += (min(context, window) if window else context) + new
    return pairs, read


class Bounds(Sustained):
    """All prices in nanoseconds, so that pricing a step takes a few products."""

    host_ns: float
    layers_ns: float
    token_ns: float
    """Per token: arithmetic of the linear layers; `weights_ns`: reading them."""
    weights_ns: float
    experts_token_ns: float
    experts_padding_ns: float
    """Arithmetic of the rows that all experts of the GPU have besides those of tokens."""
    experts_read_ns: float
    """Reading all experts of the GPU."""
    sample_ns: float
    head_ns: float
    copy_ns: float
    """Per copied block."""
    routing: Routing
    attention: Attention
    reduces: AllReduces
    exchange: AllReduces

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        config: RunConfig,
        *,
        compute_efficiency: float,
        bandwidth_efficiency: float,
        layer_overhead_us: float,
        step_overhead_us: float,
        sustained: float = 1.0,
    ) -> None:
        self._sustained = sustained
        tp, layers = config.tensor_parallel_size, model.num_hidden_layers
        shard, dtype = model.shard(tp, expert_parallel_size(config)), model.dtype(config.dtype)
        element = DTYPE_BYTES[dtype]
        flop_ns = 1e9 / (hardware.flop_s(dtype) * compute_efficiency)
        # GB/s are bytes per nanosecond.
        byte_ns = 1 / (hardware.memory_bandwidth_gb_s * bandwidth_efficiency)
        self.host_ns = step_overhead_us * 1e3
        self.layers_ns = layers * layer_overhead_us * 1e3
        product_ns = flop_ns
        if model.quantization and model.quantization.fp8_products and "fp8" in hardware.tflop_s:
            product_ns = 1e9 / (hardware.flop_s("fp8") * compute_efficiency)
        self.token_ns = 2 * shard.linear_parameters * product_ns
        self.weights_ns = shard.linear_bytes(dtype) * byte_ns
        self.routing = Routing(model, config)
        of_experts, padding_rows = hardware.products_of(model, dtype), 0.0
        if of_experts is not None:
            # 1 TFLOP/s is 1,000 operations per nanosecond. Kernels reached it: no efficiency comes
            # on top.
            product_ns, padding_rows = 1e-3 / of_experts.tflop_s, of_experts.padding_rows
        row_ns = 2 * shard.expert_parameters * product_ns
        # `row_ns` is that of all experts of the GPU; a token has a share of them, and those of all
        # replicas come.
        self.experts_token_ns = self.routing.gathered(row_ns * self.routing.share)
        self.experts_padding_ns = row_ns * padding_rows
        self.experts_read_ns = shard.expert_bytes(dtype) * byte_ns
        self.sample_ns = 2 * shard.head_parameters * flop_ns
        self.head_ns = shard.head_parameters * element * byte_ns
        self.attention = Attention(shard, kv_dtype(model, config), flop_ns, byte_ns)
        # Read, and written.
        self.copy_ns = 2 * block_bytes(model, config) * byte_ns
        self.reduces = AllReduces(hardware.all_reduce, tp, 2 * layers, model.hidden_size * element)
        self.exchange = exchange(hardware.exchange, model, config, element)

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        seqs: i64 = plan.decode_seqs
        copied: i64 = plan.copied_blocks
        chunks: list[tuple[int, int]] = plan.chunks
        tokens: i64 = seqs + plan.draft_tokens
        attention_ns = self.attention.decodes_ns(seqs, plan.context_tokens)
        if chunks:
            for new, _ in chunks:
                tokens += new
            attention_ns += self.attention.prompts_ns(chunks)
        # None: the other ranks are not simulated, and taken to have as many tokens as this one.
        mean = plan.rank_tokens
        others_ns = self.others_ns(tokens, plan.samples, float(tokens) if mean is None else mean)
        ns = round(attention_ns + others_ns + float(copied) * self.copy_ns)
        return self._sustained_ns(ns, plan)

    def others_ns(self, tokens: i64, samples: i64, mean: float) -> float:
        """Nanoseconds of a step without attention and copies; `mean` tokens are on each of the
        ranks that share experts (`Plan.rank_tokens`)."""
        ns, count = self.host_ns, float(tokens)
        if tokens:
            ns += self.layers_ns + 1e3 * self.reduces.us(count)
            ns += max(count * self.token_ns, self.weights_ns)
            if self.experts_read_ns:
                ns += self._experts_ns(mean)
                ns += 1e3 * self.exchange.us(mean)
        if samples:
            ns += max(float(samples) * self.sample_ns, self.head_ns)
        return ns

    def _experts_ns(self, tokens: float) -> float:
        active = self.routing.active(tokens)
        products_ns = tokens * self.experts_token_ns + active * self.experts_padding_ns
        return max(products_ns, active * self.experts_read_ns)

    def terms(
        self,
        prefill_tokens: i64,
        prefill_seqs: i64,
        decode_seqs: i64,
        context_tokens: i64,
        samples: i64,
        copied_blocks: i64,
        draft_tokens: i64,
    ) -> Parts:
        """What the parts of a step take (`Sustained.terms`); floors and all-reduces of layers are
        dense."""
        tokens: i64 = prefill_tokens + decode_seqs + draft_tokens
        count = float(tokens)
        dense_ns = 0.0
        if tokens:
            dense_ns = self.layers_ns + 1e3 * self.reduces.us(count)
            dense_ns += max(count * self.token_ns, self.weights_ns)
            # A row of a step does not hold the tokens of other ranks: they are taken to be as many.
            dense_ns += 1e3 * self.exchange.us(count)
            dense_ns += self._experts_ns(count)
        found = (
            self.host_ns,
            dense_ns,
            self.attention.decodes_ns(decode_seqs, context_tokens),
            max(float(samples) * self.sample_ns, self.head_ns) if samples else 0.0,
            float(copied_blocks) * self.copy_ns,
        )
        return self._sustained_terms(found, prefill_seqs)
