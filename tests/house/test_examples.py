"""The examples run by the command that they give, and show what they say."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from marks import long
from places import ROOT

EXAMPLES = sorted((ROOT / "docs/examples").glob("*.py"))
SHOWN = {
    "s3_fifo": ("66.9 %", "33.3 ms", "112 ms"),
    "two_queues": ("66.7 %",),
    "fair_tenants": ("4.78 s",),
    "earliest_deadline": ("4.79 s", "11.6 s"),
    "predicted_shortest": ("441 ms", "41.7 s"),
    "shortest_first": ("51.9 ms", "89.6 s"),
    "largest_victim": ("232", "99,305", "9.64 s"),
    "slow_tail": ("17.1 ms",),
    "csv_times": ("32.0 ms",),
    "ssd_tier": ("4,560", "816"),
    "prompt_store": ("2,624",),
}
"""Figures that the docstring gives and the command prints."""


@long
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_shows_what_it_says(path: Path) -> None:
    about = ast.get_docstring(ast.parse(path.read_text())) or ""
    (command,) = re.findall(
        r"^ +PYTHONPATH=docs/examples kvsim ((?:.*\\\n)*.*)$", about, re.MULTILINE
    )
    paths = [str(path.parent), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-m", "kvsim", *shlex.split(command.replace("\\\n", " "))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    for figure in SHOWN[path.stem]:
        assert figure in about
        assert figure in " ".join(ran.stdout.split())
