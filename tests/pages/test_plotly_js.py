"""plotly.js inside the pages: whole, licensed, packed the same each time, and small."""

import ast
import gzip
import hashlib
from base64 import b64decode
from pathlib import Path

import pytest

import kvsim
from kvsim.report.pages.html import packed_plotly
from kvsim.report.pages.run import build_page

PACKAGE = Path(kvsim.__file__).parent
TRACES = PACKAGE.parent / "traces"
SHA256 = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
"""Of `plotly-cartesian.min.js` in npm's plotly.js-cartesian-dist-min 4.1.1."""
MOST_BYTES = 1_700_000
CHARTS = {"bar", "box", "contour", "heatmap", "histogram", "image", "pie", "scatter", "violin"}
AXES_AND_SHAPES = {"category", "data", "date", "line", "linear", "log", "path", "rect"}


def test_it_is_the_file_that_npm_has() -> None:
    script = gzip.decompress(b64decode(packed_plotly()))
    assert hashlib.sha256(script).hexdigest() == SHA256
    assert b"plotly.js (cartesian - minified) v4.1.1" in script[:200]
    for chart in CHARTS:
        assert f'name:"{chart}"'.encode() in script


def test_its_licence_is_beside_it() -> None:
    text = (PACKAGE / "report" / "pages" / "plotly.LICENSE").read_text()
    assert "MIT License" in text and "Permission is hereby granted" in text


def test_pages_draw_no_chart_that_it_lacks() -> None:
    found = set()
    for path in (PACKAGE / "report" / "pages").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                table = {
                    key.value: value.value
                    for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
                }
                found |= {table["type"]} if isinstance(table.get("type"), str) else set()
    assert {"bar", "scatter"} <= found <= CHARTS | AXES_AND_SHAPES


@pytest.mark.parametrize("trace", ["agents", "api", "chat"])
def test_the_report_of_a_shipped_trace_is_small(trace: str) -> None:
    result = kvsim.simulate(str(TRACES / f"{trace}.jsonl"), {"num_gpu_blocks_override": 4000})
    page = build_page(result.summary, result.requests, result.steps)
    assert len(page.encode()) <= MOST_BYTES
