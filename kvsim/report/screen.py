"""What a terminal shows: sentences, remarks in the colours of their tones, and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from kvsim.report.wording import Tone

_WORD = re.compile(r"[ \t\n]*[^ \t\n]+[ \t\n]*")
"""What Rich may not break; its own expression breaks between a number and its unit, too."""
_TONES = {"plain": "", "warning": "yellow", "bad": "bold red"}


def make_console(file: IO[str] | None = None, width: int | None = None) -> Console:
    """A terminal that prints texts as they are; standard output, unless a `file` is given."""
    from rich import _wrap
    from rich.console import Console

    _wrap.re_word = _WORD

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise  # as any other output does; Rich would exit with code 1

    return Piped(file=file, width=width, highlight=False, emoji=False, markup=False)


def print_remarks(console: Console, remarks: Iterable[tuple[str, Tone]]) -> None:
    """Print sentences, one a line, each in the colour of its tone."""
    for text, tone in remarks:
        console.print(text, style=_TONES[tone])


def make_table(
    *columns: str,
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

    class Whole(Table):
        """Its columns shrink to their longest words, or numbers with units, before one breaks."""

        def _calculate_column_widths(self, console: Any, options: Any) -> list[int]:
            widths = super()._calculate_column_widths(console, options)
            least = [
                max(len(word) for cell in (each.header, *each._cells) for word in words(cell))
                + self._get_padding_width(place)
                for place, each in enumerate(self.columns)
            ]
            room = sum(widths) - sum(least)
            if room < 0 or not any(map(int.__lt__, widths, least)):
                return widths
            for place in sorted(range(len(widths)), key=lambda i: least[i] - widths[i]):
                more = min(max(widths[place] - least[place], 0), room)
                widths[place], room = least[place] + more, room - more
            return widths

    def words(cell: RenderableType) -> list[str]:
        return re.split(r"[ \n]", str(cell))

    styles = {"title_style": "bold", "header_style": "dim"}
    common = {"title_justify": "left", "box": box.SIMPLE_HEAD, **styles}
    table = Whole(title=title, **{**common, **look})
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < texts else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
