"""Files that other programs open: spreadsheets, load generators, shells."""

import csv
import json
from pathlib import Path

import pytest
from hostile.damage import outcome

FORMULAS = ["=cmd|'/c calc'!A1", "+1", "-1+2", "@SUM(A1)", "\t=1"]


@pytest.mark.parametrize("name", [*FORMULAS, "a=1", "1"])
def test_cells_are_no_formulas(name: str, tmp_path: Path) -> None:
    row = {"id": name, "session": name, "arrival_s": 0, "input_length": 5, "output_length": 2}
    trace = tmp_path / "t.jsonl"
    trace.write_text(f'{{"kvsim_trace":1}}\n{json.dumps(row)}\n')
    out = ["--out", str(tmp_path / "r"), "--csv", "--no-report"]
    assert outcome(["run", "--trace", str(trace), *out])[0] == 0
    with (tmp_path / "r" / "requests.csv").open(newline="") as file:
        [cells] = csv.DictReader(file)
    expected = f"'{name}" if name in FORMULAS else name
    assert (cells["id"], cells["session"]) == (expected, expected)
    assert cells["finish_s"][0] != "'"
