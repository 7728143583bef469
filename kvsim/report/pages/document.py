"""Puts a page together: one file that needs no other file and no network.

`plotly-cartesian.min.js.gz` is npm's `plotly.js-cartesian-dist-min`, compressed. It has bars,
lines, heat maps, histograms, boxes, contours, pies and images. To take another version, in this
folder:

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
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources

from kvsim.report.pages.figures import Figure
from kvsim.report.pages.html import Html, element, join
from kvsim.version import __version__

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
    body = join(
        (
            element("header", element("div", *head)),
            element("nav", element("div", *links)),
            element("main", *parts),
            element("footer", f"kvsim {__version__} · what words mean: {GLOSSARY}"),
        )
    )
    meta = (
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=Html(POLICY)),
        Html('<link rel="icon" href="data:,">'),
        element("title", f"{title} · kvsim"),
        element("style", Html(text_of("page.css"))),
    )
    body = element("body", body, *_scripts(body.figures))
    whole = element("html", element("head", *meta), "\n", body, lang="en")
    return f"<!doctype html>\n{whole}\n"


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
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Html(text.replace("<", "\\u003c"))


@cache
def text_of(name: str) -> str:
    """The text of a file in this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def packed_plotly() -> str:
    """The gzipped bundle in base64. The page's script unpacks it with a `DecompressionStream`."""
    bundle = resources.files(__package__).joinpath("plotly-cartesian.min.js.gz")
    return b64encode(bundle.read_bytes()).decode("ascii")


def _scripts(figures: Sequence[Figure]) -> Iterable[Html]:
    """The figures and what draws them; a page without figures carries none of it."""
    if figures:
        drawn = [{"id": f.id, "time": f.time, "data": f.data, "layout": f.layout} for f in figures]
        yield element("script", embedded(drawn), type="application/json", id="figures")
        yield element("script", Html(packed_plotly()), type="application/gzip", id="plotly")
        yield element("script", Html(text_of("page.js")))


def _place(figure: Figure) -> Html:
    """Heading, note, legend and an empty element."""
    entries = [
        element(
            "button",
            element(
                "span", class_=f"swatch {entry.kind}", style=f"--colour: var(--{entry.colour})"
            ),
            entry.label,
            type="button",
            data_figure=figure.id,
            data_traces=",".join(map(str, entry.traces)),
            aria_pressed="true",
        )
        for entry in figure.legend
    ]
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
