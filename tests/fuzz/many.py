"""Runs many random cases and lists those that fail.

python tests/fuzz/many.py configurations 10000 --first 0
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from fuzz.cases import KINDS
from fuzz.equal import LIMIT_S
from fuzz.inputs import INPUTS
from fuzz.kills import check_kill

CHECKS = KINDS | INPUTS | {"kills": check_kill}

PROGRESS = 20
"""Cases after which standard error says how far it is."""


def attempt(check: Callable[[int], str], seed: int) -> tuple[int, str, str]:
    """A seed, how its runs end, and its failure; empty: none."""
    try:
        return seed, check(seed), ""
    except Exception as error:
        return seed, "failed", f"{type(error).__name__}: {error}"


def alike(failure: str) -> str:
    """What failures of one cause have in common: the text before the numbers differ."""
    return re.sub(r"\d+", "#", failure.partition(";")[0].partition("\n")[0])[:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=CHECKS)
    parser.add_argument("number", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="CPU seconds of a run")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--show", type=int, default=3, help="failures of each class")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.number)
    check = partial(CHECKS[args.kind], limit_s=args.limit)
    ends: Counter[str] = Counter()
    classes: dict[str, list[tuple[int, str]]] = defaultdict(list)
    with ProcessPoolExecutor(args.processes) as pool:
        for seed, end, failure in pool.map(partial(attempt, check), seeds, chunksize=5):
            ends[end] += 1
            if failure:
                print(f"seed {seed}: {failure}", file=sys.stderr)
            if ends.total() % PROGRESS == 0:
                print(f"{ends.total()} cases: {dict(ends)}", file=sys.stderr)
            if failure:
                classes[alike(failure)].append((seed, failure))
    print(f"{args.number} cases: {dict(ends)}")
    for name, failures in sorted(classes.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(failures)} x {name}\nseeds {[seed for seed, _ in failures]}")
        for _, failure in failures[: args.show]:
            print(failure)
    return 1 if classes else 0


if __name__ == "__main__":
    sys.exit(main())
