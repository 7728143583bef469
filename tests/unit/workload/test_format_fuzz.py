"""Damaged files of any format are refused in one line, and nothing else ever comes out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign import SAMPLES
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from marks import examples

from kvsim.errors import TraceError
from kvsim.workload import READERS, open_trace

STRANGE = (
    *("", "-1", "0", "-0.5", "9" * 30, "1e400", "1e9999999", "NaN", "null", "true", "[]", "{}"),
    *('"', '"x"', ",", "]", "}", "\\", "ü", "\ud83d", "\x00", "\n", "\r\n", "[" * 2000),
    "2024-13-01 00:00:00",
)
FEW = settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, str]:
    """A format, and its sample with a few stretches replaced by something strange."""
    format = draw(st.sampled_from(sorted(SAMPLES)))
    text = SAMPLES[format]
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        length = draw(st.sampled_from([0, 1, 2, 5, 40]))
        text = text[:start] + draw(st.sampled_from(STRANGE)) + text[start + length :]
    return format, text


WRONG = ([], {}, None, "x", True, -1, 10**30, [[]], [{}], [None])


def with_one_value_wrong(value: Any) -> Iterator[Any]:
    """The value itself, and each that it holds at any depth, replaced by each of `WRONG`."""
    yield from WRONG
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            for wrong in with_one_value_wrong(inner):
                changed = value.copy()
                changed[key] = wrong
                yield changed


def refused_in_one_line(path: Path, format: str | None) -> None:
    """The file loads, or raises a `TraceError` of one line that names it."""
    try:
        trace = open_trace(str(path), format)
    except TraceError as error:
        assert str(error).startswith(str(path))
        assert "\n" not in str(error)
        assert "; " in str(error)
        return
    assert trace.rows
    times = [row.arrival_ns for row in trace.rows if row.arrival_ns is not None]
    assert times == sorted(times)
    for number, row in enumerate(trace.rows):
        assert row.index == number
        assert row.after < number
        assert row.input_length >= 1 and row.output_length >= 1


@FEW
@given(case=damaged(), forced=st.booleans())
@example(case=("custom", '{"prompt": "\\ud83d", "output_tokens": 1}'), forced=True)
@example(case=("weka", '{"requests": []}{'), forced=True)
@example(case=("sharegpt", "["), forced=True)
@example(case=("sharegpt", '[{"conversations": []}, ]'), forced=True)
@example(case=("sharegpt", '[{"conversations": []}] x'), forced=True)
@example(case=("guidellm", "{}"), forced=True)
@example(case=("table", "input,output,arrival_s\n1,2,1e9999999\n"), forced=True)
@example(case=("table", "id,arrival_ms,,1000,12,3\n"), forced=True)
@example(case=("table", "id,input,output,arrival\n1,2,3\n"), forced=True)
def test_a_damaged_file_loads_or_is_refused(
    tmp_path: Path, case: tuple[str, str], forced: bool
) -> None:
    format, text = case
    path = tmp_path / "data"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    refused_in_one_line(path, format if forced else None)


@FEW
@given(
    format=st.sampled_from(sorted(SAMPLES)), where=st.integers(0, 10**6), byte=st.integers(0, 255)
)
def test_a_file_with_a_wrong_byte_loads_or_is_refused(
    tmp_path: Path, format: str, where: int, byte: int
) -> None:
    path = tmp_path / "data"
    stored = bytearray(gzip.compress(SAMPLES[format].encode()))
    stored[where % len(stored)] = byte
    path.write_bytes(stored)
    refused_in_one_line(path, None)


@pytest.mark.parametrize("format", READERS)
@pytest.mark.parametrize("other", SAMPLES)
def test_a_file_of_another_format_is_refused(format: str, other: str, tmp_path: Path) -> None:
    """Forced into a format that it does not have, a file is refused in one line or reads well."""
    path = tmp_path / "data"
    path.write_text(SAMPLES[other], newline="")
    refused_in_one_line(path, format)


@pytest.mark.parametrize(
    "format", [name for name, text in SAMPLES.items() if text.startswith(("{", "["))]
)
def test_a_value_of_another_kind_is_refused_or_reads_well(format: str, tmp_path: Path) -> None:
    path, text = tmp_path / "data", SAMPLES[format]
    lines = text.splitlines() if text.startswith("{") and "}\n{" in text else [text]
    for number, line in enumerate(lines):
        for changed in with_one_value_wrong(json.loads(line)):
            path.write_text("\n".join([*lines[:number], json.dumps(changed), *lines[number + 1 :]]))
            refused_in_one_line(path, format)
