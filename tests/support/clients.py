"""Real clients, each installed into an environment of its own by the test that needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL_S = 600
ROOM = "KVSIM_CLIENTS"
"""A folder of the environment in which installed clients stay from one run to the next."""


def installed(folder: Path, *packages: str) -> Path:
    """The folder of the programs of an environment with these packages. Skips where it cannot be
    made."""
    place = Path(os.environ.get(ROOM, folder)) / packages[0].replace("=", "-")
    programs = place / "bin"
    if (place / "done").exists():
        return programs
    steps = (
        [sys.executable, "-m", "venv", str(place)],
        [str(programs / "pip"), "install", "-q", *packages],
    )
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"{packages[0]} was not installed in {INSTALL_S} s")
        if done.returncode:
            pytest.skip(f"{packages[0]} cannot be installed: {done.stderr.splitlines()[-1]}")
    (place / "done").touch()
    return programs
