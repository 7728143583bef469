"""A decoder's forward pass over the paged pool: what a step of an engine costs on this device.

Random weights of a stated geometry, no tokenizer: time depends on shapes, not on meaning. A step
holds decoding sequences, one new token each, and chunks of prompts, each over the context that the
pool already holds.

```
prepare   host buffers -> device buffers, one copy       (a padded batch if a graph serves it)
compute   embed, per layer: norm, QKV, rope, cache write, attention, O, norm, MLP; then the head
move      swaps and block copies, queued before `prepare`
forward   move, prepare, compute
```

Decode-only steps replay a CUDA graph, captured at first use per (rows, partitions); steps with
chunks, and every step on CPU, run eagerly. On CPU the torch twins take the place of the kernels.
"""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from kvsim_kernels import dense, torch_impl
from kvsim_kernels.buffers import Buffers
from kvsim_kernels.experts import ExpertWeights, mixture
from kvsim_kernels.geometry import Geometry
from kvsim_kernels.pages import PARTITION_TOKENS, KVPool, Pages
from kvsim_kernels.step import Batch, Chunk, Step
from kvsim_kernels.swap import swap_blocks

__all__ = ["Batch", "Chunk", "Decoder", "Geometry", "Step"]

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


class Decoder:
    """Weights, pool, buffers and graphs of one model on one device.

    `max_tokens`, `max_seqs`, `max_seq_len`: the largest step; buffers are sized by them.
    `capture_sizes`: numbers of decoding sequences that a graph serves, CUDA only; larger batches
    run eagerly. `decode_kernel`: "v1" or "v2"; on CPU v1 is the batched twin, which pads to the
    longest sequence, v2 the twin that takes sequence after sequence. `host_blocks`: size of the
    pinned pool for swaps. `triton`: run the Triton kernels instead of their torch twins; default:
    on CUDA. Weights and pool hold random numbers of `seed`.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        device: str | torch.device = "cpu",
        max_tokens: int = 2048,
        max_seqs: int = 256,
        max_seq_len: int = 8192,
        capture_sizes: Sequence[int] = (),
        decode_kernel: str = "v2",
        host_blocks: int = 0,
        triton: bool | None = None,
        seed: int = 0,
    ) -> None:
        if decode_kernel not in ("v1", "v2"):
            raise ValueError(f"decode_kernel must be v1 or v2, not {decode_kernel!r}")
        self.geometry, self.device = geometry, torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.triton = self.cuda if triton is None else triton
        self._between = _between_products(self.triton)
        self.decode_kernel = decode_kernel
        self.capture_sizes = tuple(sorted(capture_sizes)) if self.cuda else ()
        self.max_tokens, self.max_seqs, self.max_seq_len = max_tokens, max_seqs, max_seq_len
        generator = torch.Generator(self.device).manual_seed(seed)
        self._sizes = dense.Geometry(
            geometry.hidden, geometry.heads, geometry.kv_heads, geometry.head_dim,
            geometry.ffn if geometry.experts is None else 0, geometry.vocab,
        )  # fmt: skip
        self._dtype = TORCH_DTYPES[geometry.dtype]
        self._weights = [
            dense.LayerWeights.random(self._sizes, generator, self._dtype)
            for _ in range(geometry.layers)
        ]
        self._experts = [
            ExpertWeights.random(experts, geometry.hidden, generator, self._dtype)
            for experts in [geometry.experts] * geometry.layers
            if experts is not None
        ]
        self._embedding, self._head = (self._table(generator) for _ in range(2))
        self._norm = torch.ones(geometry.hidden, dtype=self._dtype, device=self.device)
        self._rope = dense.rope_table(max_seq_len, geometry.head_dim, device=self.device)
        self.pool = self.new_pool(geometry, self.device)
        _fill(self.pool.data, generator)
        self.host_pool = (
            self.new_pool(geometry.sized(num_blocks=host_blocks), "cpu") if host_blocks else None
        )
        self.buffers = Buffers(max_tokens, max_seqs, self._blocks(max_seq_len), self.device)
        self._attended = torch.zeros(
            max_tokens, geometry.heads, geometry.head_dim, dtype=self._dtype, device=self.device
        )
        self._graphs: dict[
            tuple[int, int, bool, bool, str], tuple[torch.cuda.CUDAGraph, torch.Tensor]
        ] = {}
        self._nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._graph_memory = torch.cuda.graph_pool_handle() if self.cuda else None

    def forward(self, step: Step, *, attention: bool = True, head: bool = True) -> torch.Tensor:
        """Runs a step: sampled tokens, int64 [samples], decodes first; queued, not synchronised.

        Without `attention` the attention kernels are left out and nothing else; without `head`
        the output projection and the sampler are, and the result is empty. The result is
        overwritten by the next step.
        """
        self.move(step)
        if not step.lengths and not step.chunks:
            return self._nothing
        return self.compute(self.prepare(step), attention=attention, head=head)

    @torch.inference_mode()
    def move(self, step: Step) -> None:
        """Queues the swaps and block copies of a step on the current stream."""
        for pairs, inwards in ((step.swaps_out, False), (step.swaps_in, True)):
            if pairs:
                if self.host_pool is None:
                    raise ValueError("a step swaps, but the decoder has no host_blocks")
                source, target = (
                    (self.host_pool, self.pool) if inwards else (self.pool, self.host_pool)
                )
                swap_blocks(source, target, pairs)
        if step.copies:
            copies = torch.tensor(step.copies, dtype=torch.int64)
            if self.triton:
                from kvsim_kernels import triton_cache

                triton_cache.copy_blocks(self.pool, copies.to(self.device, non_blocking=True))
            else:
                torch_impl.copy_blocks(self.pool, copies.to(self.device))

    def prepare(self, step: Step) -> Batch:
        """Writes a step into the device buffers with one copy, and says how to launch it.

        The copy is queued: let the step end before the next one is prepared. Raises ValueError
        for a step that the buffers or the longest sequence cannot hold.
        """
        decodes, rows = len(step.lengths), self._rows(step)
        longest = max(step.lengths, default=0)
        graph = bool(self.capture_sizes) and not step.chunks and rows <= self.capture_sizes[-1]
        spans, samples, end = [], decodes, rows
        for chunk in step.chunks:
            length = chunk.start + len(chunk.tokens)
            spans.append((end, end + len(chunk.tokens), length))
            samples, end = samples + chunk.samples, end + len(chunk.tokens)
        if max(longest, *(span[2] for span in spans), 0) > self.max_seq_len:
            raise ValueError(f"a sequence is longer than max_seq_len {self.max_seq_len}")
        self.buffers.require(end, rows + len(spans))
        self._write(step, rows, spans)
        return Batch(
            decodes=decodes,
            rows=rows,
            chunks=tuple(spans),
            # A graph also samples the rows that pad it; `compute` leaves them out.
            samples=rows if graph else samples,
            longest=self._bucket(longest) if graph else longest,
            graph=graph,
        )

    @torch.inference_mode()
    def compute(self, batch: Batch, *, attention: bool = True, head: bool = True) -> torch.Tensor:
        """Runs the model on a prepared step; see `forward`."""
        if not batch.graph:
            return self.run(batch, attention=attention, head=head)[: batch.samples]
        key = (batch.rows, batch.longest, attention, head, self.decode_kernel)
        if key not in self._graphs:
            self._graphs[key] = self._captured(batch, attention, head)
        graph, sampled = self._graphs[key]
        graph.replay()
        tokens: torch.Tensor = sampled[: batch.decodes]
        return tokens

    @torch.inference_mode()
    def run(
        self, batch: Batch, *, attention: bool = True, head: bool = True, experts: bool = True
    ) -> torch.Tensor:
        """`compute` without graphs of its own: it may itself be captured. Without `experts`, layers
        that have some pass their MLP over."""
        given, tokens, between = self.buffers.device, batch.tokens, self._between
        positions, slots = given.positions[:tokens], given.slots[:tokens]
        x = functional.embedding(given.ids[:tokens], self._embedding)
        residual: torch.Tensor | None = None
        for index, weights in enumerate(self._weights):
            x, residual = between.rms_norm(x, weights.input_norm, residual)
            rotated, value = dense.project_qkv(x, weights.qkv, self._sizes)
            rotated = between.apply_rope(rotated, positions, self._rope)
            query, key = rotated.split([self.geometry.heads, self.geometry.kv_heads], dim=1)
            self._store(index, key, value, slots)
            attended = self.attend(batch, index, query) if attention else self._attended[:tokens]
            x, residual = between.rms_norm(
                dense.project_o(attended, weights.o), weights.post_norm, residual
            )
            if not self._experts:
                activated = between.silu_mul(functional.linear(x, weights.gate_up))
                x = functional.linear(activated, weights.down)
            elif experts:
                x = self.experts(index, x, self.active(tokens))
        if not head or not batch.samples or residual is None:
            return self._nothing
        last = given.last[: batch.samples]
        return self.head(between.rms_norm(x[last], self._norm, residual[last])[0])

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens of rows [rows, hidden] that have passed all layers."""
        return dense.greedy(dense.lm_head(hidden, self._head))

    @torch.inference_mode()
    def experts(self, layer: int, x: torch.Tensor, active: int) -> torch.Tensor:
        """Router and experts of one layer, on [tokens, hidden], `active` of them in turn."""
        return mixture(x, self._experts[layer], active)

    def active(self, tokens: int) -> int:
        """Experts that so many tokens need by chance, in the mean."""
        experts = self.geometry.experts
        return 0 if experts is None else round(experts.active(tokens))

    def attend(self, batch: Batch, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of a prepared step in one layer: [tokens, heads, head_dim] in and out."""
        out = self._attended[: batch.tokens]
        if batch.rows:
            self._decode(batch, layer, query[: batch.rows], out[: batch.rows])
        for row, (begin, end, length) in enumerate(batch.chunks, batch.rows):
            self._prefill(row, layer, query[begin:end], out[begin:end], length)
        return out

    def _decode(self, batch: Batch, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = self.pool.layer(layer)
        given, width = self.buffers.device, self._blocks(batch.longest)
        table = given.table[: batch.rows, :width]
        pages = Pages(keys, values, table, given.lengths[: batch.rows])
        if self.triton:
            from kvsim_kernels import triton_decode

            if self.decode_kernel == "v1":
                triton_decode.decode_v1(query, pages, out=out)
            else:
                triton_decode.decode_v2(query, pages, max_seq_len=batch.longest, out=out)
            return
        if self.decode_kernel == "v1":
            out.copy_(torch_impl.decode(query, pages))
        else:
            starts = torch.arange(batch.rows + 1, dtype=torch.int32)
            out.copy_(torch_impl.prefill(query, starts, pages))

    def _prefill(
        self, row: int, layer: int, query: torch.Tensor, out: torch.Tensor, length: int
    ) -> None:
        """One chunk in a launch of its own, so that the costs of chunks add up."""
        span = self.buffers.device.spans[row]
        keys, values = self.pool.layer(layer)
        table = self.buffers.device.table[row : row + 1, : self._blocks(length)]
        pages = Pages(keys, values, table, span[2:3])
        if self.triton:
            from kvsim_kernels import triton_prefill

            triton_prefill.prefill(query, span[:2], pages, max_query_len=len(query), out=out)
        else:
            out.copy_(torch_impl.prefill(query, span[:2], pages))

    def _store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        keys, values = self.pool.layer(layer)
        if self.triton:
            from kvsim_kernels import triton_cache

            triton_cache.write_cache(key, value, keys, values, slots)
        else:
            torch_impl.write_cache(key, value, keys, values, slots)

    def _captured(
        self, batch: Batch, attention: bool, head: bool
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph of the batch; kernels are compiled and workspaces sized before the capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.run(batch, attention=attention, head=head)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            sampled = self.run(batch, attention=attention, head=head)
        return graph, sampled

    def _write(self, step: Step, rows: int, spans: list[tuple[int, int, int]]) -> None:
        """The step in the host buffers, then on the device."""
        host, decodes = self.buffers.host, len(step.lengths)
        lengths = np.asarray(step.lengths, dtype=np.int64)
        host.ids[:decodes] = step.tokens
        host.positions[:decodes] = lengths - 1
        host.lengths[:decodes] = lengths
        for row, table in enumerate(step.tables):
            host.table[row, : len(table)] = table
        host.slots[:decodes] = self._slots(np.arange(decodes), lengths - 1)
        # Rows that only pad: with length 0 they read nothing, with slot -1 they write nothing.
        for pad in (host.ids, host.positions, host.lengths):
            pad[decodes:rows] = 0
        host.slots[decodes:rows] = -1
        host.last[:rows] = np.arange(rows)
        sampling = decodes
        for row, (chunk, (begin, end, length)) in enumerate(
            zip(step.chunks, spans, strict=True), rows
        ):
            positions = np.arange(chunk.start, length)
            host.ids[begin:end] = chunk.tokens
            host.positions[begin:end] = positions
            host.spans[row] = 0, end - begin, length, 0
            host.table[row, : len(chunk.table)] = chunk.table
            host.slots[begin:end] = self._slots(np.full_like(positions, row), positions)
            if chunk.samples:
                host.last[sampling] = end - 1
                sampling += 1
        self.buffers.copy(rows + len(spans))

    def _slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Slot of each position of a sequence whose table stands in the host row."""
        size = self.geometry.block_size
        blocks: np.ndarray = self.buffers.host.table[rows, positions // size].astype(np.int64)
        slots: np.ndarray = blocks * size + positions % size
        return slots

    def _rows(self, step: Step) -> int:
        """Rows of the decode part: padded to what a graph serves, if one does."""
        decodes = len(step.lengths)
        if step.chunks:
            return decodes
        return next((size for size in self.capture_sizes if size >= decodes), decodes)

    def _bucket(self, longest: int) -> int:
        """The maximum length that a graph is captured for: few graphs, few surplus partitions."""
        bucket = PARTITION_TOKENS
        while bucket < longest:
            bucket *= 2
        return min(bucket, max(self.max_seq_len, PARTITION_TOKENS))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.geometry.block_size)

    def _table(self, generator: torch.Generator) -> torch.Tensor:
        """An embedding or output table, [vocab, hidden]."""
        shape = (self.geometry.vocab, self.geometry.hidden)
        empty = torch.empty(shape, dtype=self._dtype, device=self.device)
        return empty.normal_(std=self.geometry.hidden**-0.5, generator=generator)

    def new_pool(self, geometry: Geometry, device: str | torch.device) -> KVPool:
        """A pool of zeros; on the host page-locked, if this decoder runs on CUDA."""
        return KVPool.allocate(
            geometry.layout,
            num_blocks=geometry.num_blocks,
            num_layers=geometry.layers,
            num_kv_heads=geometry.kv_heads,
            block_size=geometry.block_size,
            head_size=geometry.head_dim,
            dtype=TORCH_DTYPES[geometry.kv_dtype],
            device=device,
            pin_memory=self.cuda and torch.device(device).type == "cpu",
        )


def _between_products(fused: bool) -> Any:
    """The module that has what stands between the matrix products of a layer."""
    if not fused:
        return dense
    from kvsim_kernels import triton_dense

    return triton_dense


def _fill(data: torch.Tensor, generator: torch.Generator) -> None:
    """Normal numbers: zeros would run faster than real data. fp8 is filled by slices."""
    if data.dtype != torch.float8_e4m3fn:
        data.normal_(generator=generator)
        return
    for part in data:
        part.copy_(torch.randn(part.shape, generator=generator, device=data.device))
