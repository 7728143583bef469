"""Standard output with colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console() -> Console:
    """Standard output, for tables and colours."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise  # as any other output does; Rich would exit with code 1

    return Piped()
