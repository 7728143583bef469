"""Times of the kernels of a step, from the tables of a profile's fit, and of the step.

Tables are read as straight lines between points over one count, and grids as such lines over one of
their counts. The rules are those of `kvsim.cost.profile`: below the first point the first value
holds; above the last one the last slope continues, but never downwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from librt.vecs import vec
from mypy_extensions import i64

from kvsim.core.plan import Plan
from kvsim.core.vectors import added, floats, numbers
from kvsim.cost.profile import DecodeGrid, Fit, Grid, Interpolation, MixedGrid, PrefillGrid
from kvsim.cost.sustained import Parts, Sustained
from kvsim.cost.tail import Uneven

MOST_KEPT = 4096
"""Most sizes of chunks longer than any measured one whose lines are kept."""


class Line:
    """The line through `(xs[i], ys[i])`; it was measured from `first` to `last`.

    By default that range is the range of the points. The caller notes look-ups outside of it.
    """

    first: float
    last: float
    _xs: vec[float]
    _ys: vec[float]

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        measured: tuple[float, float] | None = None,
    ) -> None:
        self.first, self.last = (xs[0], xs[-1]) if measured is None else measured
        self._xs, self._ys = floats(xs), floats(ys)

    def plus(self, other: Callable[[float], float], breaks: Iterable[float]) -> Line:
        """The line through the sums with `other`, at the points of both: it bends at `breaks`."""
        xs = sorted({*self._xs, *map(float, breaks)})
        # What is added holds for any tokens, so the measured range stays that of the table.
        return Line(xs, [self.at(x) + other(x) for x in xs], (self.first, self.last))

    def at(self, x: float) -> float:
        """The value at `x`."""
        xs, ys = self._xs, self._ys
        i = cell_from(xs, 1.0, x)
        return _through(x, xs[i - 1], ys[i - 1], xs[i], ys[i])


class Lines:
    """A grid of times as lines over its contexts, one for every count `x`."""

    inside: bool
    """Whether the last look-up was within what was measured."""
    _xs: vec[float]
    _contexts: vec[float]
    _us: vec[float]
    """The times of all `x` at the first context, then at the next one."""
    _ends: vec[i64]
    """Number of contexts at which each `x` was measured."""

    def __init__(self, grid: Grid) -> None:
        self.inside = True
        self._xs, self._contexts = floats(grid.x), floats(grid.ctx)
        self._us = floats([us for column in grid.columns for us in column])
        self._ends = numbers([len(row) for row in grid.us])

    def at(
        self,
        x: float,
        context: float,
        scale: float = 1.0,
        fixed: float = 0.0,
        factor: float = 1.0,
        unit: float = 1.0,
    ) -> float:
        """The value at `context` of the line of `x`, through `(context x scale, (fixed + factor x
        time) x unit)`."""
        contexts, ends = self._contexts, self._ends
        i, j = cell_to(self._xs, x), cell_from(contexts, scale, context)
        # Between two rows, both must have been measured as far as that.
        end = ends[i - 1] if x <= self._xs[i - 1] else min(ends[i - 1], ends[i])
        self.inside = (
            self._xs[0] <= x <= self._xs[i]
            and contexts[0] * scale <= context <= contexts[end - 1] * scale
        )
        near = (fixed + factor * self._across(j - 1, i, x)) * unit
        far = (fixed + factor * self._across(j, i, x)) * unit
        return _through(context, contexts[j - 1] * scale, near, contexts[j] * scale, far)

    def _across(self, j: i64, i: i64, x: float) -> float:
        """The time at a context, as `Interpolation.along` finds it."""
        xs, us = self._xs, self._us
        at: i64 = j * len(xs) + i
        low, high = us[at - 1], us[at]
        beyond = x - xs[i - 1]
        if beyond <= 0:
            return low
        value = low + (high - low) * beyond / (xs[i] - xs[i - 1])
        return max(value, high) if x > xs[i] else value


def rounded(x: float) -> i64:
    """`round(x)` of what fits into 64 bits, without Python's integers of any size."""
    whole: i64 = i64(x)
    rest = x - float(whole)
    odd: bool = whole & 1 != 0
    if rest > 0.5 or (odd and rest == 0.5):
        return whole + 1
    if rest < -0.5 or (odd and rest == -0.5):
        return whole - 1
    return whole


def cell_from(xs: vec[float], scale: float, x: float) -> i64:
    """The upper end of the cell of `x`, of those between points `xs[i]` x `scale`; a point belongs
    to the cell that begins there. What is outside belongs to the first or the last one."""
    low: i64 = 1
    high: i64 = len(xs) - 1
    while low < high:
        middle: i64 = (low + high) >> 1
        if xs[middle] * scale <= x:
            low = middle + 1
        else:
            high = middle
    return low


