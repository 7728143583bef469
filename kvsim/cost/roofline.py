"""Step time from data-sheet peaks: every kernel takes its arithmetic or its traffic, whichever is
longer.

```
step = host + layers x floor + 2 all-reduces per layer + exchange of replicas
     + max(FLOPs of the linear layers, reading their weights once)
     + max(FLOPs of the experts of each token, reading the experts that any token has)
     + max(FLOPs of prompt attention, reading its keys and values)
     + max(FLOPs of decode attention, reading its keys and values)
     + max(FLOPs of the logits, reading the output projection)
     + copied blocks, read and written
```

Kernels run one after another, so their times add up; only within one kernel do arithmetic and
traffic overlap. Attention is causal: token i of a prompt chunk sees the context and i tokens of the
chunk (`kvsim.cost.attention`). Activations, embeddings and norms are part of the floor.

Experts, and replicas that share them, are counted as `kvsim.cost.experts` says. Quantised weights
are read at their own size; products run at the FP8 peak if activations are quantised to FP8 too and
the data sheet has that peak, and at the peak of `dtype` otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsim.config import RunConfig
from kvsim.cost.all_reduces import AllReduces
from kvsim.cost.attention import Attention
from kvsim.cost.decodes import cut
from kvsim.cost.experts import Routing, exchange
from kvsim.hardware import Hardware
from kvsim.memory import block_bytes, expert_parallel_size, kv_dtype
from kvsim.models import DTYPE_BYTES, Model

if TYPE_CHECKING:
    from kvsim.cost.explain import Work
    from kvsim.engine.plan import Plan


class RooflineCost:
    """A roofline of one GPU of the tensor-parallel group; all GPUs do the same work.

    Efficiencies (shares of the peaks) and overheads default to the hardware's own.
    """

    kind = "roofline"

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        config: RunConfig,
        *,
        compute_efficiency: float | None = None,
        bandwidth_efficiency: float | None = None,
        layer_overhead_us: float | None = None,
        step_overhead_us: float | None = None,
    ) -> None:
        settings = {
            "compute_efficiency": compute_efficiency,
            "bandwidth_efficiency": bandwidth_efficiency,
            "layer_overhead_us": layer_overhead_us,
            "step_overhead_us": step_overhead_us,
        }
        self._settings = {
            key: getattr(hardware, key) if value is None else value
            for key, value in settings.items()
        }
        _check(self._settings)
        self._model, self._hardware = model, hardware
        self._tensor_parallel_size = config.tensor_parallel_size
        self._set_coefficients(config)
        self._decode_others_ns: dict[int, float] = {}
        """By number of sequences: time of a pure decode step without attention."""

    def _set_coefficients(self, config: RunConfig) -> None:
        """Compute all prices in nanoseconds, so that pricing a step takes a few products."""
        model, hardware, settings = self._model, self._hardware, self._settings
        tp, layers = self._tensor_parallel_size, model.num_hidden_layers
        shard, dtype = model.shard(tp, expert_parallel_size(config)), model.dtype(config.dtype)
        element = DTYPE_BYTES[dtype]
        flop_ns = 1e9 / (hardware.flop_s(dtype) * settings["compute_efficiency"])
        byte_ns = 1 / (hardware.memory_bandwidth_gb_s * settings["bandwidth_efficiency"])
        self._step_ns = settings["step_overhead_us"] * 1e3
        self._layers_ns = layers * settings["layer_overhead_us"] * 1e3
        product_ns = flop_ns
        if model.quantization and model.quantization.fp8_products and "fp8" in hardware.tflop_s:
            product_ns = 1e9 / (hardware.flop_s("fp8") * settings["compute_efficiency"])
        self._token_ns = 2 * shard.linear_parameters * product_ns
        self._weights_ns = shard.linear_bytes(dtype) * byte_ns
        self._routing = Routing(model, config)
        row_ns = 2 * shard.expert_parameters * self._routing.share * product_ns
        self._experts_token_ns = self._routing.gathered(row_ns)
        self._experts_read_ns = shard.expert_bytes(dtype) * byte_ns
        """Nanoseconds of reading all experts of the GPU."""
        self._sample_ns = 2 * shard.head_parameters * flop_ns
        self._head_ns = shard.head_parameters * element * byte_ns
        self._attention = Attention(shard, kv_dtype(model, config), flop_ns, byte_ns)
        self._copy_ns = 2 * block_bytes(model, config) * byte_ns
        self._reduces = AllReduces(hardware.all_reduce, tp, 2 * layers, model.hidden_size * element)
        self._exchange = exchange(hardware.all_reduce, model, config, element)

    @property
    def source(self) -> str:
        """Hardware, model and efficiencies."""
        gpus = "" if self._tensor_parallel_size == 1 else f"{self._tensor_parallel_size} x "
        compute = self._settings["compute_efficiency"]
        bandwidth = self._settings["bandwidth_efficiency"]
        special = ", ".join(self._model.special)
        unlike = f" ({special}; shipped profiles are of dense models only)" if special else ""
        return (
            f"roofline: {gpus}{self._hardware.name} data sheet x {self._model.name}{unlike},"
            f" efficiencies {compute:.2f}/{bandwidth:.2f} (estimated)"
        )

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        seqs, samples, even = plan.decode_seqs, plan.samples, plan.rank_tokens is None
        if even and samples == seqs and seqs and not (plan.chunks or plan.copies):
            return self.decode_ns(seqs, plan.context_tokens)
        tokens = seqs + plan.draft_tokens
        attention_ns = self._attention.decodes_ns(seqs, plan.context_tokens)
        if plan.chunks:
            for new, _ in plan.chunks:
                tokens += new
            attention_ns += self._attention.prompts_ns(plan.chunks)
        copies_ns = plan.copied_blocks * self._copy_ns
        others_ns = self._others_ns(tokens, samples, plan.rank_tokens)
        return round(attention_ns + others_ns + copies_ns)

    def decode_ns(self, sequences: int, context_tokens: int) -> int:
        """Nanoseconds of a pure decode step (`kvsim.cost.decodes`)."""
        others = self._decode_others_ns.get(sequences)
        if others is None:
            others = self._others_ns(sequences, sequences)
            self._decode_others_ns[sequences] = others
        attention = self._attention
        if attention.by_context:
            return round(context_tokens * attention.context_ns + others)
        return round(attention.decodes_ns(sequences, context_tokens) + others)

    def decode_run_ns(
        self, sequences: int, context_tokens: int, steps: int, within_ns: int | None = None
    ) -> list[int]:
        """Nanoseconds of pure decode steps in a row (`kvsim.cost.decodes`)."""
        others, attention = self._others_ns(sequences, sequences), self._attention
        contexts = range(context_tokens, context_tokens + steps * sequences, sequences)
        if attention.by_context:
            each_ns = attention.context_ns
            return cut([round(context * each_ns + others) for context in contexts], within_ns)
        priced = attention.decodes_ns
        times = [round(priced(sequences, context) + others) for context in contexts]
        return cut(times, within_ns)

    def _others_ns(self, tokens: int, samples: int, rank_tokens: float | None = None) -> float:
        """Nanoseconds of a step without attention and copies (`Plan.rank_tokens`)."""
        ns = self._step_ns
        if tokens:
            ns += self._layers_ns + 1e3 * self._reduces.us(tokens)
            ns += max(tokens * self._token_ns, self._weights_ns)
            if self._experts_read_ns:
                mean = tokens if rank_tokens is None else rank_tokens
                read_ns = self._experts_read_ns * self._routing.active(mean)
                ns += max(mean * self._experts_token_ns, read_ns)
                ns += 1e3 * self._exchange.us(mean)
        if samples:
            ns += max(samples * self._sample_ns, self._head_ns)
        return ns

    def explain(self, work: Work) -> dict[str, Any]:
        """The terms of steps (`kvsim.cost.explain`); floors and all-reduces of layers are dense."""
        import numpy as np

        tokens, samples = work.tokens, work.samples
        dense = self._layers_ns + 1e3 * self._reduces.many_us(tokens)
        dense += np.maximum(tokens * self._token_ns, self._weights_ns)
        dense += 1e3 * self._exchange.many_us(tokens)
        read_ns = self._experts_read_ns * self._routing.active(tokens)
        dense += np.maximum(tokens * self._experts_token_ns, read_ns)
        head = np.maximum(samples * self._sample_ns, self._head_ns)
        return {
            "host": self._step_ns,
            "dense": np.where(tokens > 0, dense, 0.0),
            "attention_decode": self._attention.many_decodes_ns(
                work.decode_seqs, work.context_tokens
            ),
            "head": np.where(samples > 0, head, 0.0),
            "copies": work.copied_blocks * self._copy_ns,
        }

    def describe(self) -> dict[str, Any]:
        """Settings, and the source of every figure of the hardware."""
        return {
            "kind": self.kind,
            "source": self.source,
            "hardware": self._hardware.name,
            "model": self._model.name,
            "tensor_parallel_size": self._tensor_parallel_size,
            **self._settings,
            "sources": self._hardware.source,
        }


def _check(settings: dict[str, float]) -> None:
    for key, value in settings.items():
        if key.endswith("efficiency") and not 0 < value <= 1:
            raise ValueError(f"{key}: {value} is not a share; use a value above 0 and at most 1")
        if key.endswith("_us") and not 0 <= value < float("inf"):
            raise ValueError(f"{key}: {value} is not a time; use microseconds of at least 0")
