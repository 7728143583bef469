"""A synthetic load: a few figures from which every seed draws its own requests.

```toml
kind = "random"        # or chat, api, agents, agentx
requests = 450
input_len = 1000       # random only, as are those below
output_len = 5000
range_ratio = 0.2
```
The keys are the options of `kvsim trace synth`. A run without a trace replays the load that its
`workload` names, drawn with its seed. Requests without content, also those of a trace, can be given
shared prefixes, so that an assumed share of tokens hits (`assume_hit_rate`).
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, floor
from random import Random
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from kvsim.errors import ConfigError
from kvsim.settings import limits
from kvsim.settings.config import RunConfig, read_toml
from kvsim.settings.library import convert, find
from kvsim.settings.limits import check_size
from kvsim.workload.keys import streams
from kvsim.workload.reuse import ceiling_tokens
from kvsim.workload.synthetic import kind_of, made_trace, synthesise
from kvsim.workload.trace import Row, SegmentContent, Trace

if TYPE_CHECKING:
    import numpy as np

REQUESTS = 1000
"""Default number of requests (`--num-prompts` of `vllm bench serve`)."""
_LONGEST = 2**31
_NOTE = "lengths as the random data set of vllm bench serve draws them"


def parse_long(flag: str, text: str) -> tuple[float, float]:
    """(share, factor) of `SHARE:FACTOR`, as in `0.1:5`. Raises `ConfigError` naming the flag."""
    share, colon, factor = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(share), float(factor)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not SHARE:FACTOR, as in 0.1:5") from None


RANDOM = "random"
"""The kind whose lengths are given; the others are `kvsim.workload.synthetic.KINDS`."""


class Workload(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `kvsim trace synth`, without the seed."""

    kind: str
    requests: int | None = None
    """Number of requests; None: the default of the kind."""
    rate: float | None = None
    """Mean requests (api) or sessions per second; not for `random`, which has no arrivals."""
    input_len: int = 1024
    """`random`: tokens of a prompt. All keys below are for `random`, too."""
    output_len: int = 128
    range_ratio: float = 0.0
    long_inputs: str = "0:1"
    """SHARE:FACTOR: this share of the requests is FACTOR times longer."""
    long_outputs: str = "0:1"


def load_workload(name_or_path: str) -> Workload:
    """The workload with a shipped name, or that of a TOML file at this path.

    Raises `ConfigError` that names the file and the key.
    """
    path = str(find("workloads", name_or_path))
    return convert(read_toml(path), Workload, path)


def make_trace(workload: Workload, seed: int) -> Trace:
    """The requests of one seed. Equal arguments give equal traces. Raises `ConfigError`."""
    check_size("requests", _requests(workload), limits.ROWS)
    if workload.kind != RANDOM:
        for key in _RANDOM_ONLY:
            if getattr(workload, key) != getattr(Workload(RANDOM), key):
                raise ConfigError(f"{key}: {workload.kind} traces have lengths of their own")
        return synthesise(workload.kind, seed, requests=workload.requests, rate=workload.rate)
    if workload.rate is not None:
        raise ConfigError(
            "--rate: random traces have no arrivals; give --request-rate to `kvsim run`"
        )
    return _random(workload, seed)


