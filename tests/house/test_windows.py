"""Every module can be imported, and a run be made, without what only Unix has."""

import subprocess
import sys
from pathlib import Path

from marks import long
from places import ROOT

PROGRAM = """
import importlib, os, pkgutil, signal, sys, types
import joblib, msgspec, numpy, pandas, prometheus_client, pyarrow.parquet, rich.progress, simpy
import starlette.applications, typer, uvicorn, xxhash, yaml, zmq

for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None  # an import of it fails
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "setitimer"):
    delattr(signal, name)
for name in ("fork", "geteuid", "getuid", "killpg", "sched_getaffinity", "sysconf"):
    delattr(os, name)
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, LK_UNLCK=0, locking=lambda *_: None)
sys.platform = "win32"

import kvsim
from kvsim.errors import ConfigError

refused = set()
for module in pkgutil.walk_packages(kvsim.__path__, "kvsim."):
    # The one runs the command line, the other only while kvsim is installed.
    if module.name not in ("kvsim.__main__", "kvsim.core.hook"):
        try:
            importlib.import_module(module.name)
        except ConfigError as error:
            refused.add(module.name)
            assert "Windows" in str(error)
assert refused == {"kvsim.against.bench"}, refused
kvsim.cli.main(sys.argv[1:])
"""


@long
def test_modules_are_imported_and_a_trace_runs(tmp_path: Path) -> None:
    """The libraries are imported first: only kvsim is to think that this is Windows."""
    run = ["run", "--trace", "chat", "--num-prompts", "5", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *run],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").exists()
