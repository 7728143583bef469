"""The code polices itself: layers, heavy imports, printing, size, the oracle boundary."""

import ast
import re
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest
from places import ROOT

PACKAGE = ROOT / "kvsim"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = [
    {"core.vecs"},
    {"core.compiled", "errors", "face", "version"},
    {"writing"},
    {"settings"},
    {"machine"},
    {"core"},
    {"workload"},
    {"policies"},
    {"cost"},
    {"results"},
    {"engines"},
    {"run"},
    {"explain"},
    {"report"},
    {"fleet"},
    {"search"},
    {"against"},
    {"cli"},
    {"__init__", "__main__"},
]
"""A module imports only from its own entry and from earlier rows; the first fitting name counts."""

MOST_BRANCHES = 12
MOST_LINES = 850


@cache
def parsed(path: Path) -> ast.Module:
    """A file of the package, parsed."""
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def layer_of(module: str) -> tuple[int, str]:
    while module:
        for number, row in enumerate(LAYERS):
            if module in row:
                return number, module
        module = module.rpartition(".")[0]
    raise AssertionError("no layer")


@cache
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


def test_modules_import_only_from_lower_layers() -> None:
    for path in FILES:
        own, entry = layer_of(name_of(path).removesuffix(".__init__") or "__init__")
        for name in set(imports(parsed(path))) - type_checking_blocks(parsed(path)):
            if not name.startswith("kvsim."):
                continue
            other = name.removeprefix("kvsim.")
            try:
                layer, other_entry = layer_of(other)
            except AssertionError:
                continue
            assert other_entry == entry or layer < own, f"{name_of(path)} must not import {name}"


def _inside(name: str) -> str:
    return name.removeprefix("kvsim.")


def test_no_two_modules_need_each_other() -> None:
    """Not even for their types."""
    names = {name_of(path).removesuffix(".__init__"): path for path in FILES}
    needs = {
        name: {
            other
            for other in (each.removeprefix("kvsim.") for each in imports(parsed(path)))
            if other in names and not f"{name}.".startswith(f"{other}.")
        }
        for name, path in names.items()
    }
    list(TopologicalSorter(needs).static_order())  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        (
            "simpy",
            ("run.replica.", "run.serving", "run.attempt", "fleet."),
        ),
        ("torch", ()),
        ("scipy", ()),
        ("plotly", ("report.notebook", "report.result")),
        ("pandas", ("report.notebook", "run.result")),
        ("rich", ("report.", "cli.")),
        ("typer", ("cli",)),
    ],
)
def test_libraries_stay_in_their_rooms(library: str, allowed: tuple[str, ...]) -> None:
    for path in FILES:
        if any(name.split(".")[0] == library for name in imports(parsed(path))):
            assert name_of(path).startswith(allowed), f"{name_of(path)} imports {library}"


@pytest.mark.parametrize(
    ("module", "allowed"),
    [("fcntl", ["search.store", "writing"]), ("resource", ["against.bench"])]
    + [(name, []) for name in ("grp", "pty", "pwd", "syslog", "termios", "tty")],
)
def test_modules_that_windows_lacks_are_imported_where_their_absence_is_handled(
    module: str, allowed: list[str]
) -> None:
    found = [name_of(path) for path in FILES if module in imports(parsed(path))]
    assert found == allowed


@pytest.mark.parametrize("library", ["pandas", "pyarrow", "torch"])
def test_heavy_libraries_are_imported_only_when_used(library: str) -> None:
    for path in FILES:
        names = imports(parsed(path), top_level=True)
        assert all(name.split(".")[0] != library for name in names), f"{path} imports {library}"


def test_the_package_itself_imports_nothing_but_what_finds_compiled_modules() -> None:
    """Before the command line heeds them, interrupts show a traceback: as little as can be runs."""
    found = imports(parsed(PACKAGE / "__init__.py"), top_level=True)
    assert found[0] == "kvsim.core.compiled" and len(found) == 2
    names = imports(parsed(PACKAGE / "core/compiled.py"), top_level=True)
    assert {name.split(".")[0] for name in names} == {"importlib", "os", "sys"}


def test_only_compiled_modules_have_final_constants() -> None:
    """Their values are compiled into other modules, which would not heed another value."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    patterns = built["targets"]["wheel"]["hooks"]["custom"]["modules"]
    compiled = {path for pattern in patterns for path in ROOT.glob(pattern)}
    assert len(compiled) >= len(patterns)
    for path in set(FILES) - compiled:
        assert "typing.Final" not in imports(parsed(path)), path


def test_only_the_command_line_prints_and_exits() -> None:
    for path in FILES:
        if name_of(path).startswith("cli"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "exit", "quit"), f"{path}:{node.lineno}"


def test_policies_never_read_the_true_output_length() -> None:
    """Only the stop test, and what is kept for oracles, may know how long an output becomes."""
    for folder in ("core", "engines", "policies", "cost"):
        for path in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef) and node.name in ("Batch", "Future"):
                    for inner in ast.walk(node):
                        inner.oracle = True  # type: ignore[attr-defined]
                if isinstance(node, ast.Attribute) and not hasattr(node, "oracle"):
                    assert "output_length" not in node.attr, f"{path}:{node.lineno}"


@pytest.mark.parametrize("folder", ["engines", "run/replica", "policies"])
def test_what_a_policy_may_have_is_declared_in_its_base_class(folder: str) -> None:
    """Nobody asks an object by `getattr` whether it has something."""
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("getattr", "hasattr"), f"{path}:{node.lineno}"


def test_modules_stay_short() -> None:
    for path in FILES:
        assert path.read_text().count("\n") <= MOST_LINES, path


def test_functions_have_few_branches() -> None:
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                assert branches(node) <= MOST_BRANCHES, f"{path}:{node.lineno} {node.name}"


def branches(function: ast.FunctionDef) -> int:
    """Its McCabe complexity. Conditions count with each of their terms, comprehensions as loops (as
    `radon cc` has it), and functions within it count in full."""
    found = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
        elif isinstance(node, ast.For | ast.While):
            found += 1 + bool(node.orelse)
        elif isinstance(node, ast.If | ast.IfExp | ast.Assert | ast.ExceptHandler | ast.match_case):
            found += 1
    return found


def test_public_modules_classes_and_functions_say_what_they_mean() -> None:
    for path in FILES:
        tree = parsed(path)
        assert ast.get_docstring(tree), f"{path} has no docstring"
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name}"


def test_the_code_speaks_of_nothing_but_itself() -> None:
    forbidden = re.compile(r"TODO|FIXME|XXX|\bissue #?\d|\bticket\b", re.IGNORECASE)
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not forbidden.search(line), f"{path}:{number}: {line}"


@pytest.mark.parametrize("room", ["fleet", "report"])
def test_a_face_declares_what_it_offers(room: str) -> None:
    """What is imported when asked for stands in its face twice: for type checkers, and by name."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    for_types = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {
        (each.asname or each.name, (node.module or "").rpartition(".")[2])
        for node in for_types.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    [call] = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    offered = {
        (name, str(keyword.arg))
        for keyword in call.keywords
        for name in ast.literal_eval(keyword.value).split()
    }
    assert offered == declared
    face = import_module(f"kvsim.{room}")
    assert all(getattr(face, name) is not None for name, _ in offered)
