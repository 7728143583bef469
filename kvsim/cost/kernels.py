"""Times of the kernels of a step, from the tables of a profile's fit.

When one of two counts is known, a table becomes a line over the other count; these lines are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvsim.cost.fused import Fused
from kvsim.cost.interpolation import Interpolation
from kvsim.cost.lines import Line
from kvsim.cost.profile import DecodeGrid, Fit, Grid, MixedGrid
from kvsim.cost.tail import Uneven
from kvsim.sums import added

if TYPE_CHECKING:
    from kvsim.cost.explain import Work
    from kvsim.engine.plan import Plan

MOST_KEPT = 4096
"""Most chunk sizes whose lines are kept."""

NEVER = (float("inf"), float("-inf"))
"""Range of a line without any measured point."""


class ByTokens(Protocol):
    """What a step takes beside the tables, by its tokens alone."""

    @property
    def breaks(self) -> Sequence[float]:
        """Tokens at which its line bends."""
        ...

    def us(self, tokens: float) -> float:
        """Microseconds in a step of so many tokens, of at least 1."""
        ...


Row = tuple[list[float], list[float], tuple[float, float]]
"""A grid at one count: contexts, times there, and the contexts that were measured."""


class Kernels:
    """The tables of `fit` with one of its decode kernels, for a model of `layers` layers.

    `beside` is what the linear layers of the fit do not hold.
    """

    def __init__(
        self,
        fit: Fit,
        decode: DecodeGrid,
        layers: int,
        beside: Sequence[ByTokens] = (),
        uneven: Uneven | None = None,
    ) -> None:
        self._fit, self._decode, self._layers = fit, decode, layers
        self._dense = Line(fit.dense.x, fit.dense.us)
        for term in beside:
            self._dense = self._dense.plus(term.us, term.breaks)
        self._uneven = uneven
        self._head = Line(fit.head.x, fit.head.us)
        self._fused = Fused(fit.mixed) if isinstance(fit.mixed, MixedGrid) else None
        self._prefills: dict[int, Line] = {}
        """By tokens of a chunk: attention of one layer, over its context."""
        self._decode_rows: dict[int, Row] = {}
        self._decodes: dict[int, Line] = {}
        """By number of sequences: attention of one layer, over the summed context; `_decode_steps`
        are whole steps."""
        self._decode_steps: dict[int, Line] = {}
        self._a0, self._a1, self._a2 = fit.step
        self._prompt_step_us = fit.prompt_step_us
        self._copied_block_us = fit.copied_block_us
        self.outside = False
        """Whether the last priced step left a table."""

    def step_us(self, plan: Plan) -> float:
        """Microseconds of a step before any floor; sets `outside`."""
        chunks, entries, samples = plan.chunks, plan.decode_seqs, plan.samples
        self.outside = False
        us = 0.0
        if entries or chunks:
            tokens, dense = entries + plan.draft_tokens, self._dense
            for new, _ in chunks:
                tokens += new
            entries += len(chunks)
            us = dense.at(tokens) + self._layers * self._attention_us(plan)
            if not dense.first <= tokens <= dense.last:
                self.outside = True
        if samples:
            head = self._head
            us += head.at(samples)
            if not head.first <= samples <= head.last:
                self.outside = True
        if plan.copies:
            us += len(plan.copies) * self._copied_block_us
        host_us = self._a0 + self._prompt_step_us if chunks else self._a0
        return host_us + self._a1 * us + self._a2 * entries

    def scaled_ns(self, us: float) -> int:
        """Nanoseconds that so many microseconds of kernels add to a step."""
        return round(self._a1 * us * 1000)

    def uneven_ns(self, sequences: int, context_tokens: int, longest: Sequence[int]) -> int:
        """Nanoseconds that a pure decode step takes longer as its sequences are uneven."""
        if self._uneven is None:
            return 0
        us = self._uneven.decode_us(sequences, context_tokens, longest)
        return self.scaled_ns(self._layers * us)

    def explain(self, work: Work) -> dict[str, Any]:
        """The terms of steps in nanoseconds, before any floor (`kvsim.cost.explain`)."""
        import numpy as np

        tokens, samples, scale = work.tokens, work.samples, self._a1 * 1000
        attention = np.zeros(len(tokens))
        order = np.argsort(work.decode_seqs, kind="stable")
        seqs = work.decode_seqs[order]
        for alike in np.split(order, np.flatnonzero(np.diff(seqs)) + 1):
            if len(alike) and (number := int(work.decode_seqs[alike[0]])):
                line = self._decode_line(number)
                attention[alike] = line.many(work.context_tokens[alike])
        entries = work.prefill_seqs + work.decode_seqs
        prompts_us = np.where(work.prefill_seqs > 0, self._prompt_step_us, 0.0)
        return {
            "host": (self._a0 + prompts_us + self._a2 * entries) * 1000,
            "dense": np.where(tokens > 0, self._dense.many(tokens), 0.0) * scale,
            "attention_decode": attention * self._layers * scale,
            "head": np.where(samples > 0, self._head.many(samples), 0.0) * scale,
            "copies": work.copied_blocks * self._copied_block_us * scale,
            "rest": "host" if self._uneven is None else "attention_decode",
        }

    def decode_step(self, seqs: int) -> Line:
        """Nanoseconds of a pure decode step, before any floor, by its summed context."""
        line = self._decode_steps.get(seqs)
        if line is None:
            line = self._decode_steps[seqs] = self._whole_step(seqs)
        return line

    def _whole_step(self, seqs: int) -> Line:
        contexts, attention_us, measured = self._decode_row(seqs)
        others_us = self._dense.at(seqs) + self._head.at(seqs)
        fixed_us = self._a0 + self._a1 * others_us + self._a2 * seqs
        ns = [(fixed_us + self._a1 * self._layers * us) * 1000 for us in attention_us]
        for line in (self._dense, self._head):
            if not line.first <= seqs <= line.last:
                measured = NEVER
        return Line(contexts, ns, measured)

    def _attention_us(self, plan: Plan) -> float:
        """One layer's attention."""
        us, seqs, chunks, context = 0.0, plan.decode_seqs, plan.chunks, plan.context_tokens
        if seqs:
            if chunks and self._fused is not None:
                us = self._fused.us(chunks, seqs, context / seqs)
                self.outside = self._fused.outside
                uneven = self._uneven
                if uneven is not None and (longest := plan.longest(uneven.longest)):
                    us += uneven.mixed_us(chunks, seqs, context, longest)
                return us
            line = self._decode_line(seqs)
            us = line.at(context)
            if self._uneven is not None:
                longest = plan.longest(self._uneven.longest)
                us += self._uneven.decode_us(seqs, context, longest)
            if not line.first <= context <= line.last:
                self.outside = True
        for new, context in chunks:
            line = self._prefills.get(new) or self._prefill(new)
            us += line.at(context)
            if not line.first <= context <= line.last:
                self.outside = True
        return us

    def _decode_line(self, seqs: int) -> Line:
        line = self._decodes.get(seqs)
        if line is None:
            line = self._decodes[seqs] = Line(*self._decode_row(seqs))
        return line

    def _decode_row(self, seqs: int) -> Row:
        row = self._decode_rows.get(seqs)
        if row is None:
            row = self._decode_rows[seqs] = _row(self._decode, seqs, seqs)
        return row

    def _prefill(self, new: int) -> Line:
        if len(self._prefills) >= MOST_KEPT:
            self._prefills.clear()
        line = self._prefills[new] = self._chunk(new)
        return line

    def _chunk(self, new: int) -> Line:
        """Attention of a chunk of `new` tokens, over its context.

        A chunk longer than any measured one is priced in pieces, each after those before it. Its
        time grows with the square of its tokens, so the last slope would be too low.
        """
        grid = self._fit.prefill
        padded = -(-new // grid.tile) * grid.tile
        if padded <= grid.x[-1]:
            return Line(*_row(grid, padded))
        longest, look = int(grid.x[-1]), Interpolation()
        us = [
            added(
                look.between(grid.x, grid.ctx, grid.us, min(longest, padded - done), context + done)
                for done in range(0, padded, longest)
            )
            for context in grid.ctx
        ]
        return Line(grid.ctx, us, NEVER)


def _row(grid: Grid, x: float, scale: float = 1) -> Row:
    """A grid at `x`: contexts times `scale`, times there, the scaled contexts measured."""
    us = Interpolation().along_each(grid.x, grid.columns, x)
    measured = NEVER
    if grid.x[0] <= x <= grid.x[-1]:
        i = bisect_left(grid.x, x)
        ends = min(len(row) for row in grid.us[max(i - 1, 0) : i + 1])
        measured = (grid.ctx[0] * scale, grid.ctx[ends - 1] * scale)
    return [context * scale for context in grid.ctx], us, measured
