"""Puts a page together: one HTML file that needs no other file and no network.

Every text is escaped unless it is HTML already. `plotly-cartesian.min.js.gz` is npm's
`plotly.js-cartesian-dist-min`, compressed. It has bars, lines, heat maps, histograms, boxes,
contours, pies and images. To take another version, in this folder:

```
npm pack plotly.js-cartesian-dist-min@VERSION
tar -xzf plotly.js-cartesian-dist-min-VERSION.tgz
gzip -n9 < package/plotly-cartesian.min.js > plotly-cartesian.min.js.gz
mv package/LICENSE plotly.LICENSE
```
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from kvsim.core.vectors import added
from kvsim.report.pages.figures import Figure
from kvsim.results.numerals import count, percent, seconds, size
from kvsim.version import __version__

_LONG = 12
"""Letters of a card's value from which they are smaller, so that they stay in one line."""
_VOID = frozenset({"br", "col", "hr", "input", "meta"})


class Html(str):
    """Text that is HTML already, and the figures that have their places in it."""

    figures: tuple[Figure, ...] = ()


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
    return join((Html(f"<{tag}{named}>"), *children, Html(f"</{tag}>")))


def join(children: Iterable[object]) -> Html:
    """Children, one after another, and their figures in the same order."""
    parts = [
        child if isinstance(child, Html) else Html(escape(str(child)))
        for child in children
        if child is not None
    ]
    joined = Html("".join(parts))
    joined.figures = tuple(figure for part in parts for figure in part.figures)
    return joined


def lead(text: object) -> Html:
    """A paragraph that introduces what follows."""
    return element("p", text)


def id_of(name: object) -> Html:
    """An identifier, in letters of equal width."""
    return element("span", name, class_="id")


