"""What is added to the prices of a step by estimate: the stages of a pipeline, and drafts.

*Stages* each hold a part of the layers:

```
stage 0   host ┬ layers ┬ send ─┐
stage 1   host ┴ ······ waits ··┴ layers ┬ logits
```
The price of the whole step is divided: logits to the last stage, everything else that is not the
host's by the number of layers, as if all were alike. Looking embeddings up takes no time of its
own. The workers of all stages are told of a step at once, so the host's part is in every stage.
A cost model that does not explain its prices is divided by layers alone.

Between stages go the hidden states and the residual of every token: vLLM 0.33.0,
`v1/worker/gpu_worker.py` `execute_model`, `distributed/parallel_state.py` `isend_tensor_dict`. Each
GPU of a tensor-parallel group sends its share, and the receivers gather them. The figures of the
link are those of the all-reduce (`kvsim.machine.hardware.AllReduce`).

*Drafts* are made, which makes a step longer, and verified, priced by the cost model of the run.
With d drafts of a sequence, d tokens more go through the linear layers of a step and get logits
(`Plan.draft_tokens`). Its attention reads the same keys and values once for all of them, so it
costs as much as for one token. That holds as long as attention is limited by memory. Attention of
latent vectors (DeepSeek) comes close to its arithmetic with one token, and is priced too low.

| drafts come from | time of the drafter |
|---|---|
| n-grams | none: the look-up on the host is not modelled |
| layers behind the model: EAGLE, MTP | d passes of so many layers, each with logits |
| layers that make all drafts at once: DFlash | one pass |
| another model | d passes of that model, priced by the cost model of the run for that model |

The first pass has all tokens of the step, the others one token of each sequence. A pass takes no
host time, as if all passes were one CUDA graph.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from kvsim.cost.explain import Explains, Wrapped, terms_of
from kvsim.machine.hardware import STAGE_LINK, AllReduce, Hardware, link_settings
from kvsim.machine.models import DTYPE_BYTES, Model
from kvsim.settings.config import RunConfig
from kvsim.settings.library import convert

if TYPE_CHECKING:
    from kvsim.core.plan import Plan
    from kvsim.cost import Cost

SENT_TENSORS = 2
"""Hidden states and residual."""


class Passage(NamedTuple):
    """What a step takes on its way through the stages, in nanoseconds."""

    host_ns: int
    """The host's part, on every stage."""
    stages_ns: tuple[int, ...]
    """Kernels of each stage, in order."""
    send_ns: int
    """From one stage to the next."""


class StagedCost(Wrapped):
    """A cost model whose steps pass the stages of a pipeline. `step_ns` is of all stages together,
    without what is sent."""

    def __init__(self, cost: Cost, model: Model, hardware: Hardware, config: RunConfig) -> None:
        """Raises `ConfigError` for more stages than layers, and for a `cost.stage_link` that is not
        one."""
        super().__init__(cost)
        self._terms = terms_of(cost) if isinstance(cost, Explains) else None
        self._layers = [len(each) for each in model.stages(config.pipeline_parallel_size)]
        self.number = len(self._layers)
        self._tensor_parallel_size = config.tensor_parallel_size
        self._token_bytes = SENT_TENSORS * model.hidden_size
        self._token_bytes *= DTYPE_BYTES[model.dtype(config.dtype)]
        self._link, self._link_source = hardware.all_reduce, f"all-reduce of {hardware.name}"
        if config.cost.get(STAGE_LINK) is not None:
            given = link_settings(config, STAGE_LINK)
            self._link = convert(given, AllReduce, "cost.stage_link")
            self._link_source = "as set"

    def passage(self, plan: Plan, step_ns: int) -> Passage:
        """Divides the price of a step among the stages."""
        host_ns, head_ns = self._host_and_head_ns(plan, step_ns)
        layers_ns, all_layers = step_ns - host_ns - head_ns, sum(self._layers)
        # Rounded are the places of the cuts, so that the stages add up to the price.
        ends = [layers_ns * layers // all_layers for layers in accumulate(self._layers)]
        stages_ns = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        stages_ns[-1] += head_ns
        return Passage(host_ns, tuple(stages_ns), self.send_ns(plan.tokens))

    def send_ns(self, tokens: int) -> int:
        """Nanoseconds until the next stage has the activations of so many tokens."""
        gpus, moved = self._tensor_parallel_size, tokens * self._token_bytes
        # Sent by one GPU to another; then gathered, which moves half of what an all-reduce moves.
        us = self._link.us(moved / gpus, 2) + self._link.us(moved / 2, gpus)
        return round(1000 * us)

    def describe(self) -> dict[str, Any]:
        """That of the cost model, and of the stages."""
        described = {"layers": self._layers, "send": f"ESTIMATED: {self._link_source}"}
        return {**self._cost.describe(), "kind": self.kind, "stages": described}

    def _host_and_head_ns(self, plan: Plan, step_ns: int) -> tuple[int, int]:
        """The part of the host in a step, and that of the logits."""
        if self._terms is None:
            return 0, 0
        host, _, _, head, _ = self._terms(
            *(plan.prefill_tokens, plan.num_chunks, plan.decode_seqs, plan.context_tokens),
            # Drafts are in `samples`; by themselves they move the dense term only.
            *(plan.samples, plan.copied_blocks, 0),
        )
        # The terms may exceed a price that other ranks make shorter, or one of a user's own model.
        host_ns = min(int(host), step_ns)
        return host_ns, min(int(head), step_ns - host_ns)


class DraftedCost(Wrapped):
    """A cost model whose steps also take the time of the drafter."""

    def __init__(self, cost: Cost, drafter: str) -> None:
        """`drafter`: where its time comes from, in words."""
        super().__init__(cost)
        self._drafter = drafter

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step with its drafter."""
        return self._cost.step_ns(plan) + plan.drafter_ns

    def describe(self) -> dict[str, Any]:
        """That of the cost model, and of the drafter."""
        return {**self._cost.describe(), "kind": self.kind, "drafter": self._drafter}


class Passes:
    """Prices a drafter: `number` passes of a share of the layers that `cost` prices."""

    def __init__(self, cost: Explains, share: float, number: int) -> None:
        self._terms, self._share, self._number = terms_of(cost), share, number

    def __call__(self, plan: Plan) -> int:
        """Nanoseconds that the drafter takes at the end of a step."""
        sequences, context = plan.decode_seqs, plan.context_tokens
        for each in plan.prefills:
            # A prompt that ends in the step gets a token, and drafts behind it.
            if each.samples:
                sequences += 1
                context += each.computed_before + each.scheduled
        if not sequences:
            return 0
        # Tokens beyond one of each sequence pass through the linear layers only, as drafts do.
        first_ns = self._pass_ns(sequences, context, plan.tokens - sequences)
        return round(first_ns + (self._number - 1) * self._pass_ns(sequences, context, 0))

    def _pass_ns(self, sequences: int, context_tokens: int, draft_tokens: int) -> float:
        terms = self._terms(0, 0, sequences, context_tokens, sequences, 0, draft_tokens)
        _, dense, attention, head, _ = terms
        return (dense + attention) * self._share + head


class Fixed:
    """A drafter that takes the same time in every step in which a sequence gets a token."""

    def __init__(self, us: float) -> None:
        self._ns = round(us * 1000)

    def __call__(self, plan: Plan) -> int:
        """Nanoseconds that the drafter takes at the end of a step."""
        return self._ns if plan.samples else 0
