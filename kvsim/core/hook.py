"""Compiles modules with mypyc while hatchling makes a wheel; `kvsim.core.compiled` finds them.

Which ones stands in pyproject.toml (`modules`). Where there is no compiler, or whatever it lacks,
the wheel is made of sources alone: what runs is the same, only slower.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, redirect_stdout
from importlib.util import source_hash
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "kvsim_compiled"

CHECKED = (
    *["--config-file=", f"--cache-dir={os.devnull}"],
    *["--follow-imports=silent", "--ignore-missing-imports", "--no-site-packages"],
)
"""Only what is compiled is checked, and no library is looked at: the types of one that is installed
would change what is made."""

NOTHING = """#include <Python.h>
PyMODINIT_FUNC PyInit_nothing(void) { return NULL; }
"""
"""Is compiled first: what is missing is known before mypyc has worked for a minute."""


class Compile(BuildHookInterface):  # type: ignore[misc,type-arg,unused-ignore]
    """Adds compiled modules to a wheel, or to what an editable install puts beside the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and says which files to add, or in a warning why there are none."""
        with chdir(self.root):
            patterns = self.config.get("modules", [])
            sources = sorted({path.as_posix() for each in patterns for path in Path().glob(each)})
            sources = [path for path in sources if not path.endswith("/__init__.py")]
            if not sources:
                return
            self.made = TemporaryDirectory()  # Goes when the wheel is there.
            try:
                with redirect_stdout(sys.stderr):
                    files = dict(_compiled(sources, Path(self.made.name)))
            except (Exception, SystemExit) as error:
                self.app.display_warning(f"kvsim will be interpreted, not compiled: {error}")
                return
        key = "force_include_editable" if version == "editable" else "force_include"
        build_data[key].update(files)
        build_data.update(pure_python=False, infer_tag=True)


def _compiled(sources: Sequence[str], made: Path) -> Iterator[tuple[str, str]]:
    """Compiles to files below `made`; each of them, and its place in the wheel."""
    from mypyc.build import mypycify
    from setuptools import Extension

    (made / "nothing.c").write_text(NOTHING)
    _built([Extension("nothing", [str(made / "nothing.c")])], made / "nothing")
    extensions = mypycify(
        [*CHECKED, *sources],
        opt_level="2",
        debug_level="0",
        multi_file=True,
        group_name=FOLDER,
        target_dir=str(made / "c"),
    )
    if os.name == "posix":
        for extension in extensions:  # The same bytes, wherever they were made.
            extension.extra_compile_args.append(f"-ffile-prefix-map={made}=.")
            # Products and sums are rounded one by one, as Python does, also where a processor can
            # do both at once (ARM).
            extension.extra_compile_args.append("-ffp-contract=off")
            # Nobody else calls or replaces these functions, so that they may be inlined.
            extension.extra_compile_args.append("-fvisibility=hidden")
    for path in _built(extensions, made):
        place = Path(path).relative_to(made / "lib").as_posix()
        # What they share is a module of its own, which they import by its name.
        yield path, f"{FOLDER}/{place}" if "/" in place else place
    listed = made / "sources.txt"
    listed.write_text(
        "".join(
            f"{source_hash(Path(path).read_bytes()).hex()} {path[:-3].replace('/', '.')}\n"
            for path in sources
        )
    )
    yield str(listed), f"{FOLDER}/{listed.name}"


def _built(extensions: Sequence[Any], made: Path) -> list[str]:
    """The files that extensions are compiled to, below `made`."""
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    class Build(build_ext):  # type: ignore[misc]
        """Compiles as many files at once as there are cores."""

        def build_extensions(self) -> None:
            compile_all = self.compiler.compile
            with ThreadPoolExecutor(os.cpu_count()) as pool:

                def compile_each(files: Sequence[str], **options: Any) -> list[str]:
                    each = pool.map(lambda file: compile_all([file], **options), files)
                    return [path for paths in each for path in paths]

                self.compiler.compile = compile_each
                super().build_extensions()

    command = Build(Distribution({"name": FOLDER, "ext_modules": extensions}))
    command.build_lib, command.build_temp = str(made / "lib"), str(made / "temp")
    command.ensure_finalized()
    command.run()
    outputs: list[str] = command.get_outputs()
    return outputs