def table(
    head: Iterable[object],
    rows: Iterable[Iterable[object]],
    *,
    text_columns: int = 1,
    class_: str | None = None,
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
    whole = element("table", element("thead", row("th", head)), body, class_=class_)
    return element("div", whole, class_="scroll", tabindex="0")


def panel(title: str | None, *children: object, id: str | None = None) -> Html:
    """A framed part of a page."""
    return element("div", element("h3", title) if title else None, *children, id=id, class_="panel")


def columns(panels: Iterable[object]) -> Html:
    """Panels side by side where there is room."""
    return element("div", *panels, class_="columns")


def card(label: str, value: str, *details: str, tone: str = "") -> Html:
    """A figure at a glance; `tone` is a class of the style sheet."""
    look = "value long" if len(value) > _LONG else "value"
    return element(
        "div",
        element("dt", label),
        element("dd", value, class_=f"{look} {tone}".strip()),
        *(element("dd", detail, class_="detail") for detail in details if detail),
        class_="card",
    )


def cards(shown: Iterable[Html]) -> Html:
    """Cards side by side."""
    return element("dl", *shown, class_="cards")


def tags(named: Iterable[tuple[str, str]]) -> Html:
    """Labels in a colour: (text, `good`, `warning` or `bad`)."""
    return element(
        "p", *(element("span", text, class_=f"tag {tone}") for text, tone in named), class_="tags"
    )


def strip(parts: Iterable[tuple[str, float, str]]) -> Html:
    """A bar of parts side by side: (colour, share of the width, label), without empty parts."""
    shown = [part for part in parts if part[1] > 0]
    spans = (
        element("span", style=f"--colour: var(--{colour}); width: {100 * share:.2f}%", title=words)
        for colour, share, words in shown
    )
    label = "; ".join(words for _, _, words in shown)
    return element("div", *spans, class_="strip", role="img", aria_label=label)


def shares(
    parts: Iterable[tuple[str, float, str]], write: Callable[[float], str] | None = None
) -> Html:
    """A bar of the parts of a whole, each (colour, amount, label), and its legend; `write` puts
    amounts and shares into the legend."""
    there = [part for part in parts if part[1]]
    whole = added(amount for _, amount, _ in there)
    words = (
        (colour, f"{label}: {write(amount)}, {percent(amount / whole)}" if write else label)
        for colour, amount, label in there
    )
    bar = strip((colour, amount / whole, label) for colour, amount, label in there)
    return join((bar, key_of(words)))


def key_of(entries: Iterable[tuple[str, str]]) -> Html:
    """A legend: (colour, label). A colour is a name of the style sheet, or any background."""
    shown = []
    for colour, words in entries:
        paint = colour if "(" in colour else f"var(--{colour})"
        swatch = element("span", class_="swatch", style=f"--colour: {paint}")
        shown.append(element("span", swatch, words, class_="entry"))
    return element("div", *shown, class_="legend")


def facts(named: Mapping[str, Any]) -> Html:
    """Names and values; the unit is the end of the name, and None is left out."""
    pairs = (
        (element("dt", key), element("dd", written(key, value)))
        for key, value in named.items()
        if value is not None
    )
    return element("dl", *(part for pair in pairs for part in pair), class_="facts")


def written(key: str, value: Any) -> str:
    """A value in the unit that its key names."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if key.endswith("_bytes"):
            return f"{size(value)} ({count(value)} bytes)"
        if key.endswith("bytes_per_s"):
            return f"{size(value)}/s"
        if key.endswith("_ns"):
            return seconds(value / 1e9)
        # A seed is a name, to be copied as it is.
        return str(value) if key == "Seed" else f"{value:,.6g}"
    if isinstance(value, list):
        return ", ".join(str(inner) for inner in value)
    return str(value)


POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)

GLOSSARY = "docs/explanations/glossary.md"


def document(
    command: str,
    title: str,
    sections: Mapping[str, Html | None],
    *,
    subject: str | None = None,
    about: Iterable[Html] = (),
    remarks: Iterable[tuple[str, str]] = (),
) -> str:
    """The whole HTML file: a head with the verdict, then the sections, by title.

    `command`: what made the page. `about`: elements below the subject. `remarks`: the lines of the
    verdict, each with its tone: `plain`, `warning` or `bad`. Sections without content are left out.
    Equal inputs give equal bytes.
    """
    kept = {name: content for name, content in sections.items() if content}
    verdict = [element("li", text, class_=tone) for text, tone in remarks]
    head = (
        element("p", command, class_="eyebrow"),
        element("h1", title),
        element("p", subject, class_="subject") if subject else None,
        *about,
        element("ul", *verdict, class_="verdict") if verdict else None,
    )
    links = (element("a", name, href=f"#{_anchor(name)}") for name in kept)
    parts = (
        element("section", element("h2", name), content, id=_anchor(name))
        for name, content in kept.items()
    )
    body = (
        element("header", element("div", *head)),
        element("nav", element("div", *links)),
        element("main", *parts),
        element("footer", f"kvsim {__version__} · what words mean: {GLOSSARY}"),
    )
    meta = (
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=Html(POLICY)),
        Html('<link rel="icon" href="data:,">'),
        element("title", f"{title} · kvsim"),
        element("style", Html(text_of("page.css"))),
    )
    figures = [figure for part in body for figure in part.figures]
    opened = ("<!doctype html>\n", '<html lang="en">', element("head", *meta), "\n<body>")
    # At once, because each time that elements are joined copies the megabyte of the scripts.
    return "".join((*opened, *body, *_scripts(figures), "</body></html>\n"))


def placed(figures: Sequence[Figure], class_: str = "one") -> Html:
    """The places that the script draws figures into, `class_` in a row: `one`, `duo` or `trio`. A
    trio whose last row would have a gap is a duo. Without figures, nothing."""
    if not figures:
        return Html()
    if class_ == "trio" and len(figures) % 3:
        class_ = "duo"
    places = element("div", *map(_place, figures), class_=class_)
    places.figures = tuple(figures)
    return places


def embedded(data: object) -> Html:
    """JSON that cannot end the script element it is in."""
    return Html(_json(data).replace("<", "\\u003c"))


_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@cache
def text_of(name: str) -> str:
    """The text of a file in this folder."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def packed_plotly() -> str:
    """The gzipped bundle in base64. The page's script unpacks it with a `DecompressionStream`."""
    bundle = Path(__file__).with_name("plotly-cartesian.min.js.gz")
    return b64encode(bundle.read_bytes()).decode("ascii")


def _scripts(figures: Sequence[Figure]) -> Iterable[str]:
    """The figures and what draws them; a page without figures carries none of it."""
    if figures:
        drawn = f"[{','.join(map(_drawn, figures))}]".replace("<", "\\u003c")
        yield element("script", Html(drawn), type="application/json", id="figures")
        yield '<script type="application/gzip" id="plotly">'
        yield packed_plotly()
        yield "</script>"
        yield element("script", Html(text_of("page.js")))


def _drawn(figure: Figure) -> str:
    """What the script draws of a figure, as JSON."""
    traces = (
        ",".join(
            f"{_json(key)}:{_coordinates(value) if key in ('x', 'y') else _json(value)}"
            for key, value in trace.items()
        )
        for trace in figure.data
    )
    data = ",".join(f"{{{trace}}}" for trace in traces)
    named = f'"id":{_json(figure.id)},"time":{_json(figure.time)}'
    return f'{{{named},"data":[{data}],"layout":{_json(figure.layout)}}}'


def _coordinates(values: Sequence[Any]) -> str:
    """`_json` of coordinates, which msgspec does in a tenth of the time."""
    try:
        written = msgspec.json.encode(values).decode()
    except (TypeError, UnicodeEncodeError):  # Numbers of numpy, and names that are not UTF-8.
        return _json(values)
    # Python would write 0.00001 and 1e16 with other exponents, and escape letters.
    other = any(each in written for each in ("0.0000", "e", '"'))
    return _json(values) if other else written


def _place(figure: Figure) -> Html:
    """Heading, note, legend and an empty element."""
    entries = []
    for entry in figure.legend:
        colour = f"--colour: var(--{entry.colour})"
        swatch, traces = element("span", class_=f"swatch {entry.kind}", style=colour), entry.traces
        of = {"data_figure": figure.id, "data_traces": ",".join(map(str, traces))}
        entries.append(
            element("button", swatch, entry.label, type="button", **of, aria_pressed="true")
        )
    note = element("p", figure.note) if figure.note else None
    size = f"height: {figure.height}px"
    if figure.least_width:
        size += f"; min-width: {figure.least_width}px"
    label = ". ".join(filter(None, (figure.title, figure.note)))
    plot = element("div", id=figure.id, class_="plot", style=size, role="img", aria_label=label)
    save = element(
        "button", "Save", type="button", title="Save this chart as an SVG", data_figure=figure.id
    )
    return element(
        "figure",
        element("figcaption", element("h3", figure.title), save, note),
        element("div", *entries, class_="legend") if entries else None,
        element("div", plot, class_="scroll") if figure.least_width else plot,
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
