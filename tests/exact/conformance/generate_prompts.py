"""Random prompts that share beginnings, middles and whole earlier conversations."""

from random import Random
from typing import Any
from zlib import crc32

Row = dict[str, Any]


def make_prompt(rng: Random, rows: list[Row], values: int, longest: int) -> list[int]:
    """New tokens of `values` different ones, behind nothing or what an earlier row begins with.

    Half of the earlier prompts are continued by their output, or lose or change their first tokens.
    """
    start: list[int] = []
    if rows and rng.random() < 0.7:
        earlier = rng.choice(rows)
        start = list(earlier["prompt_token_ids"])
        kind = rng.random()
        if kind < 0.25:
            start += [
                crc32(f"{earlier['id']}:{k}".encode()) % 32000
                for k in range(rng.randint(0, earlier["output_len"]))
            ]
        elif kind < 0.5:
            start = start[: rng.randint(0, len(start))]
        elif kind < 0.65:
            changed = rng.randint(0, min(4, len(start)))
            start[:changed] = [rng.randrange(values) for _ in range(changed)]
    more = rng.choice([0, 1, rng.randint(0, 6), rng.randint(0, longest)])
    tokens = start[:longest] + [rng.randrange(values) for _ in range(more)]
    return tokens[: longest + 1] or [0]


def make_arrivals(rng: Random, number: int) -> list[float]:
    """Ascending times with ties, from all at once to far apart."""
    gap = rng.choice([0.0, 0.3, 1.0, 4.0, 15.0])
    time, times = 0.0, []
    for _ in range(number):
        time += rng.choice([0.0, 0.0, 0.5, 1.0, 1.37]) * gap
        times.append(round(time, 2))
    return times