def cell_to(xs: vec[float], x: float) -> i64:
    """The same, but a point belongs to the cell that ends there."""
    low: i64 = 1
    high: i64 = len(xs) - 1
    while low < high:
        middle: i64 = (low + high) >> 1
        if xs[middle] < x:
            low = middle + 1
        else:
            high = middle
    return low


def _through(x: float, xa: float, ya: float, xb: float, yb: float) -> float:
    """The line through two points, `x` being in their cell, or outside all of them."""
    if x < xa:
        return ya
    slope = (yb - ya) / (xb - xa)
    if x < xb:
        return ya + slope * (x - xa)
    return yb + max(slope, 0.0) * (x - xb)


class Fused:
    """Looks up a `MixedGrid`; `outside` says whether the last look-up left it.

    The value is linear in each of the four raw counts. Below the first point of an axis its first
    value holds; above the last one the last slope continues.
    """

    outside: bool
    _q: vec[float]
    _ctx: vec[float]
    _n: vec[float]
    _kv: vec[float]
    _us: vec[float]
    """The times in the order of the grid."""

    def __init__(self, grid: MixedGrid) -> None:
        self._q, self._ctx = floats(grid.q), floats(grid.ctx)
        self._n, self._kv = floats(grid.n), floats(grid.kv)
        self._us = floats([us for a in grid.us for b in a for c in b for us in c])
        self.outside = False

    def us(self, chunks: Sequence[tuple[float, float]], n: float, mean: float) -> float:
        """Microseconds of `chunks`, (tokens, tokens of context), and `n` decodes of `mean` length.

        The grid was measured with one chunk. A launch has as many blocks for each sequence as its
        longest chunk needs, and blocks without work take time, too. So decodes are looked up beside
        the longest chunk, and count once. Each further chunk adds its time beyond the smallest
        chunk, both beside the fewest and shortest decodes.

        Source: FlashAttention-2, `run_flash_splitkv_fwd` (`num_m_block` comes from the greatest
        number of queries), github.com/Dao-AILab/flash-attention,
        `csrc/flash_attn/src/flash_fwd_launch_template.h`.
        """
        self.outside = False
        fewest, shortest = self._n[0], self._kv[0]
        total, smallest = 0.0, 0.0
        for q, ctx in sorted(chunks, reverse=True):
            us = self._at(q, ctx, n, mean)
            if us > smallest:
                total += us - smallest
            # The decodes are counted with the longest chunk; the others pay for themselves alone.
            n, mean, smallest = fewest, shortest, self._us[0]
        return total

    def _at(self, q: float, ctx: float, n: float, mean: float) -> float:
        i, j = cell_to(self._q, q), cell_to(self._ctx, ctx)
        k, m = cell_to(self._n, n), cell_to(self._kv, mean)
        share, ctx_share = self._share(self._kv, m, mean), self._share(self._ctx, j, ctx)
        n_share, q_share = self._share(self._n, k, n), self._share(self._q, i, q)
        contexts: i64 = len(self._ctx)
        row: i64 = (i - 1) * contexts + j
        next_row: i64 = row + contexts
        low = self._beside(row - 1, k, n_share, m, share)
        low += (self._beside(row, k, n_share, m, share) - low) * ctx_share
        high = self._beside(next_row - 1, k, n_share, m, share)
        high += (self._beside(next_row, k, n_share, m, share) - high) * ctx_share
        return low + (high - low) * q_share

    def _beside(self, chunk: i64, k: i64, n_share: float, m: i64, share: float) -> float:
        """The time of a chunk and its context, by their place in the table."""
        us, lengths = self._us, len(self._kv)
        at: i64 = (chunk * len(self._n) + k) * lengths + m
        fewer: i64 = at - lengths
        near = us[fewer - 1] + (us[at - 1] - us[fewer - 1]) * n_share
        far = us[fewer] + (us[at] - us[fewer]) * n_share
        return near + (far - near) * share

    def _share(self, xs: vec[float], i: i64, x: float) -> float:
        """The position of `x` in its cell: 0 to 1, or beyond."""
        low, high = xs[i - 1], xs[i]
        if x < low:
            self.outside = True
            return 0.0
        if x > high:
            self.outside = True
        return (x - low) / (high - low)


class ByTokens(Protocol):
    """What a step takes beside the tables, by its tokens alone."""

    @property
    def breaks(self) -> Sequence[float]:
        """Tokens at which its line bends."""
        ...

    def us(self, tokens: float) -> float:
        """Microseconds in a step of so many tokens, of at least 1."""
        ...


