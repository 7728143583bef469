"""Runs what is measured in processes of its own, without shared memory or warm caches."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from compileall import compile_dir
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvsim.against.bench.settings import Case
from kvsim.against.bench.usage import children_cpu_s, children_peak_rss_mb
from kvsim.against.bench.workloads import WORKLOADS

T = TypeVar("T")


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole process took, start and imports included."""

    cpu_s: float
    rss_mb: float


def store_bytecode(folder: Path) -> None:
    """Compile the modules in a folder, as pip does when it installs them.

    Otherwise processes would compile them again and again where `PYTHONDONTWRITEBYTECODE` is set.
    """
    compile_dir(folder, quiet=2)


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """The result of a function in a fresh process; its exceptions are raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def spent(*command: str) -> tuple[Whole, str]:
    """What a command took, and what it wrote; call it in a fresh process for its memory.

    Raises `subprocess.CalledProcessError`.
    """
    before_s = children_cpu_s()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    took = Whole(cpu_s=children_cpu_s() - before_s, rss_mb=children_peak_rss_mb())
    return took, done.stdout


def kvsim_run(case: Case, path: str) -> Whole:
    """What `kvsim run --out` of a case takes, with its requests in a file of `write_requests`."""
    settings = [word for text in _assignments(case.table) for word in ("--set", text)]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out")
        command = ("run", "--trace", path, "--out", out)
        return spent(sys.executable, "-m", "kvsim", *command, *settings)[0]


def write_requests(workload: str, trace: str | None, path: str) -> None:
    """Write the requests of a workload as Mooncake rows of 512-token ids; natively if these cannot
    hold what the requests say."""
    from kvsim.workload import convert

    made = WORKLOADS[workload].make(trace)
    convert(made, path, "native" if any(row.lora for row in made.rows) else "mooncake")


def _assignments(table: dict[str, Any], prefix: str = "") -> list[str]:
    """The settings of a table as `--set` takes them."""
    found: list[str] = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _assignments(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={msgspec.json.encode(value).decode()}")
    return found
