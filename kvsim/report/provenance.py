"""Shows where a run came from and how to repeat it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvsim.report.html import Html, element, join, panel
from kvsim.report.numerals import MISSING, count, size
from kvsim.report.wording import time_source


def provenance_panels(meta: Mapping[str, Any]) -> Html:
    """Command, trace, versions, time source and the full configuration."""
    trace = meta.get("trace") or {}
    origin = {
        "Trace": trace.get("path"),
        "Trace format": trace.get("format"),
        "Trace SHA-256": trace.get("sha256"),
        "Requests in the trace": trace.get("requests"),
        "Seed": meta.get("seed"),
        "kvsim": meta.get("kvsim_version"),
        "Engine": meta.get("engine"),
        "Scheduler": meta.get("scheduler"),
        "Block manager": meta.get("block_manager"),
        "Step times": time_source(meta),
        "Oracles": ", ".join(meta.get("oracles") or ()) or None,
    }
    return join(
        (
            panel("To repeat it", element("pre", meta.get("command") or MISSING)),
            element(
                "div",
                panel(
                    "Origin",
                    facts(origin),
                    _notes("Notes of the trace reader", trace),
                    _notes("Notes", meta),
                ),
                assumed_panel(meta.get("assumed") or {}),
                server_panel(meta.get("server") or {}, meta.get("config") or {}),
                panel("Configuration", element("pre", to_toml(meta.get("config") or {}))),
                panel("Cost model", facts(flat(meta.get("cost") or {}))),
                panel("Link between GPU and CPU", facts(flat(meta.get("link") or {}))),
                class_="columns",
            ),
        )
    )


def assumed_panel(assumed: Mapping[str, Any]) -> Html:
    """Settings that nobody gave: value, and who chose it."""
    rows = {key: f"{each['value']} ({each['source']})" for key, each in assumed.items()}
    return panel("Assumed settings", facts(rows)) if rows else join(())


def server_panel(server: Mapping[str, str], config: Mapping[str, Any]) -> Html:
    """Settings that a real server stated: value, and the place in its log or command line."""
    rows = {key: f"{config.get(key)} ({place})" for key, place in server.items()}
    return panel("From the server", facts(rows)) if rows else join(())


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """The text of a configuration file; keys without a value stand for defaults and are left out.

    An infinite number, which a summary keeps as the text `inf`, becomes a number again.
    """
    lines = [f"[{name}]"] if name else []
    inner = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner.append(to_toml(value, f"{name}.{key}" if name else key) if value else "")
        elif value is not None:
            lines.append(f"{key} = {_literal(value)}")
    return "\n\n".join(part for part in ("\n".join(lines), *inner) if part)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_literal(inner) for inner in value)}]"
    if value in ("inf", "-inf"):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def facts(named: Mapping[str, Any]) -> Html:
    """Names and values; the unit is the end of the name, and None is left out."""
    pairs = (
        (element("dt", key), element("dd", _written(key, value)))
        for key, value in named.items()
        if value is not None
    )
    return element("dl", *(part for pair in pairs for part in pair), class_="facts")


def _written(key: str, value: Any) -> str:
    """A value in the unit that its key names."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if key.endswith("_bytes"):
            return f"{size(value)} ({count(value)} bytes)"
        if key.endswith("bytes_per_s"):
            return f"{size(value)}/s"
        return str(value) if key == "Seed" else f"{value:,.6g}"
    if isinstance(value, list):
        return ", ".join(str(inner) for inner in value)
    return str(value)


def _notes(title: str, table: Mapping[str, Any]) -> Html | None:
    """The `notes` of a table as a list under a title; none if there are none."""
    notes = [str(note) for note in table.get("notes") or ()]
    if not notes:
        return None
    return join((element("h3", title), element("ul", *(element("li", note) for note in notes))))
