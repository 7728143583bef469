"""Runs a module in a process of its own, because start-up settings decide its times."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module`; exits with its exit code if that is not 0.

    The process finds the modules of this one, and `kvsim_kernels` also in a checkout.
    """
    beside = Path(__file__).resolve().parents[2] / "kernels"
    paths = [str(beside), *(str(Path(path).resolve()) for path in sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *arguments]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise typer.Exit(code if code > 0 else 1)
