"""What an install compiles, and what it does where it cannot: pip builds kvsim as a user has it."""

import os
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from shutil import copy

import pytest
from marks import whole
from places import ROOT

from kvsim.core.compiled import FOLDER, VARIABLE

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.implementation.name != "cpython", reason="mypyc is for CPython"),
]

TABLE = tomllib.loads((ROOT / "pyproject.toml").read_text())

PROJECT = f"""
[build-system]
requires = {TABLE["build-system"]["requires"]}
build-backend = "hatchling.build"
[project]
name = "kvsim"
version = "1"
[tool.hatch.build]
dev-mode-dirs = ["."]
[tool.hatch.build.targets.wheel.hooks.custom]
path = "kvsim/core/hook.py"
modules = ["kvsim/core/squares.py"]
"""
SOURCE = """
from librt.vecs import append, vec
from mypy_extensions import i64

STEP: i64 = 1

def squares(count: i64) -> vec[i64]:
    found = vec[i64]()
    number: i64
    for number in range(count):
        found = append(found, number * number * STEP)
    return found
"""
ASK = """
from kvsim.core import compiled
from kvsim.core import squares
print(compiled.explanation(), squares.__file__, list(squares.squares(5)), sep="\\n")
"""
RESULT = "[0, 1, 4, 9, 16]"
STEPS_OF_20 = SOURCE.replace("= 1\n", "= 20\n")
"""Of another size: an edit within the second of the install is seen by that alone."""
RESULT_OF_20 = "[0, 20, 80, 180, 320]"
ALONE = f"import sys; sys.modules[{FOLDER!r}] = None\n"
"""What is compiled for the checkout, too, is installed beside the Python that runs the tests."""
EDITED = (
    "interpreted: kvsim/core/squares.py is not what was compiled; `pip install -e .` compiles it"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The source of a small kvsim with the real build hook and finder."""
    folder = tmp_path / "project"
    (folder / "kvsim/core").mkdir(parents=True)
    for name in ("kvsim/core/hook.py", "kvsim/core/compiled.py", "kvsim/core/vecs.py"):
        copy(ROOT / name, folder / name)
    (folder / "kvsim/core/__init__.py").touch()
    (folder / "kvsim/core/squares.py").write_text(SOURCE)
    (folder / "kvsim/__init__.py").write_text((ROOT / "kvsim/__init__.py").read_text())
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


def install(*what: str, packages: Path, **environment: str) -> str:
    """Installs into a folder; what pip said."""
    command = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--target", str(packages)]
    done = subprocess.run(
        [*command, *what],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def ask(*path: Path, **environment: str) -> tuple[str, str, str]:
    """Which way the core runs there, the file of its module, and what that returns."""
    alone = "" if any((each / FOLDER).exists() for each in path) else ALONE
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        VARIABLE: "",
        **environment,
    }
    command = [sys.executable, "-c", alone + ASK]
    answer = subprocess.run(
        command, cwd=path[0], env=environment, capture_output=True, text=True, check=True
    )
    way, file, result = answer.stdout.splitlines()
    return way, Path(file).name, result


@whole
def test_a_checkout_is_compiled_and_follows_its_sources(project: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    before = sorted(project.rglob("*"))
    install("-e", str(project), packages=packages)
    assert sorted(project.rglob("*")) == before
    compiled = ("compiled", f"squares{EXTENSION_SUFFIXES[0]}", RESULT)
    assert ask(project, packages) == compiled
    way = f"interpreted: {VARIABLE} is set"
    assert ask(project, packages, **{VARIABLE: "1"}) == (way, "squares.py", RESULT)
    (project / "kvsim/core/squares.py").write_text(STEPS_OF_20)
    assert ask(project, packages) == (EDITED, "squares.py", RESULT_OF_20)


def test_kvsim_runs_where_nothing_compiles(tmp_path: Path) -> None:
    said = install(str(ROOT), packages=tmp_path, CC="/bin/false")
    assert "kvsim will be interpreted, not compiled" in said
    assert not (tmp_path / FOLDER).exists()
    code = f"{ALONE}import kvsim; print(kvsim.simulate('chat').meta['core'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "interpreted\n"
