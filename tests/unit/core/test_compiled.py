"""Which way the core runs, and vectors where librt has none."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import source_hash
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from command import run_here
from hypothesis import given
from hypothesis import strategies as st
from mypy_extensions import i64
from places import ROOT

from kvsim.core import compiled, vecs
from kvsim.core.compiled import FOLDER, SOURCES, VARIABLE

MODULE, SOURCE = "kvsim.against.bench", "kvsim/against/bench.py"
"""Nothing imports it here."""

ASK = f"""
from importlib.util import find_spec
from kvsim.core import compiled
from librt import vecs
print(compiled.explanation(), find_spec({MODULE!r}).origin, vecs.__file__, sep="\\n")
"""


def installed(folder: Path, source: bytes) -> Path:
    """A folder of packages as if `source` had been compiled."""
    (folder / FOLDER).mkdir()
    (folder / FOLDER / SOURCES).write_text(f"{source_hash(source).hex()} {MODULE}\n")
    return folder


def ask(packages: Path, **environment: str) -> list[str]:
    """Which way the core runs, from where the module is taken, and from where vectors."""
    path = os.pathsep.join([str(packages), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, VARIABLE: "", **environment}
    answer = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True
    )
    return answer.stdout.splitlines()


def test_compiled_modules_come_first(tmp_path: Path) -> None:
    way, origin, _ = ask(installed(tmp_path, (ROOT / SOURCE).read_bytes()))
    assert way == "compiled"
    assert origin == f"{tmp_path}/{FOLDER}/kvsim/against/bench{EXTENSION_SUFFIXES[0]}"


@pytest.mark.parametrize(
    ("source", "switch", "reason"),
    [
        (b"edited", "", f"{SOURCE} is not what was compiled; `pip install -e .` compiles it"),
        ((ROOT / SOURCE).read_bytes(), "1", f"{VARIABLE} is set"),
    ],
)
def test_sources_run_after_an_edit_and_at_will(
    tmp_path: Path, source: bytes, switch: str, reason: str
) -> None:
    way, origin, _ = ask(installed(tmp_path, source), **{VARIABLE: switch})
    assert (way, origin) == (f"interpreted: {reason}", str(ROOT / SOURCE))


def test_sources_run_where_nothing_is_compiled(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    way, origin, _ = ask(tmp_path)
    assert (way, origin) == ("interpreted: nothing compiled is installed", str(ROOT / SOURCE))


def test_arrays_serve_where_librt_has_no_vectors(tmp_path: Path) -> None:
    (tmp_path / "librt").mkdir()
    (tmp_path / "librt/__init__.py").touch()
    installed(tmp_path, (ROOT / SOURCE).read_bytes())
    way, origin, vectors = ask(tmp_path)
    assert (way, origin) == ("interpreted: there is no librt.vecs", str(ROOT / SOURCE))
    assert vectors == vecs.__file__


NUMBERS = st.integers(-4, 4) | st.sampled_from([1 << 63, -(1 << 63), "x", 1.5])
INDEXES = st.none() | st.integers(-5, 5)


def insert(module: ModuleType, v: Any, i: int, number: object) -> Any:
    v[i] = number
    return v


STEPS: dict[str, tuple[Callable[..., Any], st.SearchStrategy[Any]]] = {
    "append": (lambda module, v, x: module.append(v, x), st.tuples(NUMBERS)),
    "extend": (lambda module, v, xs: module.extend(v, xs), st.tuples(st.lists(NUMBERS))),
    "twice": (lambda module, v: module.extend(v, v), st.tuples()),
    "remove": (lambda module, v, x: module.remove(v, x), st.tuples(st.integers(-4, 4))),
    "pop": (lambda module, v, i: module.pop(v, i)[0], st.tuples(st.integers(-3, 3))),
    "last": (lambda module, v: module.pop(v)[0], st.tuples()),
    "set": (insert, st.tuples(st.integers(-6, 6), NUMBERS)),
    "slice": (
        lambda module, v, *ends: v[slice(*ends)],
        st.tuples(INDEXES, INDEXES, st.sampled_from([None, 1, 2, -1])),
    ),
    "new": (lambda module, v, xs: module.vec[i64](xs, capacity=3), st.tuples(st.lists(NUMBERS))),
}


@st.composite
def steps_of_vectors(draw: st.DrawFn) -> list[tuple[str, tuple[Any, ...]]]:
    names = draw(st.lists(st.sampled_from(sorted(STEPS))))
    return [(name, draw(STEPS[name][1])) for name in names]


@given(steps_of_vectors())
def test_arrays_do_what_vectors_of_librt_do(steps: list[tuple[str, tuple[Any, ...]]]) -> None:
    librt = pytest.importorskip("librt.vecs")
    empties = {module: module.vec[i64]() for module in (librt, vecs)}
    held = dict(empties)
    for name, arguments in steps:
        failed = []
        for module, v in held.items():
            try:
                held[module] = STEPS[name][0](module, v, *arguments)
                failed.append(False)
            except (IndexError, OverflowError, TypeError, ValueError):
                failed.append(True)
        assert failed[0] == failed[1], name
        theirs, ours = held.values()
        assert list(theirs) == list(ours) and len(theirs) == len(ours)
        assert (np.frombuffer(theirs, np.int64) == np.frombuffer(ours, np.int64)).all()
        assert all((k in theirs) == (k in ours) for k in range(-4, 5))
    assert not any(len(empty) for empty in empties.values())


def test_vectors_of_anything_else_take_librt() -> None:
    assert list(vecs.vec[float]([1])) == [1.0]
    with pytest.raises(TypeError, match=r"vectors of str take librt\.vecs"):
        vecs.vec[str]


def test_the_version_and_every_summary_say_which_way_the_core_ran(tmp_path: Path) -> None:
    assert f"({compiled.explanation()})" in run_here(["--version"]).stdout
    trace = ["--trace", "chat", "--num-prompts", "5", "--out", "run"]
    for more, file in ((), "summary.json"), (("--replicas", "2"), "fleet.json"):
        run_here(["run", *trace, *more], tmp_path)
        meta = json.loads((tmp_path / "run" / file).read_text())["meta"]
        assert meta["core"] == compiled.way()
