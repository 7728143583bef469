"""The roofline of a step: nanoseconds of each kernel, of its arithmetic or its traffic
(`kvsim.cost.roofline`)."""

from __future__ import annotations

from mypy_extensions import i64

from kvsim.core.plan import Plan
from kvsim.cost.all_reduces import AllReduces
from kvsim.cost.attention import Attention
from kvsim.cost.experts import Routing, exchange
from kvsim.machine.hardware import Hardware
from kvsim.machine.memory import block_bytes, expert_parallel_size, kv_dtype
from kvsim.machine.models import DTYPE_BYTES, Model
from kvsim.settings.config import RunConfig


class Bounds:
    """All prices in nanoseconds, so that pricing a step takes a few products."""

    host_ns: float
    layers_ns: float
    token_ns: float
    """Per token: arithmetic of the linear layers; `weights_ns`: reading them."""
    weights_ns: float
    experts_token_ns: float
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
    ) -> None:
        tp, layers = config.tensor_parallel_size, model.num_hidden_layers
        shard, dtype = model.shard(tp, expert_parallel_size(config)), model.dtype(config.dtype)
        element = DTYPE_BYTES[dtype]
        flop_ns = 1e9 / (hardware.flop_s(dtype) * compute_efficiency)
        byte_ns = 1 / (hardware.memory_bandwidth_gb_s * bandwidth_efficiency)
        self.host_ns = step_overhead_us * 1e3
        self.layers_ns = layers * layer_overhead_us * 1e3
        product_ns = flop_ns
        if model.quantization and model.quantization.fp8_products and "fp8" in hardware.tflop_s:
            product_ns = 1e9 / (hardware.flop_s("fp8") * compute_efficiency)
        self.token_ns = 2 * shard.linear_parameters * product_ns
        self.weights_ns = shard.linear_bytes(dtype) * byte_ns
        self.routing = Routing(model, config)
        row_ns = 2 * shard.expert_parameters * self.routing.share * product_ns
        self.experts_token_ns = self.routing.gathered(row_ns)
        self.experts_read_ns = shard.expert_bytes(dtype) * byte_ns
        self.sample_ns = 2 * shard.head_parameters * flop_ns
        self.head_ns = shard.head_parameters * element * byte_ns
        self.attention = Attention(shard, kv_dtype(model, config), flop_ns, byte_ns)
        self.copy_ns = 2 * block_bytes(model, config) * byte_ns
        self.reduces = AllReduces(hardware.all_reduce, tp, 2 * layers, model.hidden_size * element)
        self.exchange = exchange(hardware.all_reduce, model, config, element)

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
        mean = plan.rank_tokens
        others_ns = self.others_ns(tokens, plan.samples, float(tokens) if mean is None else mean)
        return round(attention_ns + others_ns + float(copied) * self.copy_ns)

    def others_ns(self, tokens: i64, samples: i64, mean: float) -> float:
        """Nanoseconds of a step without attention and copies; `mean` tokens are on each of the
        ranks that share experts (`Plan.rank_tokens`)."""
        ns, count = self.host_ns, float(tokens)
        if tokens:
            ns += self.layers_ns + 1e3 * self.reduces.us(count)
            ns += max(count * self.token_ns, self.weights_ns)
            if self.experts_read_ns:
                read_ns = self.experts_read_ns * self.routing.active(mean)
                ns += max(mean * self.experts_token_ns, read_ns)
                ns += 1e3 * self.exchange.us(mean)
        if samples:
            ns += max(float(samples) * self.sample_ns, self.head_ns)
        return ns
