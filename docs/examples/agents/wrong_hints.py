"""Makes the hints of a trace wrong, missing or greedy, to see what a policy that trusts them does.

kvsim trace synth agentx --requests 600 --out agentx.jsonl
python docs/examples/agents/wrong_hints.py agentx.jsonl wrong.jsonl --factor 10
python docs/examples/agents/wrong_hints.py agentx.jsonl half.jsonl --missing 0.5
python docs/examples/agents/wrong_hints.py agentx.jsonl greedy.jsonl --greedy 0.33
"""

import argparse
import json
from pathlib import Path
from random import Random
from typing import Any

HINTS = ("tool", "pause_s", "ttl_s", "retain", "release", "prefetch", "pin")
FOREVER_S = 86_400


def changed(
    hints: dict[str, Any], session: str, *, factor: float = 1, missing: float = 0, greedy: float = 0
) -> dict[str, Any]:
    """The hints of a turn with times `factor` too long or too short at random, none in a share
    `missing` of the sessions, and everything pinned for a day in a share `greedy` of them."""
    random = Random(session.partition("/")[0])
    if random.random() < missing:
        return {key: value for key, value in hints.items() if key not in HINTS}
    if random.random() < greedy:
        return {"tool": "file", "ttl_s": FOREVER_S, "pin": FOREVER_S, "retain": 9}
    off = Random(f"{session} {sorted(hints.items())}").choice((factor, 1 / factor))
    return {key: value * off if key.endswith("_s") else value for key, value in hints.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("target")
    for name, default in (("factor", 1.0), ("missing", 0.0), ("greedy", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    given = vars(parser.parse_args())
    source, target = given.pop("source"), given.pop("target")
    with Path(source).open() as lines, Path(target).open("w") as file:
        print(json.dumps({"kvsim_trace": 1, "source": {"hints": given}}), file=file)
        next(lines)
        for line in lines:
            row = json.loads(line)
            hints = {key[2:]: row.pop(key) for key in list(row) if key.startswith("x_")}
            hints = changed(hints, row.get("session", ""), **given)
            print(json.dumps(row | {f"x_{key}": hints[key] for key in hints}), file=file)


if __name__ == "__main__":
    main()
