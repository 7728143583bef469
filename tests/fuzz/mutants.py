"""Plants faults, one at a time, and says which of them nobody notices.

    python tests/fuzz/mutants.py 100 --of kvsim/engines/sglang --seed 1 --out mutants.jsonl

A fault is one changed line: a comparison or an operator is another, a number is off by one, a
condition is negated, a statement is left out. The shipped sample of recorded logs is replayed
first (`kvsim conform tests/data`); what that does not notice is put to the quick tests named by
`--tests`. Everything is interpreted, in a copy of the package. Each fault is a line of `--out`;
those that are there already are not tried again. Faults that survive are printed: each is
equivalent, unreachable, or lacks a test.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300
"""After which a command hangs, which is noticed, too."""
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
    for node in ast.walk(ast.parse(text)):
        place = getattr(node, "lineno", 0)
        if not place or node.end_lineno != place:  # type: ignore[attr-defined]
            continue
        old = lines[place - 1].encode()[node.col_offset : node.end_col_offset].decode()  # type: ignore[attr-defined]
        for new in changed(node, old):
            yield Fault(str(path.relative_to(ROOT)), place, node.col_offset, old, new)  # type: ignore[attr-defined]


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


SAMPLES = {
    "nano": "nano*",
    "sglang": "sglang*",
    "vllm_033": "vllm-0.3.3*",
    "vllm_063": "vllm-0.6.3*",
    "vllm_v1": "vllm-v1*",
}
"""Folder of an engine → its files of the sample; all other code has all of them."""


def noticed(fault: Fault | None, path: str, tests: list[str]) -> str:
    """Who notices a fault in the file `path`: `sample`, `tests`, or nobody. None: no fault."""
    with TemporaryDirectory() as folder:
        copytree(ROOT / "kvsim", Path(folder) / "kvsim", ignore=ignore_patterns("__pycache__"))
        for name in ("traces", "configs"):
            (Path(folder) / name).symlink_to(ROOT / name)
        if fault is not None:
            plant(fault, Path(folder) / path)
        samples = [SAMPLES[part] for part in Path(path).parts if part in SAMPLES] or ["*"]
        files = [str(each) for each in (ROOT / "tests/data").glob(f"{samples[0]}.gz")]
        commands = {"sample": ["kvsim", "conform", *files]}
        if tests:
            commands["tests"] = ["pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
        for who, words in commands.items():
            if failed([sys.executable, "-P", "-m", *words], folder):
                return who
    return ""


def plant(fault: Fault, path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    line = lines[fault.line - 1].encode()
    end = fault.column + len(fault.old.encode())
    lines[fault.line - 1] = (line[: fault.column] + fault.new.encode() + line[end:]).decode()
    path.write_text("".join(lines))


def failed(command: list[str], folder: str) -> bool:
    environment = {**os.environ, "PYTHONPATH": folder, "KVSIM_INTERPRETED": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("number", type=int)
    parser.add_argument("--of", nargs="+", default=["kvsim/core", "kvsim/engines"])
    parser.add_argument("--tests", nargs="*", default=["tests/exact/core", "tests/exact/engines"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    chosen = parser.parse_args()
    paths = [path for each in chosen.of for path in sorted((ROOT / each).rglob("*.py"))]
    paths += [ROOT / each for each in chosen.of if each.endswith(".py")]
    every = [fault for path in paths for fault in faults(path)]
    planted = Random(chosen.seed).sample(every, min(chosen.number, len(every)))
    rows = [json.loads(line) for line in chosen.out.open()] if chosen.out.exists() else []
    known = {Fault(*row["fault"]): row["noticed"] for row in rows}
    if who := noticed(None, "", chosen.tests):
        sys.exit(f"the {who} fails without any fault; mend that first")
    with chosen.out.open("a") as out, ThreadPoolExecutor(chosen.jobs) as pool:
        left = [fault for fault in planted if fault not in known]
        for fault, who in zip(
            left, pool.map(lambda each: noticed(each, each.path, chosen.tests), left), strict=True
        ):
            known[fault] = who
            out.write(json.dumps({"fault": fault, "noticed": who}) + "\n")
            out.flush()
    found = [known[fault] for fault in planted]
    for fault in planted:
        if not known[fault]:
            print(f"{fault.path}:{fault.line}: {fault.old} -> {fault.new}")
    print(
        f"seed {chosen.seed}: {len(planted)} of {len(every)} faults,"
        f" {found.count('sample')} noticed by the sample, {found.count('tests')} by tests,"
        f" {found.count('')} by nobody"
    )


if __name__ == "__main__":
    main()
