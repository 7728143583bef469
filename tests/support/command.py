"""The command line in this process: what a user sees, without the start of another Python."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest

from kvsim.cli import main


def run_here(
    arguments: Sequence[str], cwd: Path | str = ".", *, columns: int = 160
) -> CompletedProcess[str]:
    """Run a command in a folder, in a terminal of so many columns.

    Give `--jobs 1` or absolute paths: worker processes outlive the command, in its folder.
    """
    with (
        contextlib.chdir(cwd),
        patch.dict(os.environ, COLUMNS=str(columns)),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as said,
        pytest.raises(SystemExit) as stop,
    ):
        main(arguments)
    code = int(stop.value.code or 0)
    return CompletedProcess(list(arguments), code, printed.getvalue(), said.getvalue())
