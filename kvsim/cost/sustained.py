"""How much longer public runs took that kept GPUs busy with prompts, and a factor for yours.

Kernel tables hold kernels timed alone, mostly on weights of zeros; data sheets hold peaks. A GPU at
work for minutes reaches less, by what its power limit, the kernels of a release and the host leave.
Nothing public says by how much on a given machine, so the factor is 1 unless you give it, and every
label says how far public runs were off (`docs/results/real-runs.md`).
"""

from __future__ import annotations

from typing import NamedTuple

from librt.vecs import extend, vec
from mypy_extensions import i64

from kvsim.core.plan import Plan


class Missed(NamedTuple):
    """Measured over predicted duration of prompt-heavy public runs, with the front end priced where
    its time is known."""

    least: float
    most: float
    runs: str


_GPUSTACK = "gpustack performance-lab 47277d7, vLLM 0.11.0"
_TENSTORRENT = "Qwen2.5-72B on 2 GPUs, github.com/tenstorrent/tt-inference-server/issues/143"
PUBLIC = {
    ("a100-sxm-80gb", "table"): Missed(1.05, 1.11, f"Qwen3-14B, {_GPUSTACK}"),
    ("a100-sxm-80gb", "roofline"): Missed(1.09, 1.09, f"gpt-oss-20b, {_GPUSTACK}"),
    ("h100-sxm", "table"): Missed(1.08, 1.78, f"{_TENSTORRENT}; Qwen3-14B, {_GPUSTACK}"),
    ("h200-sxm", "roofline"): Missed(1.49, 1.49, f"DeepSeek-R1 on 8 GPUs, {_GPUSTACK}"),
    ("h200-sxm", "table of experts"): Missed(1.09, 1.09, f"DeepSeek-R1 on 8 GPUs, {_GPUSTACK}"),
    ("rtx-4090", "roofline"): Missed(1.28, 1.28, "Mistral-7B, 48 clients, vLLM 0.15.1"),
}
"""By hardware, and what prices its steps: a table, also of experts, or the roofline."""


def missed(hardware: str, prices: str) -> Missed | None:
    """What is known of such prices on such a GPU; a table of experts is a table."""
    plain = prices.removesuffix(" of experts")
    return PUBLIC.get((hardware, prices)) or PUBLIC.get((hardware, plain))


def label(hardware: str, prices: str, sustained: float) -> str:
    """What the source of step times says of it; empty where no public run is known."""
    if sustained != 1:
        return f"; sustained factor: {sustained:g} on steps with prompts"
    known = missed(hardware, prices)
    if known is None:
        return ""
    spread = f"{known.least:g}"
    if known.most > known.least:
        spread += f" to {known.most:g}"
    return f"; prompt-heavy public runs took {spread} times as long (cost.sustained)"


def check(sustained: float) -> float:
    """The factor. Raises `ValueError` for one that is none."""
    if not 0 < sustained < float("inf"):
        raise ValueError(f"sustained: {sustained} is not a factor; use one above 0")
    return sustained


Parts = tuple[float, float, float, float, float]
"""What the parts of a step take (`kvsim.cost.explain.Terms`)."""


class Sustained:
    """What prices steps by their counts, and those with prompts by a factor besides."""

    _sustained: float
    """The factor."""

    def _sustained_ns(self, ns: i64, plan: Plan) -> int:
        """What a step of `ns` nanoseconds takes with the factor."""
        slowed = self._sustained != 1 and plan.num_chunks
        return round(float(ns) * self._sustained) if slowed else ns

    def _sustained_terms(self, terms: Parts, prefill_seqs: i64) -> Parts:
        """The same for what its parts take."""
        factor = self._sustained
        if factor == 1 or not prefill_seqs:
            return terms
        host, dense, attention, head, copies = terms
        return host * factor, dense * factor, attention * factor, head * factor, copies * factor

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step, with the factor."""
        raise NotImplementedError

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
        """What the parts of a step take, with the factor (`kvsim.cost.explain.ByStep.terms`)."""
        raise NotImplementedError

    def all_terms(self, counts: list[list[int]]) -> vec[float]:
        """The terms of many steps (`ByStep.all_terms`)."""
        prefill_tokens, prefill_seqs, decode_seqs, context_tokens = counts[:4]
        samples, copied_blocks, draft_tokens = counts[4:]
        found = vec[float]()
        for i in range(len(samples)):
            host, dense, attention, head, copies = self.terms(
                prefill_tokens[i],
                prefill_seqs[i],
                decode_seqs[i],
                context_tokens[i],
                samples[i],
                copied_blocks[i],
                draft_tokens[i],
            )
            found = extend(found, vec[float]([host, dense, attention, head, copies]))
        return found
