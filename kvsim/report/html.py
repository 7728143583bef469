"""Builds HTML in which every text is escaped unless it is HTML already."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"br", "col", "hr", "meta"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """An element; a trailing underscore in an attribute's name is dropped, others become `-`.

    Children that are not `Html` are escaped; None is left out, as are attributes that are None.
    """
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Html(f"<{tag}{named}>")
    return Html(f"<{tag}{named}>{join(children)}</{tag}>")


def join(children: Iterable[object]) -> Html:
    """Children, one after another."""
    parts = (child for child in children if child is not None)
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in parts))


def table(
    head: Iterable[object], rows: Iterable[Iterable[object]], *, text_columns: int = 1
) -> Html:
    """A table that scrolls sideways if need be; columns after `text_columns` are numbers."""

    def row(tag: str, cells: Iterable[object]) -> Html:
        return element(
            "tr",
            *(
                element(tag, cell, class_="number" if i >= text_columns else None)
                for i, cell in enumerate(cells)
            ),
        )

    body = element("tbody", *(row("td", cells) for cells in rows))
    return element(
        "div",
        element("table", element("thead", row("th", head)), body),
        class_="scroll",
        tabindex="0",
    )


def panel(title: str | None, *children: object) -> Html:
    """A framed part of a page."""
    return element("div", element("h3", title) if title else None, *children, class_="panel")


def strip(parts: Iterable[tuple[str, float, str]]) -> Html:
    """A bar of parts side by side: (colour, share of the width, label), without empty parts."""
    return element(
        "div",
        *(
            element("span", style=f"--colour: {colour}; width: {100 * share:.2f}%", title=words)
            for colour, share, words in parts
            if share > 0
        ),
        class_="strip",
    )


def key_of(entries: Iterable[tuple[str, str]]) -> Html:
    """A legend: (colour, label)."""
    return element(
        "div",
        *(
            element(
                "span",
                element("span", class_="swatch", style=f"--colour: {colour}"),
                words,
                class_="entry",
            )
            for colour, words in entries
        ),
        class_="legend",
    )
