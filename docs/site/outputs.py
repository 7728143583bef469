"""Runs the examples of README and site, and writes what they print into the pages.

    python docs/site/outputs.py [PAGE...]      # default: all pages that have examples
    python docs/site/outputs.py --check        # change nothing; exit code 1 if a page is stale

A comment above a code block says what happens to it:

    <!-- run -->                  this block (sh or python) is executed
    <!-- run: FILE -->            it needs a public trace; where `../shared` has none, it and its
                                  outputs stay as they are
    <!-- output -->               this block is all that the block above printed
    <!-- output: one … other -->  from the first line with `one` to the next line with `other`

All blocks of a page run in order, in an empty folder that sees `traces/`, `configs/`, `docs/` and
`tests/`.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"<!-- (?P<what>run|output)(?:: (?P<range>.+?))? -->\n"
    r"```(?P<language>\w+)\n(?P<text>(?:(?!```).*\n)*)```"
)
MARK = re.compile(r"^<!-- (?:run|output)\b", re.MULTILINE)
INSTALL = re.compile(r"^python3 -m venv .* && (?=\.venv/bin/kvsim)", re.MULTILINE)
"""The README installs first, and calls what it installed; here it is installed."""


def pages() -> list[Path]:
    """README and the pages of the site that have examples to run."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if BLOCK.search(page.read_text(encoding="utf-8"))]


def fresh(page: Path) -> str:
    """The text of a page with the outputs that its examples print now.

    Raises `RuntimeError` with the message of an example that fails, and for a comment that is not
    right above a block.
    """
    text = page.read_text(encoding="utf-8")
    if len(BLOCK.findall(text)) != len(MARK.findall(text)):
        raise RuntimeError(f"{page}: there is a comment `run` or `output` without a block below it")
    pieces, end = [], 0
    printed: str | None = ""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for block in BLOCK.finditer(text):
            pieces.append(text[end : block.start("text")])
            end = block.end("text")
            if block["what"] == "run":
                there = block["range"] is None or lend(block["range"], Path(folder))
                printed = run(block["language"], block["text"], folder) if there else None
                pieces.append(block["text"])
            elif printed is None:
                pieces.append(block["text"])
            else:
                pieces += [f"{line}\n" for line in lines(printed, block["range"])]
    return "".join([*pieces, text[end:]])


def prepare(folder: Path) -> None:
    """Give the folder what a checkout has, and a command `kvsim`."""
    for name in ("traces", "configs", "docs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    command = folder / "bin" / "kvsim"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{ROOT}" exec "{sys.executable}" -m kvsim "$@"\n'
    )
    command.chmod(0o755)


def lend(name: str, folder: Path) -> bool:
    """Put a public trace into the folder; whether there is one of this name."""
    found = next((ROOT.parent / "shared" / "traces").rglob(name), None)
    if found is not None:
        (folder / name).symlink_to(found)
    return found is not None


def run(language: str, code: str, folder: str) -> str:
    """What a block prints on standard output."""
    script = INSTALL.sub("", code).replace(".venv/bin/kvsim", "kvsim")
    arguments = ["bash", "-euo", "pipefail", "-c", script]
    environment = {**os.environ, "COLUMNS": "100", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    if language == "python":
        arguments = [sys.executable, "-c", code]
        environment["PYTHONPATH"] = str(ROOT)
    ran = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{code}\nexit code {ran.returncode}: {ran.stderr}")
    return ran.stdout


def lines(printed: str, part: str | None) -> Iterator[str]:
    """The lines of an output that a page shows, with plain spaces and single empty lines."""
    first, _, last = (part or "").partition(" … ")
    plain = re.sub(r"[^\S\n]", " ", printed)
    shown = re.sub(r"\n\n+", "\n\n", re.sub(r" +\n", "\n", plain)).strip("\n").splitlines()
    begin = next((i for i, line in enumerate(shown) if first in line), None)
    if begin is None:
        raise RuntimeError(f"no line with {first!r} in:\n{printed}")
    ends = (i for i in range(begin, len(shown)) if last in shown[i]) if last else iter(())
    yield from shown[begin : next(ends, len(shown) - 1) + 1]


def main(arguments: list[str]) -> int:
    """Refresh pages, or with `--check` only compare them."""
    check = "--check" in arguments
    stale = []
    for page in [Path(each).resolve() for each in arguments if each != "--check"] or pages():
        text = fresh(page)
        if text != page.read_text(encoding="utf-8"):
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(text, encoding="utf-8")
    sys.stdout.write("".join(f"{'stale' if check else 'refreshed'}: {each}\n" for each in stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
