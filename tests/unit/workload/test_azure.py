"""Azure files: dates with seven decimals become exact nanoseconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsim.workload import open_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(folder: Path, *lines: str, end: str = "\r\n") -> str:
    path = folder / "x.csv"
    path.write_bytes("".join(line + end for line in (HEADER, *lines)).encode())
    return str(path)


def test_a_file_as_published(tmp_path: Path) -> None:
    path = write(tmp_path, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319601,3,8")
    trace = open_trace(path)
    first, second = trace.rows
    assert (trace.format, trace.origin) == ("azure", "2023-11-16T18:17:03.9799600")
    assert (first.arrival_ns, first.input_length, first.output_length) == (0, 4808, 10)
    assert (second.arrival_ns, second.line, second.id) == (52_000_100, 3, "1")
    assert first.content is None


@pytest.mark.parametrize(
    ("time", "later_ns"),
    [
        ("2024-05-10 00:00:01", 1_000_000_000),
        ("2024-05-10T00:00:00.000000001", 1),
        ("2024-05-10 00:00:00.5+00:00", 500_000_000),
        ("2024-05-10 02:00:00Z", 7_200_000_000_000),
        ("2024-05-10 02:00:00+02:00", 0),
        ("2024-05-11 00:00:00", 86_400_000_000_000),
    ],
)
def test_times_are_exact(tmp_path: Path, time: str, later_ns: int) -> None:
    path = write(tmp_path, "2024-05-10 00:00:00.000000+00:00,1,1", f"{time},1,1", end="\n")
    assert open_trace(path).rows[1].arrival_ns == later_ns
