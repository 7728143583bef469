"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def make_table(
    *columns: str | Text,
    rows: Iterable[Iterable[RenderableType]] = (),
    title: str | None = None,
    texts: int = 1,
    **look: Any,
) -> Table:
    """A table of these rows; the first `texts` columns hold text, the others right-aligned numbers.

    `look`: more arguments of Rich's `Table`.
    """
    from rich import box
    from rich.table import Table

    common = {"title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD}
    table = Table(title=title, **{**common, **look})
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