class Kernels(Sustained):
    """The tables of `fit` with one of its decode kernels, for a model of `layers` layers.

    `decodes`: those of the kernel in launches without prompts and with them. `beside` is what the
    linear layers of the fit do not hold. `eager`: the launch floor holds for steps without prompts,
    too. `experts`: the term of `beside` that goes by the tokens of all ranks. `sustained`: a factor
    on steps with prompts (`kvsim.cost.sustained`).
    """

    dense: Line
    """Microseconds of all layers without attention, by tokens; `head` by samples."""
    head: Line
    priced_steps: i64
    extrapolated_steps: i64
    """Steps that left at least one table; `extrapolated_ns` is their time."""
    priced_ns: i64
    extrapolated_ns: i64
    _layers: i64
    _decodes: Lines
    """Attention of one layer, by sequences and their mean context; `_prefills` by tokens of a chunk
    and its context."""
    _beside: Lines
    """`_decodes` in a launch that serves a prompt, too."""
    _prefills: Lines
    _fused: Fused | None
    _uneven: Uneven | None
    _experts: ByTokens | None
    _prefill: PrefillGrid
    _longest_prefill: float
    _tile: i64
    _long: dict[int, Line]
    """By tokens of a chunk longer than any measured one: attention, over its context."""
    _a0: float
    _a1: float
    _a2: float
    _prompt_step_us: float
    _copied_block_us: float
    _floor_ns: i64
    _decode_floor_ns: i64
    _outside: bool
    """Whether the step that is being priced left a table."""

    def __init__(
        self,
        fit: Fit,
        decodes: tuple[DecodeGrid, DecodeGrid],
        layers: int,
        beside: Sequence[ByTokens] = (),
        uneven: Uneven | None = None,
        eager: bool = True,
        experts: ByTokens | None = None,
        sustained: float = 1.0,
    ) -> None:
        self._layers, self._uneven = layers, uneven
        self._experts, self._sustained = experts, sustained
        self.dense = Line(fit.dense.x, fit.dense.us)
        for term in beside:
            self.dense = self.dense.plus(term.us, term.breaks)
        self.head = Line(fit.head.x, fit.head.us)
        alone, with_prompts = decodes
        self._decodes, self._prefills = Lines(alone), Lines(fit.prefill)
        self._beside = self._decodes if with_prompts is alone else Lines(with_prompts)
        self._fused = Fused(fit.mixed) if isinstance(fit.mixed, MixedGrid) else None
        self._prefill, self._long = fit.prefill, {}
        self._longest_prefill, self._tile = fit.prefill.x[-1], fit.prefill.tile
        self._a0, self._a1, self._a2 = fit.step
        self._prompt_step_us = fit.prompt_step_us
        self._copied_block_us = fit.copied_block_us
        self._floor_ns = round(fit.launch_floor_us * 1000)
        self._decode_floor_ns = self._floor_ns if eager else 0
        self.priced_steps = self.extrapolated_steps = self.priced_ns = self.extrapolated_ns = 0
        self._outside = False

    def step_ns(self, plan: Plan) -> int:
        """Nanoseconds of a step."""
        ns: i64 = self._step_ns(plan)
        experts, all_ranks = self._experts, plan.rank_tokens
        if experts is not None and all_ranks is not None and plan.tokens:
            # `dense` has the experts at this rank's own tokens; other ranks may have fewer.
            further_us = experts.us(all_ranks) - experts.us(plan.tokens)
            further_ns: i64 = max(self._scaled_ns(further_us), -ns)
            self.priced_ns += further_ns
            ns += further_ns
        return self._sustained_ns(ns, plan)

    def _step_ns(self, plan: Plan) -> i64:
        seqs: i64 = plan.decode_seqs
        samples: i64 = plan.samples
        # Drafts get logits, too, so as many samples as sequences mean that nothing is drafted.
        if samples == seqs and seqs and not (plan.num_chunks or plan.copies):
            return self._decode_ns(plan)
        chunks: list[tuple[int, int]] = plan.chunks
        ns: i64 = rounded(self._step_us(plan, chunks) * 1000.0)
        return self._counted(max(ns, self._floor_ns if chunks else self._decode_floor_ns))

    def _step_us(self, plan: Plan, chunks: list[tuple[int, int]]) -> float:
        """Microseconds of a step before any floor."""
        entries: i64 = plan.decode_seqs
        samples: i64 = plan.samples
        copied: i64 = plan.copied_blocks
        self._outside = False
        us = 0.0
        if entries or chunks:
            tokens: i64 = entries + plan.draft_tokens
            for new, _ in chunks:
                tokens += new
            entries += len(chunks)
            us = self._along(self.dense, tokens)
            us += float(self._layers) * self._attention_us(plan, chunks)
        if samples:
            us += self._along(self.head, samples)
        if copied:
            us += float(copied) * self._copied_block_us
        host_us = self._a0 + self._prompt_step_us if chunks else self._a0
        return host_us + self._a1 * us + self._a2 * float(entries)

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
        """What the parts of a step take (`Sustained.terms`)."""
        # What the tokens of other ranks add to the experts is left out: no row of a step holds
        # them.
        tokens: i64 = prefill_tokens + decode_seqs + draft_tokens
        scale = self._a1 * 1000.0
        host_us = self._a0 + (self._prompt_step_us if prefill_seqs else 0.0)
        host_us += self._a2 * float(prefill_seqs + decode_seqs)
        attention_us = self.decodes_us(decode_seqs, context_tokens, prefill_seqs)
        attention_us *= float(self._layers)
        found = (
            host_us * 1000.0,
            self.dense.at(float(tokens)) * scale if tokens else 0.0,
            attention_us * scale,
            self.head.at(float(samples)) * scale if samples else 0.0,
            float(copied_blocks) * self._copied_block_us * scale,
        )
        return self._sustained_terms(found, prefill_seqs)

    def decodes_us(self, sequences: i64, context_tokens: i64, prompts: i64 = 0) -> float:
        """Microseconds of one layer's attention of decodes, as if they were even, in a step with so
        many prompts."""
        if not sequences:
            return 0.0
        seqs = float(sequences)
        lines = self._beside if prompts else self._decodes
        # The axis has means; times `seqs` it has sums, and the sum is looked up without a division,
        # which would round.
        us = lines.at(seqs, float(context_tokens), seqs)
        if not lines.inside:
            self._outside = True
        return us

    def _decode_ns(self, plan: Plan) -> i64:
        """A step in which every sequence of the batch computes one token, and nothing else happens:
        its line is rounded as a whole."""
        seqs: i64 = plan.decode_seqs
        context: i64 = plan.context_tokens
        count, uneven = float(seqs), self._uneven
        self._outside = False
        others_us = self._along(self.dense, seqs) + self._along(self.head, seqs)
        fixed_us = self._a0 + self._a1 * others_us + self._a2 * count
        factor = self._a1 * float(self._layers)
        ns: i64 = rounded(self._decodes.at(count, float(context), count, fixed_us, factor, 1000.0))
        if not self._decodes.inside:
            self._outside = True
        if uneven is not None:
            us = uneven.decode_us(seqs, context, plan.longest(uneven.longest))
            ns += self._scaled_ns(float(self._layers) * us)
        return self._counted(max(ns, self._decode_floor_ns))

    def _along(self, line: Line, count: i64) -> float:
        x = float(count)
        if not line.first <= x <= line.last:
            self._outside = True
        return line.at(x)

    def _attention_us(self, plan: Plan, chunks: list[tuple[int, int]]) -> float:
        """One layer's attention."""
        us = 0.0
        seqs: i64 = plan.decode_seqs
        context: i64 = plan.context_tokens
        fused, uneven = self._fused, self._uneven
        if seqs:
            if chunks and fused is not None:
                us = fused.us(chunks, float(seqs), float(context) / float(seqs))
                if fused.outside:
                    self._outside = True
                if uneven is not None:
                    us += uneven.mixed_us(chunks, seqs, context, plan.longest(uneven.longest))
                return us
            us = self.decodes_us(seqs, context, len(chunks))
            if uneven is not None:
                us += uneven.decode_us(seqs, context, plan.longest(uneven.longest))
        # Where one launch serves all, too: without decodes, it is in the table of prompts.
        for new, before in chunks:
            us += self._chunk_us(new, before)
        return us

    def _chunk_us(self, new: i64, context: i64) -> float:
        """Attention of a chunk of `new` tokens."""
        padded: i64 = -(-new // self._tile) * self._tile
        if float(padded) > self._longest_prefill:
            self._outside = True
            return self._long_line(padded).at(float(context))
        us = self._prefills.at(float(padded), float(context))
        if not self._prefills.inside:
            self._outside = True
        return us

    def _long_line(self, padded: int) -> Line:
        """Attention of a chunk longer than any measured one, over its context.

        It is priced in pieces, each after those before it. Its time grows with the square of its
        tokens, so the last slope would be too low.
        """
        line = self._long.get(padded)
        if line is None:
            if len(self._long) >= MOST_KEPT:
                self._long.clear()
            grid, look = self._prefill, Interpolation()
            longest = int(grid.x[-1])
            us = [
                added(
                    [
                        look.between(
                            grid.x, grid.ctx, grid.us, min(longest, padded - done), c + done
                        )
                        for done in range(0, padded, longest)
                    ]
                )
                for c in grid.ctx
            ]
            line = self._long[padded] = Line(grid.ctx, us)
        return line

    def _scaled_ns(self, us: float) -> i64:
        """Nanoseconds that so many microseconds of kernels add to a step."""
        return rounded(self._a1 * us * 1000.0)

    def _counted(self, ns: i64) -> i64:
        self.priced_steps += 1
        self.priced_ns += ns
        if self._outside:
            self.extrapolated_steps += 1
            self.extrapolated_ns += ns
        return ns
