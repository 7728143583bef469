"""Measures one sample: builds its inputs in the pool, outside the timed call, and times it."""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvsim_kernels import ceilings, torch_impl
from kvsim_kernels.all_reduce import Group
from kvsim_kernels.forward import TORCH_DTYPES, Decoder
from kvsim_kernels.geometry import LAYOUTS
from kvsim_kernels.grid import Sample, Shape, lengths
from kvsim_kernels.pages import KVPool, Pages
from kvsim_kernels.step import Chunk, Step
from kvsim_kernels.swap import swap_blocks
from kvsim_kernels.timing import Clock, Timing

LAYERS_ALONE = 4
"""Layers that a kernel alone runs through, one after another: each finds its own cold keys."""

SWAP_BLOCKS = 32
"""Blocks of the pools between which swaps are timed."""


class Bench:
    """A decoder, a clock, and a fixed random order in which blocks are handed out."""

    def __init__(self, decoder: Decoder, clock: Clock, seed: int = 0) -> None:
        self._decoder, self._clock = decoder, clock
        self._engines_kernel = decoder.decode_kernel
        rng = np.random.default_rng(seed)
        self._order = rng.permutation(decoder.geometry.num_blocks).astype(np.int32)
        self._layers = min(LAYERS_ALONE, decoder.geometry.layers)
        generator = torch.Generator(decoder.device).manual_seed(seed)
        geometry = decoder.geometry
        shape = (decoder.max_tokens, geometry.heads, geometry.head_dim)
        dtype = TORCH_DTYPES[geometry.dtype]
        self._query = torch.empty(shape, dtype=dtype, device=decoder.device)
        self._query.normal_(generator=generator)
        self._hidden = torch.empty(
            (max(decoder.max_seqs, decoder.max_tokens), geometry.hidden),
            dtype=dtype,
            device=decoder.device,
        ).normal_(generator=generator)
        self._group: Group | None = None
        self._swap_pools: dict[str, tuple[KVPool, KVPool]] = {}

    def compile(self, decode_kernels: Sequence[str]) -> None:
        """Runs every kernel once, in the form in which steps run it."""
        decoder, length = self._decoder, min(600, self._decoder.max_seq_len)
        chunk = [min(length // 2, decoder.max_tokens - 2), length // 4]
        for kernel in decode_kernels:
            decoder.decode_kernel = kernel
            for chunks in ([], [chunk]):
                step = self.step({"n": 2, "ctx": length, "chunks": chunks})
                decoder.forward(step).tolist()
        decoder.decode_kernel = self._engines_kernel

    def time(self, sample: Sample) -> Timing:
        """The timing of a sample, per layer for attention."""
        kernel, shape = sample.kernel, sample.shape
        if kernel in ("decode_v1", "decode_v2", "prefill"):
            return self._attention(sample)
        timers: dict[str, Callable[[Shape], Timing]] = {
            "step": self._whole,
            "launch_floor": self._whole,
            "dense": self._dense,
            "experts": self._experts,
            "all_reduce": self._all_reduce,
            "head": self._head,
            "copy": self._copy,
            "swap": self._swap,
            "decode_gather": self._gather,
            "ceiling": lambda shape: ceilings.time(shape, self._decoder, self._clock),
        }
        return timers[kernel](shape)

    def step(self, shape: Shape) -> Step:
        """The step of a shape of `kvsim_kernels.grid`: decodes, then chunks."""
        decoder, size = self._decoder, self._decoder.geometry.block_size
        chunks = [(shape["q"], shape["ctx"])] if "q" in shape else shape.get("chunks", ())
        decodes = lengths(shape, decoder.max_seq_len) if shape.get("n") else np.zeros(0, int)
        wanted = [*decodes, *(q + ctx for q, ctx in chunks)]
        ends = np.cumsum([-(-int(length) // size) for length in wanted])
        tables = np.split(self._order[: ends[-1]], ends[:-1])
        prompts = zip(chunks, tables[len(decodes) :], strict=True)
        return Step(
            tables=tables[: len(decodes)],
            lengths=decodes.tolist(),
            tokens=[1] * len(decodes),
            chunks=[Chunk(table, ctx, np.ones(q, np.int64)) for (q, ctx), table in prompts],
        )

    def _attention(self, sample: Sample) -> Timing:
        decoder, layers = self._decoder, range(self._layers)
        if sample.kernel != "prefill":
            decoder.decode_kernel = sample.kernel.removeprefix("decode_")
        batch = decoder.prepare(self.step(sample.shape))
        if sample.method == "insitu":
            timing = self._clock.difference(
                lambda: decoder.run(batch, head=False),
                lambda: decoder.run(batch, attention=False, head=False),
            )
            return timing.scaled(1 / decoder.geometry.layers)
        query = self._query[: batch.tokens]
        timing = self._clock.alone(lambda: [decoder.attend(batch, i, query) for i in layers])
        return timing.scaled(1 / len(layers))

    def _whole(self, shape: Shape) -> Timing:
        self._decoder.decode_kernel, step = self._engines_kernel, self.step(shape)
        return self._clock.whole(lambda: self._decoder.forward(step).tolist())

    def _dense(self, shape: Shape) -> Timing:
        """All layers without attention and logits, on chunks no longer than a sequence may be."""
        decoder = self._decoder
        whole, rest = divmod(shape["tokens"], decoder.max_seq_len)
        chunks = [[decoder.max_seq_len, 0]] * whole + [[rest, 0]] * (rest > 0)
        batch = decoder.prepare(self.step({"chunks": chunks}))
        return self._clock.alone(
            lambda: decoder.run(batch, attention=False, head=False, experts=False), cold=False
        )

    def _experts(self, shape: Shape) -> Timing:
        hidden, layers = self._hidden[: shape["tokens"]], range(self._layers)
        active, experts = shape["active"], self._decoder.experts
        timing = self._clock.alone(lambda: [experts(i, hidden, active) for i in layers])
        return timing.scaled(1 / len(layers))

    def _all_reduce(self, shape: Shape) -> Timing:
        if self._group is None:
            self._group = Group(shape["gpus"], self._decoder.device.type)
        return self._group.time(shape["bytes"])

    def close(self) -> None:
        """Ends the processes that all-reduces were measured between."""
        if self._group is not None:
            self._group.close()

    def _head(self, shape: Shape) -> Timing:
        hidden = self._hidden[: shape["samples"]]
        return self._clock.alone(lambda: self._decoder.head(hidden))

    def _copy(self, shape: Shape) -> Timing:
        blocks, decoder = shape["blocks"], self._decoder
        pairs = self._order[: 2 * blocks].reshape(2, blocks).T.astype(np.int64)
        on_device = torch.from_numpy(np.ascontiguousarray(pairs)).to(decoder.device)
        if not decoder.triton:
            return self._clock.alone(lambda: torch_impl.copy_blocks(decoder.pool, on_device))
        from kvsim_kernels import triton_cache

        return self._clock.alone(lambda: triton_cache.copy_blocks(decoder.pool, on_device))

    def _swap(self, shape: Shape) -> Timing:
        """Blocks in one direction, or as many each way at once on two streams."""
        device, host = self._swap_pools_of(shape["layout"])
        there = [(i, i) for i in range(shape["blocks"])]
        back = [(i + SWAP_BLOCKS, i + SWAP_BLOCKS) for i, _ in there]
        if shape["direction"] == "d2h":
            return self._clock.whole(lambda: swap_blocks(device, host, there))
        if shape["direction"] == "h2d":
            return self._clock.whole(lambda: swap_blocks(host, device, there))
        if not self._decoder.cuda:
            return self._clock.whole(
                lambda: (swap_blocks(device, host, there), swap_blocks(host, device, back))
            )
        side = torch.cuda.Stream()

        def both() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                swap_blocks(host, device, back)
            swap_blocks(device, host, there)
            torch.cuda.current_stream().wait_stream(side)

        return self._clock.whole(both)

    def _gather(self, shape: Shape) -> Timing:
        """Decode by the torch twin, which must be several times slower: a check on the clock."""
        decoder = self._decoder
        batch = decoder.prepare(self.step(shape))
        keys, values = decoder.pool.layer(0)
        given = decoder.buffers.device
        width = -(-shape["ctx"] // decoder.geometry.block_size)
        table = given.table[: batch.rows, :width]
        pages = Pages(keys, values, table, given.lengths[: batch.rows])
        query = self._query[: batch.rows]
        return self._clock.alone(lambda: torch_impl.decode(query, pages))

    def _swap_pools_of(self, layout: str) -> tuple[KVPool, KVPool]:
        """A small pool on the device and one on the host, of either layout."""
        assert layout in LAYOUTS
        if layout not in self._swap_pools:
            geometry = self._decoder.geometry.sized(layout=layout, num_blocks=2 * SWAP_BLOCKS)
            self._swap_pools[layout] = (
                self._decoder.new_pool(geometry, self._decoder.device),
                self._decoder.new_pool(geometry, "cpu"),
            )
        return self._swap_pools[layout]
