"""What goes to the terminal: tables and sentences to standard output, notes to standard error."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console() -> Console:
    """Standard output, for tables and colours."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise  # as any other output does; Rich would exit with code 1

    return Piped(highlight=False, emoji=False)


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
