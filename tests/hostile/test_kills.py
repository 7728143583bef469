"""Commands that are stopped or killed: exit codes, nothing half-written, no processes left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from marks import long
from places import ROOT
from processes import alive, children, heed_signals

from kvsim.writing import temporary_folder, write_together

CHAT = str(ROOT / "traces" / "chat.jsonl")
SWEEP = ["sweep", "--trace", CHAT, "--num-prompts", "60", "--jobs", "2", "--out", "out"]
SWEEP += ["--grid", "seed=lin(1,400,400)", "--grid", "max_num_seqs=8"]


def start(arguments: list[str], cwd: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvsim", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )


def until(condition, within_s: float) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")


@needs_proc
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=long),
        pytest.param(signal.SIGHUP, 129, marks=long),
        pytest.param(signal.SIGKILL, -9, marks=long),
    ],
)
def test_a_sweep_that_is_stopped_leaves_no_process(number: int, code: int, tmp_path: Path) -> None:
    running = start(SWEEP, tmp_path)
    points = tmp_path / "out" / "points"
    assert until(lambda: len(list(points.glob("*.json"))) > 1, 120), running.poll()
    started = children(running.pid)
    assert len(started) >= 2
    running.send_signal(number)
    try:
        _, said = running.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        running.kill()
        running.communicate()
        raise
    assert running.returncode == code, said
    assert until(lambda: not any(map(alive, started)), 30), started
    assert not (tmp_path / "out" / "sweep.parquet").exists()
    if number != signal.SIGKILL:
        assert said.decode().strip().splitlines()[-1] == "kvsim: interrupted"
        assert b"Traceback" not in said
        assert not list(tmp_path.rglob(".kvsim-*"))


def test_a_temporary_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    code = "import os, sys\nfrom pathlib import Path\nfrom kvsim.writing import temporary_folder\n"
    code += "p = Path(sys.argv[1])\nwith temporary_folder(p, p): os.kill(os.getpid(), 9)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=False)
    [left] = tmp_path.glob(".kvsim-*")
    os.utime(left, (0, 0))
    with temporary_folder(tmp_path, tmp_path) as mine:
        os.utime(mine, (0, 0))
        with temporary_folder(tmp_path, tmp_path):
            assert mine.exists(), "a folder in use stays, however old"
        assert not left.exists()
    assert not list(tmp_path.iterdir())


def test_files_appear_together_or_not_at_all(tmp_path: Path) -> None:
    write_together(tmp_path, {"a": "old", "b": b"old"})
    with pytest.raises(TypeError):
        write_together(tmp_path, {"a": "new", "b": 3})  # type: ignore[dict-item]
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "old", "b": "old"}


def test_a_signal_waits_until_all_files_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_together(tmp_path, {"a": "1", "b": "2"})
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("busy_s", [0, 0.1])
def test_an_interrupt_that_python_drops_comes_again(busy_s: float) -> None:
    """Also on a machine so busy that the hook is still running when the interrupt comes again."""
    code = (
        "import signal, threading, time, weakref\n"
        "from kvsim import cli\n"
        "class Timer(threading.Timer):\n"
        f"    def start(self): super().start(); time.sleep({busy_s})\n"
        "threading.Timer = Timer\n"
        "cli.heed_signals()\n"
        "class Thing: pass\n"
        "thing = Thing()\n"
        "mark = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))\n"
        "try:\n"
        "    del thing\n"
        "    time.sleep(20)\n"
        "except KeyboardInterrupt:\n"
        "    raise SystemExit(cli.exit_code()) from None\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False, timeout=15
    )
    assert (result.returncode, result.stderr) == (143, b"")
