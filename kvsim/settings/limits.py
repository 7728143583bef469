"""How much of a trace is taken in, so that a damaged or hostile file cannot take the machine.

Each limit is far above what published traces need. `KVSIM_LIMITS` in the environment, which
`kvsim --limits X` sets, multiplies all of them. It is part of the environment so that processes
that kvsim starts keep to it, too.
"""

from __future__ import annotations

import os

from kvsim.errors import ConfigError

VARIABLE = "KVSIM_LIMITS"

ROWS = 4_000_000
"""Requests of a trace: each is an object that stays in memory for the whole run."""
LINE_BYTES = 1 << 24
"""Most bytes of one line: enough for a prompt of two million token ids."""
BLANK_BYTES = 1 << 24
"""White space between the rows: a gzip file of a megabyte can hold a gigabyte of it."""
TRACE_BYTES = 1 << 33
"""Most bytes of a whole trace, uncompressed. Reading that many takes minutes."""
OUTPUT_TOKENS = 1 << 20
"""Most output tokens of one request. Each token is a step, and each step a row of the result."""
STEPS = 1 << 25
"""Most steps of one run. Each step is a row of the result."""
REFERENCES = 1 << 25
"""Blocks of all prompts that are looked at one by one, in `kvsim cache policies` and `sample`."""
POLICY_CALL_S = 30
"""Seconds of one call of a policy of the user's own, one of thousands in a run."""
REPLICAS = 1 << 10
"""Engines in one simulation: each has a pool of its own."""
BLOCK_TOKENS = 1 << 20
"""Tokens of a block: requests are kept apart by how full their last block is."""
MEMORY_BYTES = 6 * 10**9
"""That a run is expected to need, by `check_run`."""
BLOCKS = 1 << 23
"""Different blocks whose reuse is followed: each is an entry of a table in memory,
and a run of hash ids writes millions of them in one line."""


def factor() -> float:
    """What multiplies the limits now. Raises `ConfigError` for a bad `KVSIM_LIMITS`."""
    text = os.environ.get(VARIABLE, "1")
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1e6:
        raise ConfigError(f"--limits: {text!r} is not a factor above 0 and up to 1e6, as in 10")
    return number


def most(limit: int) -> int:
    """A limit of this module as it holds now."""
    return int(limit * factor())


def check_size(what: str, number: int, limit: int) -> None:
    """Raise `ConfigError` if `number` of `what` is above a limit of this module."""
    if number > most(limit):
        raise ConfigError(f"{what}: {number:,} is above the limit of {most(limit):,}; {REMEDY}")


def check_run(requests: int, steps: int) -> None:
    """Raise `ConfigError` if a run of this size is expected to need too much memory.

    `steps`: the least number of steps that it can take. Measured with `kvsim run --out` on the
    default engine (docs/results/promises.md).
    """
    need = _START_BYTES + requests * _REQUEST_BYTES + steps * _STEP_BYTES
    allowed = most(MEMORY_BYTES)
    if need > allowed:
        raise ConfigError(
            f"{requests:,} requests in {steps:,} steps or more: about {need / 1e9:.1f} GB of"
            f" memory, above the limit of {allowed / 1e9:.1f} GB; --num-prompts N takes the first"
            " N, or kvsim --limits 10 ... allows ten times as much of everything"
        )


_START_BYTES, _REQUEST_BYTES, _STEP_BYTES = 10**8, 1_000, 65
REMEDY = "give less, or kvsim --limits 10 ... for ten times as much of everything"
