"""Commands that are killed at any moment: what they leave is whole, and nobody stays behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from places import ROOT
from processes import alive, children, heed_signals

_PATIENCE_S = 60.0
"""Wall clock, on a machine that does other things, too."""
_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}
_SHORT = ("--trace", "chat", "--num-prompts")
_SWEEP = ("--grid", "max_num_seqs=4,8,16", "--slo", "p99_ttft<2s")
_COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", *_SHORT, "50", "--out", "out", "--csv"),
    "block map": ("run", *_SHORT, "20", "--out", "out", "--block-map"),
    "compare": ("compare", "naive", "prefix-caching", *_SHORT, "30", "--out", "out"),
    "sweep": ("sweep", *_SHORT, "10", *_SWEEP, "--jobs", "1", "--out", "out"),
    "workers": ("sweep", *_SHORT, "10", *_SWEEP, "--jobs", "2", "--out", "out"),
    "fleet": ("run", *_SHORT, "30", "--replicas", "3", "--out", "out", "--csv"),
    "curve": ("cache", "curve", "chat", "--block-size", "64", "--out", "out/curve.html"),
    "synth": ("trace", "synth", "chat", "--requests", "500", "--out", "out/made.jsonl.gz"),
}
"""The name of each says what is special about it."""
_CONTINUED = ("sweep", "workers")
"""Commands that go on where they were stopped."""
_FINAL = ("*.json", "*.parquet", "*.html", "*.csv", "*.gz")


def check_kill(seed: int, limit_s: float = 0.0) -> str:
    """A command that gets a signal at a moment drawn from a seed; returns command and exit code.

    It ends soon and by that signal, without a traceback or a process of its own left, and each
    file is that of a command which nobody stops. The same command, asked again (always where it
    would go on, else sometimes), comes to the same files.
    """
    rng = random.Random(f"kills {seed}")
    name = rng.choice(sorted(_COMMANDS))
    whole, took_s = _whole(name)
    number = rng.choice(list(_CODES))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "out").mkdir()
        running = _start(name, place)
        time.sleep(rng.random() * took_s)
        # Before Python has set its handlers, every signal ends a process without a word.
        early = not _heeds(running.pid, number)
        others = children(running.pid)
        running.send_signal(number)
        _, said = running.communicate(timeout=_PATIENCE_S)
        code = running.returncode
        where = f"{name}, {signal.Signals(number).name}: exit code {code}: {said[-500:]!r}"
        # All was written, and Python was ending.
        over = code == -number and _files(place / "out").keys() == _files(whole / "out").keys()
        # Python shows a traceback of its own if Ctrl-C comes before the first line of kvsim.
        pythons = number == signal.SIGINT and b"KeyboardInterrupt" in said and b"kvsim" not in said
        early = early or pythons
        assert over or pythons or code in (0, _CODES[number], -number if early else 0), where
        assert pythons or b"Traceback" not in said, where
        end = time.monotonic() + _PATIENCE_S
        while any(map(alive, others)):
            assert time.monotonic() < end, f"{where}: processes left: {others}"
            time.sleep(0.05)
        if number != signal.SIGKILL and not early:
            assert not list(place.rglob(".kvsim-*")), where
        _assert_whole(place / "out", whole / "out", where)
        if name not in _CONTINUED and rng.random() < 0.7:
            return f"{name}: {code}"
        again = _start(name, place)
        _, said = again.communicate(timeout=10 * _PATIENCE_S)
        assert again.returncode == 0, f"{where}; then {said[-500:]!r}"
        found, meant = _files(place / "out"), _files(whole / "out")
        assert found == meant, f"{where}: another result: {sorted(found.keys() ^ meant.keys())}"
    return f"{name}: {code}"


def _assert_whole(found: Path, meant: Path, where: str) -> None:
    """Every file that is there is whole."""
    whole = _files(meant)
    for name, content in _files(found).items():
        assert whole.get(name) == content, f"{where}: {name} is another file"


def _files(folder: Path) -> dict[str, bytes]:
    """Name -> content of the results below a folder, but for what a killed process left behind."""
    found = sorted(path for form in _FINAL for path in folder.rglob(form) if not _is_left(path))
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def _is_left(path: Path) -> bool:
    return any(part.startswith(".kvsim-") for part in path.parts)


@cache
def _whole(name: str) -> tuple[Path, float]:
    """What the command writes if nobody stops it, and how long it takes."""
    import atexit

    place = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    (place / "out").mkdir()
    start = time.monotonic()
    running = _start(name, place)
    _, said = running.communicate(timeout=10 * _PATIENCE_S)
    assert running.returncode == 0, said
    return place, time.monotonic() - start


def _start(name: str, place: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvsim", *_COMMANDS[name]],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )


def _heeds(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal, according to the kernel."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")), 0)
    return bool(caught >> (number - 1) & 1)