def _random(workload: Workload, seed: int) -> Trace:
    """Lengths are uniform in centre · (1 ± `range_ratio`), rounded outwards. Long prompts and long
    outputs are chosen independently."""
    import numpy as np

    long = (
        parse_long("--long-inputs", workload.long_inputs),
        parse_long("--long-outputs", workload.long_outputs),
    )
    requests, ratio = _requests(workload), workload.range_ratio
    if requests < 1:
        raise ConfigError(f"requests: {requests} is not above 0")
    if not 0 <= ratio < 1:
        raise ConfigError(f"range_ratio: {ratio:g} is not from 0 to below 1")
    bounds = (
        _bounds("input", workload.input_len, ratio, *long[0]),
        _bounds("output", workload.output_len, ratio, *long[1]),
    )
    random = np.random.default_rng(seed)
    drawn = [random.integers(low, high + 1, size=requests) for low, high in bounds]
    prompts, outputs = (
        _lengthened(random, each, *more) for each, more in zip(drawn, long, strict=True)
    )
    rows = [
        Row(index, str(index), index + 2, None, prompt, output)
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    command = (
        f"kvsim trace synth random --seed {seed} --requests {requests}"
        f" --input-len {workload.input_len} --output-len {workload.output_len}"
        f" --range-ratio {ratio:g}"
    )
    for side, (share, factor) in zip(("inputs", "outputs"), long, strict=True):
        command += f" --long-{side} {share:g}:{factor:g}" if share else ""
    return made_trace(RANDOM, rows, command, _NOTE)


def _bounds(side: str, centre: int, ratio: float, share: float, factor: float) -> tuple[int, int]:
    """The shortest and the longest length that can be drawn, before any is multiplied."""
    if not 0 <= share <= 1:
        raise ConfigError(f"long {side}s: a share of {share:g} is not in 0 .. 1")
    if not 1 <= factor <= 1e6:
        raise ConfigError(f"long {side}s: a factor of {factor:g} is not in 1 .. 1e6")
    if not 1 <= centre * factor < _LONGEST:
        raise ConfigError(f"{side}_len: {centre} is not a length; give 1 token or more")
    return max(floor(centre * (1 - ratio)), 1), ceil(centre * (1 + ratio))


def _lengthened(
    random: np.random.Generator, drawn: np.ndarray, share: float, factor: float
) -> list[int]:
    """Lengths of which this share, chosen at random, is `factor` times as long as drawn."""
    made: list[int] = drawn.tolist()
    for index in random.permutation(len(made))[: round(share * len(made))].tolist():
        made[index] = round(made[index] * factor)
    return made


def trace_of(config: RunConfig) -> Trace:
    """The requests of a run without a trace. Raises `ConfigError` without a workload."""
    if config.workload is None:
        raise ConfigError("no requests: give --trace FILE, or a --workload to generate")
    return make_trace(load_workload(config.workload), config.seed)


def made_from(trace: Trace) -> tuple[Workload, int] | None:
    """The workload and the seed from which `kvsim trace synth` made this trace.

    None for any other trace, and for one that this version would not make byte for byte.
    """
    if trace.source.get("format") != "synthetic":
        return None
    try:
        words = shlex.split(str(trace.source.get("command", "")))
        if words[:3] != ["kvsim", "trace", "synth"]:
            return None
        kind, *options = words[3:] or [""]
        pairs = zip(options[::2], options[1::2], strict=False)
        given = {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}
        seed = int(given.pop("seed", "0"))
        workload = msgspec.convert({"kind": kind, **given}, Workload, strict=False)
        # The file decides how much is made, not what its header says.
        if _requests(workload) != len(trace.rows):
            return None
        again = make_trace(workload, seed)
    except (ConfigError, ValueError):  # ValueError: also of shlex and msgspec.
        return None
    return (workload, seed) if again.sha256 == trace.sha256 else None


def _requests(workload: Workload) -> int:
    """How many requests a workload makes. Raises `ConfigError`."""
    if workload.requests is not None:
        return workload.requests
    return REQUESTS if workload.kind == RANDOM else kind_of(workload.kind).requests


_RANDOM_ONLY = ("input_len", "output_len", "range_ratio", "long_inputs", "long_outputs")


PREFIXES = 16
# Finer than one token of the longest prompt (`MAX_TOKENS`).
_HALVINGS = 24


def assume_hit_rate(
    trace: Trace, hit_rate: float, block_size: int, *, prefixes: int = PREFIXES, seed: int = 0
) -> Trace:
    """A copy of the trace in which `hit_rate` of the prompt tokens hit an unlimited cache.

    Each request begins with one of `prefixes` shared texts; the k-th is chosen 1/k times as often
    as the first. The same share of every prompt is shared text. That share is chosen to give the
    hit rate, at blocks of `block_size` tokens and one request at a time. A real engine hits less:
    it evicts blocks, and requests that are admitted together do not hit each other.

    Raises `ConfigError` if the trace has content of its own, or if no share is enough.
    """
    if any(row.content is not None for row in trace.rows):
        raise ConfigError(
            "--hit-rate: the trace says what its requests share; leave it out, the hit rate follows"
        )
    if not 0 < hit_rate < 1:
        raise ConfigError(f"--hit-rate: {hit_rate:g} is not between 0 and 1")
    random = Random(f"kvsim hit rate {seed}")
    weights = [1 / (k + 1) for k in range(prefixes)]
    chosen = random.choices(range(prefixes), weights, k=len(trace.rows))
    share = _share(trace, chosen, hit_rate, block_size)
    rows = _shared(trace.rows, chosen, share)
    shared = replace(trace, rows=rows)
    reached = _share_of_tokens(rows, ceiling_tokens(rows, streams(shared), block_size))
    note = (
        f"assumed: {100 * share:.1f} % of every prompt is one of {prefixes} shared beginnings;"
        f" {100 * reached:.1f} % of the prompt tokens hit a cache without limit"
    )
    made = made_trace(trace.path, rows, f"{trace.path} --hit-rate {hit_rate:g}", note)
    return replace(made, path=trace.path, notes=[*trace.notes, note])


def _share(trace: Trace, chosen: Sequence[int], hit_rate: float, block_size: int) -> float:
    """The least share of every prompt that reaches the hit rate, by bisection."""
    most = _rate(trace.rows, chosen, 1.0, block_size)
    if most < hit_rate:
        raise ConfigError(
            f"--hit-rate: {hit_rate:g} cannot be reached with {len(set(chosen))} prefixes and"
            f" blocks of {block_size} tokens, at most {most:.3f}; take fewer --prefixes"
        )
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        reached = _rate(trace.rows, chosen, middle, block_size)
        low, high = (low, middle) if reached >= hit_rate else (middle, high)
    return high


def _shared(rows: Sequence[Row], chosen: Sequence[int], share: float) -> list[Row]:
    """Rows whose prompts share their first part, of length `share`, within each choice."""
    found = []
    for row, number in zip(rows, chosen, strict=True):
        tokens = round(row.input_length * share)
        content = SegmentContent(((f"prefix-{number}", tokens),)) if tokens else None
        found.append(replace(row, content=content))
    return found


def _rate(rows: Sequence[Row], chosen: Sequence[int], share: float, block_size: int) -> float:
    """The share of the prompt tokens that would hit a cache without limit: of each prompt the whole
    blocks of shared text that were there before, but never its last token."""
    known, hits = defaultdict[object, int](int), 0
    for row, number in zip(rows, chosen, strict=True):
        text = number, row.scope, row.lora or None, row.salt
        blocks = round(row.input_length * share) // block_size
        hits += min(blocks, known[text], (row.input_length - 1) // block_size) * block_size
        known[text] = max(known[text], blocks)
    return _share_of_tokens(rows, hits)


def _share_of_tokens(rows: Sequence[Row], tokens: int) -> float:
    return tokens / sum(row.input_length for row in rows)
