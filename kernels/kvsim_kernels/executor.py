"""Runs the plans of a scheduler on a decoder and says how long each took.

It stands where a simulator has its cost model (`kvsim.cost.Cost`): a plan goes in, nanoseconds come
out. What the plan says is done with real tokens: block tables are followed, swapped blocks leave
the device and come back, shared blocks are copied before they are written. So a wrong block table
would make wrong tokens.

Plans, requests and sequences are kvsim's (`kvsim/core/plan.py`, `request.py`); only their fields
are read, nothing is imported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvsim_kernels.forward import Decoder
from kvsim_kernels.geometry import Geometry
from kvsim_kernels.step import Chunk, Step
from kvsim_kernels.texts import Text, Texts
from kvsim_kernels.timing import Clock

Pairs = Sequence[tuple[int, int]]


class Executor:
    """A decoder as the engine of one run. It has the methods of a cost model.

    `first_host_block`: the id that the scheduler's block manager gives to the first block of the
    CPU pool; ids on the device count from 0. `clock`: as in `kvsim_kernels.timing`.
    """

    kind = "measured"

    def __init__(self, decoder: Decoder, clock: Clock, first_host_block: int) -> None:
        self._decoder, self._clock = decoder, clock
        self._first_host_block = first_host_block
        self._texts = Texts(decoder.geometry.vocab, decoder.geometry.block_size)
        self._text_of: dict[int, Text] = {}
        self._met: set[tuple[int, int]] = set()

    @property
    def source(self) -> str:
        """Model and device."""
        return f"measured: {self._decoder.geometry.name} on {self._decoder.device}, random weights"

    def describe(self) -> dict[str, Any]:
        """Where the times come from."""
        return {"kind": self.kind, "source": self.source, "model": self._decoder.geometry.model()}

    def step_ns(self, plan: Any) -> int:
        """Runs a step, block copies on the device included; its host work counts."""
        if not plan.entries:
            return 0
        step, sampling = self._step(plan)
        self._meet(step)
        sampled: list[int] = []
        ns = self._timed_ns(lambda: sampled.extend(self._decoder.forward(step).tolist()))
        for (text, position), token in zip(sampling, sampled, strict=True):
            text.say(position, token)
        return ns

    def swap_out_ns(self, pairs: Pairs) -> int:
        """Copies (device, host) blocks."""
        step = Step(swaps_out=[(block, self._on_host(host)) for block, host in pairs])
        return self._timed_ns(lambda: self._decoder.move(step))

    def swap_in_ns(self, pairs: Pairs) -> int:
        """Copies (host, device) blocks."""
        step = Step(swaps_in=[(self._on_host(host), block) for host, block in pairs])
        return self._timed_ns(lambda: self._decoder.move(step))

    def said(self, request: Any) -> list[int]:
        """The output of a request so far, as far as it counts."""
        return self._text(request).tokens(request.input_length, request.sequences[0].length)

    def _step(self, plan: Any) -> tuple[Step, list[tuple[Text, int]]]:
        """What the decoder is to run, and whose next token each row of logits is."""
        tables, lengths, tokens, chunks = [], [], [], []
        decoding: list[tuple[Text, int]] = []
        ending: list[tuple[Text, int]] = []
        for prefill in plan.prefills:
            sequence, text = prefill.request.sequences[0], self._text(prefill.request)
            first = prefill.computed_before + prefill.cached
            last = min(prefill.computed_before + prefill.scheduled, sequence.length)
            chunks.append(Chunk(sequence.table, first, text.tokens(first, last), prefill.samples))
            if prefill.samples:
                ending.append((text, last))
        for request, computed in _decodes(plan):
            text = self._text(request)
            for sequence in request.sequences:
                if not sequence.table:  # a sample that has ended
                    continue
                length, table = sequence.length, sequence.table
                said = text.tokens(length - computed, length)
                if computed == 1:
                    tables.append(table)
                    lengths.append(length)
                    tokens += said
                    decoding.append((text, length))
                else:
                    chunks.append(Chunk(table, length - computed, said))
                    ending.append((text, length))
        step = Step(tables, lengths, tokens, chunks, copies=plan.copies)
        return step, decoding + ending

    def _text(self, request: Any) -> Text:
        text = self._text_of.get(request.index)
        if text is None:
            text = self._texts.begin(request.index, request.sequences[0].identities(0))
            self._text_of[request.index] = text
        return text

    def _meet(self, step: Step) -> None:
        """Run a step untimed if it would capture a graph: an engine captures before it serves.

        A step can run twice: it writes the same numbers to the same slots.
        """
        if not self._decoder.capture_sizes or step.chunks:
            return
        batch = self._decoder.prepare(step)
        if batch.graph and (batch.rows, batch.longest) not in self._met:
            self._met.add((batch.rows, batch.longest))
            self._decoder.forward(step)

    def _on_host(self, block: int) -> int:
        return block - self._first_host_block

    def _timed_ns(self, call: Callable[[], object]) -> int:
        return round(self._clock.once(call) * 1000)


def make_decoder(
    profile: Mapping[str, Any],
    device: str,
    *,
    num_blocks: int,
    host_blocks: int,
    max_tokens: int,
    max_seqs: int,
    max_seq_len: int,
) -> Decoder:
    """The decoder that a profile was measured with, over pools of other sizes.

    `max_tokens`, `max_seqs`, `max_seq_len`: the largest step, before it is padded to a graph.
    Raises ValueError where the device is not there, or too small.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: torch sees no GPU here; use --device cpu, or a CUDA build of torch"
        )
    model, engine = dict(profile["model"]), profile["engine"]
    tensor_parallel_size = model.pop("tp", 1)
    if tensor_parallel_size != 1:
        raise ValueError(f"the profile is of {tensor_parallel_size} GPUs, an executor has one")
    geometry = Geometry(
        **model,
        block_size=engine["block_size"],
        layout=engine["kv_layout"],
        num_blocks=num_blocks,
    )
    rows = min((size for size in engine["capture_sizes"] if size >= max_seqs), default=max_seqs)
    try:
        return Decoder(
            geometry,
            device=device,
            max_tokens=max(max_tokens, rows),
            max_seqs=rows,
            max_seq_len=max_seq_len,
            capture_sizes=engine["capture_sizes"],
            decode_kernel=engine["decode_kernel"].removeprefix("decode_"),
            host_blocks=host_blocks,
        )
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise ValueError(
            f"weights, {num_blocks} blocks on the device and {host_blocks} on the host do not fit"
            " into memory; lower --num-gpu-blocks-override and --num-cpu-blocks-override"
        ) from None


def _decodes(plan: Any) -> list[tuple[Any, int]]:
    """Decoding requests in batch order, with the tokens that each of their samples computes.

    More than one: KV that a preemption threw away is computed again on the way.
    """
    prefilled = {prefill.request.index for prefill in plan.prefills}
    return [(request, n) for request, n, _ in plan.entries if request.index not in prefilled]
