"""The code polices itself: layers, heavy imports, printing, size, the oracle boundary."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvsim"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = [
    {"errors", "version"},
    {"packed", "schema", "tally", "collector", "writing"},
    {"config", "request", "recorder", "transitions", "workload.trace"},
    {"archive", "plan", "library"},
    {"workload"},
    {"model", "blocks"},
    {"batch"},
    {"hardware", "schedule"},
    {"memory", "link", "engines", "rules", "conform", "blockmap"},
    {"cost"},
    {"calibrate", "ledger"},
    {"certainty"},
    {"events"},
    {"inbox"},
    {"replica", "assembly", "report"},
    {"watchers"},
    {"result"},
    {"run"},
    {"replicates"},
    {"sweep", "bench", "validate", "tracks"},
    {"size"},
    {"cli", "__init__"},
    {"__main__"},
]
"""A module imports only from its own entry and from earlier rows; the first fitting name counts."""

MOST_LINES = 360
MOST_LINES_PER_FUNCTION = 60


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def layer_of(module: str) -> tuple[int, str]:
    while module:
        for number, row in enumerate(LAYERS):
            if module in row:
                return number, module
        module = module.rpartition(".")[0]
    raise AssertionError("no layer")


def imports(tree: ast.AST, top_level: bool = False) -> list[str]:
    """Imported module names; `top_level`: only what runs when the module is imported."""
    found: list[str] = []
    nodes = tree.body if top_level and isinstance(tree, ast.Module) else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def type_checking_blocks(tree: ast.Module) -> set[str]:
    skipped: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(imports(node))
    return skipped


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_import_only_from_lower_layers(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own, entry = layer_of(name_of(path).removesuffix(".__init__") or "__init__")
    for name in set(imports(tree)) - type_checking_blocks(tree):
        if not name.startswith("kvsim."):
            continue
        other = name.removeprefix("kvsim.")
        try:
            layer, other_entry = layer_of(other)
        except AssertionError:
            continue
        assert other_entry == entry or layer < own, f"{name_of(path)} must not import {name}"


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("simpy", ("events", "inbox", "replica", "run", "bench.")),
        ("torch", ()),
        ("pandas", ("report.", "result")),
        ("plotly", ("report.",)),
        ("rich", ("report.", "cli.")),
        ("typer", ("cli",)),
    ],
)
def test_libraries_stay_in_their_rooms(library: str, allowed: tuple[str, ...]) -> None:
    for path in FILES:
        if any(name.split(".")[0] == library for name in imports(ast.parse(path.read_text()))):
            assert name_of(path).startswith(allowed), f"{name_of(path)} imports {library}"


@pytest.mark.parametrize("library", ["pandas", "plotly", "pyarrow", "torch", "scipy"])
def test_heavy_libraries_are_imported_only_when_used(library: str) -> None:
    for path in FILES:
        names = imports(ast.parse(path.read_text()), top_level=True)
        assert all(name.split(".")[0] != library for name in names), f"{path} imports {library}"


def test_only_the_command_line_prints_and_exits() -> None:
    for path in FILES:
        if name_of(path).startswith("cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "exit", "quit"), f"{path}:{node.lineno}"


def test_policies_never_read_the_true_output_length() -> None:
    """Only the stop test may know how long an output becomes."""
    for folder in ("schedule", "batch", "blocks", "cost"):
        for path in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name in ("stops", "stops_after"):
                    for inner in ast.walk(node):
                        inner.oracle = True  # type: ignore[attr-defined]
                if isinstance(node, ast.Attribute) and not hasattr(node, "oracle"):
                    assert not node.attr.startswith("output_length"), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MOST_LINES_PER_FUNCTION, node.name


def test_public_modules_classes_and_functions_say_what_they_mean() -> None:
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name}"


def test_the_code_speaks_of_nothing_but_itself() -> None:
    forbidden = re.compile(r"TODO|FIXME|XXX|\bissue #?\d|\bticket\b", re.IGNORECASE)
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not forbidden.search(line), f"{path}:{number}: {line}"
