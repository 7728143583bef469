"""What commands say besides their results: notes, and where files are."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from kvsim.report.screen import make_console


def note(*texts: str) -> None:
    """Print these notes to standard error, one a line."""
    for text in texts:
        print(f"note: {text}", file=sys.stderr)


def command_line() -> str:
    """The command that runs now, as one would type it."""
    return shlex.join(["kvsim", *sys.argv[1:]])


def tell_written(out: str | Path, page: str) -> None:
    """Say which folder was written, and which of its pages to open."""
    make_console().print(f"\nwritten to {out}: open {Path(out) / page}")
