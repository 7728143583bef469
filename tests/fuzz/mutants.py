"""Plants faults, one at a time, and says which of them nobody notices.

    python tests/fuzz/mutants.py 100 --of kvsim/engines/sglang --seed 1 --out mutants.jsonl

A fault is one changed line: a comparison or an operator is another, a number is off by one, a
condition is negated, a statement is left out. In a copy of the package with the fault, the shipped
sample of recorded logs is replayed (`kvsim conform tests/data/...`), then the quick tests of the
room run: `ROOMS` says which of both. Each fault is a line of `--out`; those that are there already
are not tried again, but for those that nobody noticed with `--again`. Faults that survive are
printed: each is equivalent (`equivalent.toml` lists those, and why), unreachable, or lacks a test.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CPU_SECONDS = 300
"""After which a command is ended, which is noticed, too."""
OTHER = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.And: "or",
    ast.Or: "and",
}
"""Operator → what is put in its place."""


class Fault(NamedTuple):
    path: str
    line: int
    column: int
    old: str
    new: str


def faults(path: Path) -> Iterator[Fault]:
    """All faults that can be planted in a file."""
    text = path.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    silent = {each for node in ast.walk(tree) for each in unheard(node)}
    for node in ast.walk(tree):
        if node in silent:
            continue
        place = getattr(node, "lineno", 0)
        if not place or node.end_lineno != place:  # type: ignore[attr-defined]
            continue
        old = lines[place - 1].encode()[node.col_offset : node.end_col_offset].decode()  # type: ignore[attr-defined]
        for new in changed(node, old):
            yield Fault(str(path.relative_to(ROOT)), place, node.col_offset, old, new)  # type: ignore[attr-defined]


def unheard(node: ast.AST) -> Iterator[ast.AST]:
    """What only matters when something else is wrong: decorators, `strict` of `zip`, and whether
    values of a class are `frozen`."""
    for each in getattr(node, "decorator_list", ()):
        yield from ast.walk(each)
    if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen"):
        yield node.value


def changed(node: ast.AST, old: str) -> Iterator[str]:
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in OTHER:
            yield f"({ast.unparse(left)}) {OTHER[type(operator)]} ({ast.unparse(right)})"
        case ast.BinOp(left, operator, right) if type(operator) in OTHER:
            yield f"(({ast.unparse(left)}) {OTHER[type(operator)]} ({ast.unparse(right)}))"
        case ast.BoolOp(operator, values):
            yield f" {OTHER[type(operator)]} ".join(f"({ast.unparse(each)})" for each in values)
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(bool(value)):
            yield str(not value)
        case ast.Constant(int(value)):
            yield str(value + 1)
        case ast.Name("min" | "max"):
            yield "max" if old == "min" else "min"
        case ast.AugAssign() | ast.Expr(ast.Call()) | ast.Assign([ast.Attribute()]):
            yield "pass"
        case _:
            return


class Room(NamedTuple):
    samples: str
    """Files of the sample that show what it decides; empty: none does."""
    tests: str


EXACT = "exact/test_tiny.py exact/core exact/engines exact/conformance/test_runs.py"
CASES = "exact/conformance"
V1 = f"{CASES}/test_vllm_v1.py {CASES}/test_vllm_v1_features.py {CASES}/test_vllm_v1_groups.py"
FREED = "unit/core/test_collector.py"
ENGINE = (
    f"{EXACT} unit/run exact/test_groups_in_runs.py exact/test_audits.py {FREED}"
    " unit/policies/test_sharing.py"
)
ROOMS = {
    "kvsim/core": Room(
        "*",
        f"{EXACT} exact/test_audits.py unit/core/test_records.py {FREED} unit/policies",
    ),
    "kvsim/engines": Room("*", ENGINE),
    "kvsim/engines/nano": Room("nano*", f"{ENGINE} {CASES}/test_nano.py"),
    "kvsim/engines/sglang": Room("sglang*", f"{ENGINE} {CASES}/test_sglang.py"),
    "kvsim/engines/vllm_033": Room("vllm-0.3.3*", f"{ENGINE} {CASES}/test_vllm033.py"),
    "kvsim/engines/vllm_063": Room("vllm-0.6.3*", f"{ENGINE} {CASES}/test_vllm063.py"),
    "kvsim/engines/vllm_v1": Room("vllm-v1*", f"{ENGINE} {V1} unit/results/blockmap"),
    "kvsim/policies": Room(
        "vllm*",
        "unit/policies exact/core exact/engines exact/cachelab"
        " unit/explain/caches/test_policies.py",
    ),
    "kvsim/fleet": Room(
        "router-*", f"exact/routers {FREED} pages/test_fleet.py pages/test_colours.py"
    ),
    "kvsim/cost": Room("", "unit/cost unit/run/test_speculation.py"),
    "kvsim/results": Room("", "unit/results unit/report exact/test_audits.py"),
}
"""Folder or module → who is asked about a fault in it; that of the longest name is."""
AT_ONCE = 6
"""Files of the sample that are replayed by one command, the smallest first."""


def room_of(path: str) -> Room:
    return ROOMS[max((each for each in ROOMS if path.startswith(each)), key=len)]


def noticed(fault: Fault | None, room: Room) -> str:
    """Who notices a fault: `sample`, `tests`, or nobody. None: no fault."""
    with TemporaryDirectory() as folder:
        copytree(ROOT / "kvsim", Path(folder) / "kvsim", ignore=ignore_patterns("__pycache__"))
        for name in ("traces", "configs"):
            (Path(folder) / name).symlink_to(ROOT / name)
        if fault is not None:
            plant(fault, Path(folder) / fault.path)
        files = sorted((ROOT / "tests/data").glob(f"{room.samples}.gz"), key=size)
        for first in range(0, len(files) if room.samples else 0, AT_ONCE):
            if failed(["kvsim", "conform", *map(str, files[first : first + AT_ONCE])], folder):
                return "sample"
        tests = [str(ROOT / "tests" / each) for each in room.tests.split()]
        words = ["pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
        return "tests" if failed(words, folder) else ""


def size(path: Path) -> int:
    return path.stat().st_size


def plant(fault: Fault, path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[fault.line - 1] = changed_line(fault, lines[fault.line - 1])
    path.write_text("".join(lines))


def changed_line(fault: Fault, text: str) -> str:
    line = text.encode()
    end = fault.column + len(fault.old.encode())
    return (line[: fault.column] + fault.new.encode() + line[end:]).decode()


def told(fault: Fault) -> tuple[str, str]:
    """The file, and its line before and after, without the indent."""
    line = (ROOT / fault.path).read_text().splitlines()[fault.line - 1]
    return fault.path, f"{line.strip()} -> {changed_line(fault, line).strip()}"


def failed(words: list[str], folder: str) -> bool:
    """Whether a module of Python fails. Compiled modules run only where no source is changed."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": folder},
        capture_output=True,
        check=False,
    )
    return done.returncode != 0


