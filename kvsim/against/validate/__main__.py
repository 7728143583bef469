"""Measures a setup: `python -m kvsim.against.validate SETUP.json --profile PROFILE.json --out
FILE`.

It is meant for machines that have torch but not the rest of kvsim's libraries; `kvsim validate`
calls it as well. Each policy is on disk as soon as it has been measured. Exit codes: 0 done, 2 bad
input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvsim.against.validate import setup
from kvsim.against.validate.measure import measure
from kvsim.against.validate.setup import read_json, require, write_json
from kvsim.errors import KvsimError


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; exits."""
    options = _parser().parse_args(arguments)
    try:
        if options.device == "cpu":
            _restart_with_settings()
        made = read_json(options.setup, setup.SCHEMA)
        require(made, ("trace", "model", "policies"), options.setup)
        setup.refuse_foreign(made, options.trust, options.setup)
        profile = read_json(options.profile, "kvsim.profile/1")
        for recording in measure(made, profile, options.device, _tell):
            write_json(options.out, recording)
    except (KvsimError, ValueError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _say("kvsim: interrupted")
        sys.exit(130)


def _restart_with_settings() -> None:
    """Restart with the allocator settings of a calibration, which take effect at start-up."""
    from kvsim_kernels.provenance import ALLOCATOR

    settings = {**ALLOCATOR, "OMP_NUM_THREADS": "1"}
    if any(os.environ.get(key) != value for key, value in settings.items()):
        paths = [*map(str, map(Path.resolve, map(Path, filter(None, sys.path))))]
        settings["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-m", "kvsim.against.validate", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **settings})


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m kvsim.against.validate", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("setup", metavar="SETUP.json", help="What `kvsim validate --prepare` wrote.")
    add("--profile", required=True, metavar="FILE", help="Names the model, its blocks and graphs.")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--out", required=True, metavar="FILE", help="The recording.")
    add("--trust", action="append", default=[], metavar="NAME", help="Code that it may run.")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(message)


def _tell(text: str) -> None:
    if sys.stderr.isatty() and not os.environ.get("KVSIM_QUIET"):
        _say(text)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _fail(line: str) -> NoReturn:
    _say("kvsim: " + " ".join(line.split()))
    sys.exit(2)


if __name__ == "__main__":
    main()
