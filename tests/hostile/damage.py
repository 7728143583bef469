"""Damages result folders, reproducibly: values of other types, absurd numbers, missing parts."""

import json
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from command import run_here

EVIL: list[Any] = [
    *(None, True, -1, 0, 7, 10**6, 2**40, 2**62, -(2**62), 10**300, 1e308, -0.5, "", "x"),
    *("<script>alert(1)</script>", "\ud800", "é" * 5000, [], {}, [1, "a", None], {"a": {"b": []}}),
    json.loads("[" * 200 + "]" * 200),
]
NUMBERS = [None, -1, -2, 0, 1, 3, 99, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63)]
TEXTS = [None, "", "x", "<img src=x onerror=alert(1)>", "completed", "rejected", "é" * 3000]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all parts of plain values, the whole left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*path, key)
        if isinstance(each, dict | list):
            yield from leaves(each, (*path, key))


def damage_json(path: Path, dice: random.Random) -> str:
    """Replace, or drop, one part of a JSON file; returns what was done."""
    table = json.loads(path.read_text())
    *parents, last = dice.choice(list(leaves(table)))
    inner = table
    for key in parents:
        inner = inner[key]
    if dice.random() < 0.2:
        inner.pop(last)
        what = "dropped"
    else:
        inner[last] = dice.choice(EVIL)
        what = repr(inner[last])[:60]
    path.write_text(json.dumps(table))
    return f"{path.name}: {[*parents, last]}: {what}"


def damage_table(path: Path, dice: random.Random) -> str:
    """Change one value, or the order, of one column of a Parquet file; returns what was done."""
    table = pq.read_table(path)
    name = dice.choice(table.column_names)
    values = table[name].to_pylist()
    kind = table[name].type
    place = dice.randrange(len(values)) if values else 0
    what = dice.choice(["value", "value", "all", "reverse", "type"])
    if not values or what == "type":
        kind, values = pa.string(), [str(each) for each in values]
    elif what == "reverse":
        values = values[::-1]
    else:
        text = kind == pa.string()
        numbers = [float("nan"), float("inf"), -1.0, None] if kind == pa.float64() else NUMBERS
        evil = dice.choice(TEXTS if text else numbers)
        values = [evil] * len(values) if what == "all" else values
        values[place] = evil
    table = table.set_column(table.column_names.index(name), name, pa.array(values, kind))
    pq.write_table(table, path)
    return f"{path.name}: {name}: {what} at {place}: {str(values[:1])[:40]}"


def damage_bytes(path: Path, dice: random.Random) -> str:
    """Flip a byte, or cut the file; returns what was done."""
    data = bytearray(path.read_bytes())
    place = dice.randrange(max(len(data), 1))
    if data and dice.random() < 0.7:
        data[place] ^= 1 << dice.randrange(8)
    else:
        del data[place:]
    path.write_bytes(bytes(data))
    return f"{path.name}: byte {place}"


def damaged(folder: Path, into: Path, seed: int) -> str:
    """A copy of a folder with one fault; returns what it is."""
    shutil.copytree(folder, into)
    dice = random.Random(seed)
    path = dice.choice(sorted(p for p in into.rglob("*") if p.suffix in (".json", ".parquet")))
    structured: Callable[[Path, random.Random], str]
    structured = damage_json if path.suffix == ".json" else damage_table
    return (damage_bytes if dice.random() < 0.15 else structured)(path, dice)


def outcome(arguments: list[str]) -> tuple[int, str]:
    """Exit code and standard error of a command that runs in this process."""
    done = run_here(arguments)
    return done.returncode, done.stderr


def read_all(folder: Path, whole: Path, out: Path) -> Iterator[tuple[list[str], int, str]]:
    """Every command that reads a run folder: its arguments, exit code and standard error."""
    run = str(folder)
    for arguments in (
        ["report", run],
        ["why", run, "--request", "3", "--html", str(out / "why.html")],
        ["timeline", run, "--out", str(out / "t.json")],
        ["diff", run, str(whole), "--out", str(out / "diff")],
        ["diff", str(whole), run, "--json"],
    ):
        yield arguments, *outcome(arguments)


def merge(folder: Path, whole: Path, out: Path) -> Iterator[tuple[list[str], int, str]]:
    """The command that reads a sweep folder."""
    arguments = ["sweep", "--merge", str(folder), "--out", str(out / "merged")]
    yield arguments, *outcome(arguments)


def try_one(source: Path, seed: int) -> str:
    """Damage a run or sweep folder, read it with every command, and say what went wrong."""
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "damaged"
        fault = damaged(source, folder, seed)
        read = merge if (source / "sweep.json").exists() else read_all
        try:
            for arguments, code, said in read(folder, source, Path(room)):
                if code not in (0, 2) or (code == 2 and len(said.splitlines()) != 1):
                    return f"{seed}: {fault}: {arguments[0]}: {code}: {said[:300]}"
        except Exception:
            return f"{seed}: {fault}: {traceback.format_exc()[-600:]}"
    return ""


if (
    __name__ == "__main__"
):  # PYTHONPATH=tests/support python tests/hostile/damage.py FOLDER [COUNT] [FIRST_SEED]
    source, count, first = Path(sys.argv[1]), *map(int, (*sys.argv[2:], "100", "0")[:2])
    problems = list(filter(None, (try_one(source, seed) for seed in range(first, first + count))))
    sys.stdout.write("\n".join([*problems, f"{count} folders, {len(problems)} problems", ""]))
