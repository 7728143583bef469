"""Puts a page together: one file that needs no other file and no network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from string import Template

from kvsim.report.figures import Figure
from kvsim.report.html import Html, element, join
from kvsim.report.plotly_js import packed_plotly
from kvsim.version import __version__


def document(
    title: str, header: Html, sections: Mapping[str, Html], figures: Iterable[Figure]
) -> str:
    """The whole HTML file; the sections, by title, hold a `figure_place` for each figure."""
    links = (element("a", name, href=f"#{_anchor(name)}") for name in sections)
    body = join(
        (
            element("header", element("div", header)),
            element("nav", element("div", *links)),
            element("main", *(_section(name, content) for name, content in sections.items())),
            element("footer", f"kvsim {__version__}"),
        )
    )
    drawn = [{"id": f.id, "time": f.time, "data": f.data, "layout": f.layout} for f in figures]
    here = resources.files(__package__)
    return Template(_text(here, "page.html")).substitute(
        title=element("title", f"{title} · kvsim"),
        style=_text(here, "page.css"),
        body=body,
        # `<` could otherwise end the script element that holds the data.
        figures=json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        plotly=packed_plotly(),
        script=_text(here, "page.js"),
    )


def masthead(
    command: str,
    title: str,
    *about: Html,
    subject: str | None = None,
    remarks: Iterable[tuple[str, str]] = (),
) -> Html:
    """The head of a page: the command that made it, its title, its subject, the verdict.

    `about`: elements below the subject. `remarks`: the lines of the verdict, each with its tone,
    `plain`, `warning` or `bad`.
    """
    verdict = [element("li", text, class_=tone) for text, tone in remarks]
    return join(
        (
            element("p", command, class_="eyebrow"),
            element("h1", title),
            element("p", subject, class_="subject") if subject else None,
            *about,
            element("ul", *verdict, class_="verdict") if verdict else None,
        )
    )


def figure_place(figure: Figure) -> Html:
    """Heading, note, legend and an empty element that the script draws into."""
    entries = [
        element(
            "button",
            element("span", class_=f"swatch {entry.kind}", style=f"--colour: {entry.colour}"),
            entry.label,
            type="button",
            data_figure=figure.id,
            data_traces=",".join(map(str, entry.traces)),
            aria_pressed="true",
        )
        for entry in figure.legend
    ]
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", figure.title),
            element("p", figure.note) if figure.note else None,
        ),
        element("div", *entries, class_="legend") if entries else None,
        element("div", id=figure.id, class_="plot", style=f"height: {figure.height}px"),
    )


def _section(title: str, content: Html) -> Html:
    return element("section", element("h2", title), content, id=_anchor(title))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _text(folder: Traversable, name: str) -> str:
    return folder.joinpath(name).read_text(encoding="utf-8")
