"""Traces for tests: files from lines, and random traces that say all a row can say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kvsim.workload import HashContent, ParentContent, Row, SegmentContent, TokenContent, Trace
from kvsim.workload.source import Source
from kvsim.workload.trace import Content, collapse

HASHED = {"kvsim_trace": 1, "block_size": 4, "hash_kind": "prefix", "partial_hash": True}


def jsonl(folder: Path, *rows: dict[str, Any] | str, name: str = "x.jsonl") -> str:
    """A file of one JSON object (or raw text) per line."""
    path = folder / name
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)


def read_with(reader: Any, path: str) -> Trace:
    """What one reader makes of a file."""
    with Source(path) as source:
        trace: Trace = reader(source)
    return trace


def without_lines(trace: Trace) -> list[Row]:
    """The rows, wherever they stood in the file."""
    return [replace(row, line=0) for row in trace.rows]


def make_trace(contents: list[tuple[int, int, Content | None]], **facts: Any) -> Trace:
    """A trace of rows (input_length, output_length, content), one a second."""
    rows = [
        Row(
            index=i,
            id=str(i),
            line=i + 2,
            arrival_ns=i * 1_000_000_000,
            input_length=input_length,
            output_length=output_length,
            content=content,
        )
        for i, (input_length, output_length, content) in enumerate(contents)
    ]
    return Trace(path="made", format="native", sha256="", rows=rows, **facts)


@st.composite
def traces(draw: st.DrawFn, forms: str = "uhstp", max_rows: int = 7) -> Trace:
    """Random traces of few tokens, in which much is shared.

    `forms`: which contents occur: unique, hash ids, segments, tokens, parents.
    """
    kind = draw(st.sampled_from(["prefix", "content"]))
    size = draw(st.integers(1, 6))
    partial = draw(st.booleans())
    tries: dict[str | None, dict[tuple[int, ...], int]] = {}
    rows: list[Row] = []
    for index in range(draw(st.integers(1, max_rows))):
        input_length, output_length = draw(st.integers(1, 24)), draw(st.integers(1, 12))
        scope = draw(st.sampled_from([None, "a"]))
        content: Content | None = None
        form = draw(st.sampled_from(forms))
        if form == "h":
            trie = tries.setdefault(scope, {}) if kind == "prefix" else None
            content = draw(_hash_contents(trie, size, partial, input_length, output_length))
        elif form == "s":
            content = draw(_segment_contents(input_length))
        elif form == "t":
            tokens = st.integers(0, 1)
            prompt = draw(st.lists(tokens, min_size=input_length, max_size=input_length))
            output = draw(st.lists(tokens, min_size=output_length, max_size=output_length))
            known = draw(st.booleans())
            content = TokenContent(tuple(prompt), tuple(output) if known else None)
        elif form == "p" and rows:
            parent = draw(st.sampled_from(rows))
            most = min(input_length, parent.input_length + parent.output_length)
            content = ParentContent(parent.index, draw(st.integers(0, most)))
        rows.append(
            Row(
                index=index,
                id=str(index),
                line=index + 2,
                arrival_ns=index,
                input_length=input_length,
                output_length=output_length,
                content=content,
                scope=scope,
                salt=draw(st.sampled_from([None, None, "s"])),
            )
        )
    return Trace(
        path="made",
        format="native",
        sha256="",
        rows=rows,
        block_size=size,
        hash_kind=kind,  # type: ignore[arg-type]
        partial_hash=partial,
    )


@st.composite
def _hash_contents(
    draw: st.DrawFn,
    trie: dict[tuple[int, ...], int] | None,
    size: int,
    partial: bool,
    input_length: int,
    output_length: int,
) -> HashContent:
    """Ids of a random path; `trie` makes an id stand for all before it, None for its block."""
    full, tail = divmod(input_length, size)
    has_partial = bool(partial and tail)
    most = 0 if has_partial else (input_length + output_length) // size - full
    number = full + has_partial + draw(st.integers(0, most))
    path: tuple[int, ...] = ()
    ids = []
    for block in range(number):
        step = draw(st.sampled_from([0, 0, 0, 1]))
        if trie is None:
            ids.append(block + 5 * step)
            continue
        is_partial = has_partial and block == full
        path = (*path, step + 10 * tail if is_partial else step)
        ids.append(trie.setdefault(path, len(trie)))
    prompt = full + has_partial
    return HashContent(collapse(ids[:prompt]), collapse(ids[prompt:]))


@st.composite
def _segment_contents(draw: st.DrawFn, input_length: int) -> SegmentContent:
    segments: list[tuple[str, int]] = []
    left = input_length
    while left and len(segments) < 3:
        name, length = draw(st.sampled_from("xy")), draw(st.integers(1, left))
        segments.append((name, length))
        left -= length
    return SegmentContent(tuple(segments))
