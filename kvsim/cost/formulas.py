"""Step times by formula: fixed coefficients, or the data sheet's peaks.

*Constant*: linear, transparent and exact, but unlike any real machine.

*Roofline*: every kernel takes its arithmetic or its traffic, whichever is longer.

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
chunk (`kvsim.cost.bounds`). Activations, embeddings and norms are part of the floor.

Experts, and replicas that share them, are counted as `kvsim.cost.experts` says. Their products
reach what public tables show of a GPU and a way to store weights, where the hardware states it
(`kvsim.machine.hardware.ExpertProducts`). Quantised weights
are read at their own size; products run at the FP8 peak if activations are quantised to FP8 too and
the data sheet has that peak, and at the peak of `dtype` otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsim.cost.bounds import Bounds
from kvsim.cost.explain import ByStep, Compiled
from kvsim.cost.sustained import check, label
from kvsim.machine.hardware import Hardware
from kvsim.machine.models import Model
from kvsim.settings.config import RunConfig

if TYPE_CHECKING:
    from kvsim.core.plan import Plan


class ConstantCost(ByStep):
    """step + prompt tokens and drafts, decoding sequences and their context, each times a constant.

    The defaults describe an 8 B model on a data-centre GPU in round numbers. Times are whole
    nanoseconds, so sums are exact: `ValueError` for anything finer. Block copies are free.
    """

    kind = "constant"

    def __init__(
        self,
        step_us: float = 6000,
        prefill_token_us: float = 40,
        decode_seq_us: float = 20,
        context_token_ns: int = 43,
    ) -> None:
        self._step_ns = _whole_ns("step_us", step_us * 1000)
        self._prefill_token_ns = _whole_ns("prefill_token_us", prefill_token_us * 1000)
        self._decode_seq_ns = _whole_ns("decode_seq_us", decode_seq_us * 1000)
        self._context_token_ns = _whole_ns("context_token_ns", context_token_ns)

    @property
    def source(self) -> str:
        """The formula with its coefficients."""
        return (
            f"constant: {self._step_ns / 1000:g} us"
            f" + {self._prefill_token_ns / 1000:g} us per prompt token"
            f" + {self._decode_seq_ns / 1000:g} us per decoding sequence"
            f" + {self._context_token_ns} ns per token of its context"
        )

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        ns = (
            self._step_ns
            + plan.decode_seqs * self._decode_seq_ns
            + plan.context_tokens * self._context_token_ns
        )
        ns += plan.draft_tokens * self._prefill_token_ns
        for tokens, _ in plan.chunks:
            ns += tokens * self._prefill_token_ns
        return ns

    def terms(self, *counts: int) -> tuple[float, ...]:
        """What the parts of a step take (`ByStep.terms`); prompts and decodes count as dense."""
        prefill_tokens, _, decode_seqs, context_tokens, _, _, draft_tokens = counts
        dense = (prefill_tokens + draft_tokens) * self._prefill_token_ns
        dense += decode_seqs * self._decode_seq_ns
        return self._step_ns, dense, context_tokens * self._context_token_ns, 0.0, 0.0

    def describe(self) -> dict[str, Any]:
        """Coefficients in nanoseconds."""
        return {
            "kind": self.kind,
            "source": self.source,
            "step_ns": self._step_ns,
            "prefill_token_ns": self._prefill_token_ns,
            "decode_seq_ns": self._decode_seq_ns,
            "context_token_ns": self._context_token_ns,
        }


def _whole_ns(key: str, ns: float) -> int:
    # 1,000 times a decimal fraction may miss the whole number by the rounding of floats.
    if not 0 <= ns < float("inf") or abs(ns - round(ns)) > 1e-6:
        raise ValueError(f"{key}: expected a whole number of nanoseconds of at least 0")
    return round(ns)


class RooflineCost(Compiled):
    """A roofline of one GPU of the tensor-parallel group; all GPUs do the same work.

    Efficiencies (shares of the peaks) and overheads default to the hardware's own. `sustained` is a
    factor on steps with prompts (`kvsim.cost.sustained`).
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
        sustained: float = 1.0,
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
        self._sustained = check(sustained)
        self._products = hardware.products_of(model, model.dtype(config.dtype))
        self._tensor_parallel_size = config.tensor_parallel_size
        self._bounds = Bounds(model, hardware, config, **self._settings, sustained=sustained)
        self._compiled = self._bounds

    @property
    def source(self) -> str:
        """Hardware, model and efficiencies."""
        gpus = "" if self._tensor_parallel_size == 1 else f"{self._tensor_parallel_size} x "
        compute = self._settings["compute_efficiency"]
        bandwidth = self._settings["bandwidth_efficiency"]
        special = ", ".join(self._model.special)
        unlike = f" ({special}; no profile of it is shipped)" if special else ""
        experts = ""
        if self._products is not None:
            experts = f", experts {self._products.tflop_s:g} TFLOP/s (public kernels)"
        return (
            f"roofline: {gpus}{self._hardware.name} data sheet x {self._model.name}{unlike},"
            f" efficiencies {compute:.2f}/{bandwidth:.2f} (estimated)"
            f"{experts}{label(self._hardware.name, 'roofline', self._sustained)}"
        )

    def describe(self) -> dict[str, Any]:
        """Settings, and the source of every figure of the hardware."""
        return {
            "kind": self.kind,
            "source": self.source,
            "hardware": self._hardware.name,
            "model": self._model.name,
            "tensor_parallel_size": self._tensor_parallel_size,
            **self._settings,
            "sustained": self._sustained,
            "sources": self._hardware.source,
        }


def _check(settings: dict[str, float]) -> None:
    for key, value in settings.items():
        if key.endswith("efficiency") and not 0 < value <= 1:
            raise ValueError(f"{key}: {value} is not a share; use a value above 0 and at most 1")
        if key.endswith("_us") and not 0 <= value < float("inf"):
            raise ValueError(f"{key}: {value} is not a time; use microseconds of at least 0")