def equivalent() -> set[tuple[str, str]]:
    """What `told` says of faults that change nothing."""
    listed = tomllib.loads(Path(__file__).with_name("equivalent.toml").read_text())
    return {(path, line) for path, lines in listed.items() for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("number", type=int)
    parser.add_argument("--of", nargs="+", default=["kvsim/core", "kvsim/engines"])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    chosen = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    paths = [path for each in chosen.of for path in sorted((ROOT / each).rglob("*.py"))]
    paths += [ROOT / each for each in chosen.of if each.endswith(".py")]
    every = [fault for path in paths for fault in faults(path)]
    planted = Random(chosen.seed).sample(every, min(chosen.number, len(every)))
    rows = [json.loads(line) for line in chosen.out.open()] if chosen.out.exists() else []
    known = {Fault(*row["fault"]): row["noticed"] for row in rows}
    same = equivalent()
    known |= {fault: "equivalent" for fault in planted if told(fault) in same}
    left = [fault for fault in planted if not known.get(fault, "" if chosen.again else None)]
    for room in {room_of(fault.path) for fault in left}:
        if who := noticed(None, room):
            sys.exit(f"the {who} of {room} fail without any fault; mend that first")
    with chosen.out.open("a") as out, ThreadPoolExecutor(chosen.jobs) as pool:
        found = pool.map(lambda fault: noticed(fault, room_of(fault.path)), left)
        for fault, who in zip(left, found, strict=True):
            known[fault] = who
            out.write(json.dumps({"fault": fault, "noticed": who}) + "\n")
            out.flush()
    for fault in planted:
        if not known[fault]:
            print(f"{fault.path}:{fault.line}: {told(fault)[1]}")
    counted = Counter(known[fault] or "nobody" for fault in planted)
    said = ", ".join(f"{counted[who]} {who}" for who in ("sample", "tests", "equivalent", "nobody"))
    print(f"seed {chosen.seed}: {len(planted)} of {len(every)} faults: {said}")


if __name__ == "__main__":
    main()
