"""The page for contributors names files and definitions that exist."""

import ast
import re
from pathlib import Path

import pytest
from places import ROOT

PAGE = ROOT / "docs/CONTRIBUTING.md"
NAMED = re.findall(r"\[`([^`]+)`\]\(([^)]+)\)", PAGE.read_text())
FOLDERS = re.findall(r"`((?:kvsim|tests|docs|traces|configs)/[\w/.]*)`", PAGE.read_text())


def definitions(path: Path) -> set[str]:
    """Names of the classes, functions, methods and constants of a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
        if isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
    return found


def test_there_is_something_to_check() -> None:
    assert len(NAMED) > 25
    assert len(FOLDERS) > 5


@pytest.mark.parametrize(("name", "path"), NAMED)
def test_what_the_page_names_is_where_it_says(name: str, path: str) -> None:
    assert name in definitions((PAGE.parent / path).resolve())


@pytest.mark.parametrize("path", FOLDERS)
def test_files_and_folders_exist(path: str) -> None:
    assert (PAGE.parents[1] / path).exists()
