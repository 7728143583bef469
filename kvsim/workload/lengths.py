"""Makes traces with lengths only: the random data set of `vllm bench serve`.

Prompt and output lengths are uniform around a centre, drawn from numpy's `default_rng(seed)`: all
prompts first, then all outputs (vLLM `benchmarks/datasets.py`, `RandomDataset`,
`get_sampling_params`, with a tokenizer that adds no special tokens). No two requests share content,
and none has an arrival time: replay under `--request-rate`.

In addition to that data set, a share of the requests can be a multiple of the drawn length, for
mixed loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING

from kvsim.errors import ConfigError
from kvsim.workload.synthetic import made_trace
from kvsim.workload.trace import Row, Trace

if TYPE_CHECKING:
    import numpy as np

REQUESTS = 1000
"""Default number of requests (`--num-prompts` of `vllm bench serve`)."""
_LONGEST = 2**31
_NOTE = "lengths as the random data set of vllm bench serve draws them"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts or outputs, in tokens."""

    centre: int
    long_share: float = 0.0
    """Share of the requests, chosen at random, that are `long_factor` times as long as drawn."""
    long_factor: float = 1.0


def synthesise_lengths(
    inputs: Lengths,
    outputs: Lengths,
    seed: int = 0,
    *,
    range_ratio: float = 0.0,
    requests: int = REQUESTS,
) -> Trace:
    """A trace of `requests` requests. Equal arguments give equal traces.

    Lengths are uniform in centre · (1 ± `range_ratio`), rounded outwards. Long prompts and long
    outputs are chosen independently. Raises `ConfigError`.
    """
    import numpy as np

    if requests < 1:
        raise ConfigError(f"requests: {requests} is not above 0")
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"range_ratio: {range_ratio:g} is not from 0 to below 1")
    sides = {"input": inputs, "output": outputs}
    bounds = [_bounds(side, lengths, range_ratio) for side, lengths in sides.items()]
    random = np.random.default_rng(seed)
    drawn = [random.integers(low, high + 1, size=requests) for low, high in bounds]
    prompts, output_lengths = (
        _lengthened(random, lengths, each)
        for lengths, each in zip(drawn, (inputs, outputs), strict=True)
    )
    rows = [
        Row(index, str(index), index + 2, None, prompt, output)
        for index, (prompt, output) in enumerate(zip(prompts, output_lengths, strict=True))
    ]
    return made_trace("random", rows, _command(inputs, outputs, seed, range_ratio, requests), _NOTE)


def parse_long(flag: str, text: str) -> tuple[float, float]:
    """(share, factor) of `SHARE:FACTOR`, as in `0.1:5`. Raises `ConfigError` naming the flag."""
    share, colon, factor = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(share), float(factor)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not SHARE:FACTOR, as in 0.1:5") from None


def _bounds(side: str, lengths: Lengths, range_ratio: float) -> tuple[int, int]:
    """The shortest and the longest length that can be drawn, before any is multiplied."""
    if not 0 <= lengths.long_share <= 1:
        raise ConfigError(f"long {side}s: a share of {lengths.long_share:g} is not in 0 .. 1")
    if not 1 <= lengths.long_factor <= 1e6:
        raise ConfigError(f"long {side}s: a factor of {lengths.long_factor:g} is not in 1 .. 1e6")
    if not 1 <= lengths.centre * lengths.long_factor < _LONGEST:
        raise ConfigError(f"{side}_len: {lengths.centre} is not a length; give 1 token or more")
    low = floor(lengths.centre * (1 - range_ratio))
    high = ceil(lengths.centre * (1 + range_ratio))
    return max(low, 1), high


def _lengthened(random: np.random.Generator, drawn: np.ndarray, lengths: Lengths) -> list[int]:
    made: list[int] = drawn.tolist()
    number = round(lengths.long_share * len(made))
    for index in random.permutation(len(made))[:number].tolist():
        made[index] = round(made[index] * lengths.long_factor)
    return made


def _command(
    inputs: Lengths, outputs: Lengths, seed: int, range_ratio: float, requests: int
) -> str:
    words = [f"kvsim trace synth random --seed {seed} --requests {requests}"]
    words.append(f"--input-len {inputs.centre} --output-len {outputs.centre}")
    words.append(f"--range-ratio {range_ratio:g}")
    for side, lengths in (("inputs", inputs), ("outputs", outputs)):
        if lengths.long_share:
            words.append(f"--long-{side} {lengths.long_share:g}:{lengths.long_factor:g}")
    return " ".join(words)
