"""README and documentation site: what they name exists, what they print is what is printed."""

import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exact.conformance.test_sample import SHOWN
from marks import WHOLE, long
from places import ROOT

from kvsim.cli.commands import COMMANDS, load

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
MADE = runpy.run_path(str(DOCS / "site" / "reference.py"))["PAGES"]
OUTPUTS = runpy.run_path(str(DOCS / "site" / "outputs.py"))

CODE = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(kvsim [a-z][^`]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]+))?\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def command_lines(text: str) -> Iterator[list[str]]:
    """Every `kvsim ...` of a page, in words: in blocks of shell code and in running text."""
    for block in [*CODE.findall(text), *INLINE.findall(text)]:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for place, word in enumerate(words):
                if word in ("kvsim", ".venv/bin/kvsim"):
                    ends = (i for i in range(place, len(words)) if words[i][-1] in ";|>&")
                    yield words[place + 1 : next(ends, len(words))]


def flags_of(command: Any) -> set[str]:
    """All spellings of the options of a command."""
    options = (option for option in command.params if option.param_type_name == "option")
    found = {flag for each in options for flag in (*each.opts, *each.secondary_opts)}
    return found | {"--help", "-h"}


def slug(title: str) -> str:
    """The anchor of a heading."""
    kept = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower())
    return re.sub(r"[\s-]+", "-", kept.strip())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in map(slug, titles), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_their_flags_exist(page: Path) -> None:
    for words in command_lines(page.read_text()):
        if not words or words[0] in ("COMMAND", "--help", "--version"):
            continue
        assert words[0] in COMMANDS, words
        command, rest = load(words[0]), words[1:]
        inside = getattr(command, "commands", {})
        if inside and rest:
            assert set(rest[0].split("|")) <= set(inside), words
            command = inside[rest[0]]
        given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert given <= flags_of(command), words


def test_there_are_commands_to_check() -> None:
    found = [words[0] for page in PAGES for words in command_lines(page.read_text()) if words]
    assert set(COMMANDS) - {"policies"} <= set(found)
    assert len(found) > 100


@pytest.mark.parametrize("name", MADE)
def test_the_reference_is_up_to_date(name: str) -> None:
    text = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert text == MADE[name](), "python docs/site/reference.py"


def test_the_schema_of_settings_takes_the_shipped_configurations() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((DOCS / "reference" / "settings.schema.json").read_text())
    paths = sorted((ROOT / "configs" / "runs").glob("*.toml"))
    assert paths
    for path in paths:
        jsonschema.validate(tomllib.loads(path.read_text()), schema)
    jsonschema.validate({"max_model_len": "32K"}, schema)
    for wrong in ({"max_model_lenght": 4096}, {"n": 0}, {"sessions": "open"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.parametrize(
    ("name", "files", "wrong"),
    [
        ("hardware", "hardware/*.toml", {"memory_gib": 0}),
        ("model", "models/*.toml", {"num_hidden_layers": "32"}),
        ("workload", "workloads/*.toml", {"requests": "many"}),
        ("profile", "hardware/*.json", {"schema": "kvsim.profile/0"}),
    ],
)
def test_the_other_schemas_take_the_shipped_files(
    name: str, files: str, wrong: dict[str, object]
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((DOCS / "reference" / f"{name}.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    paths = sorted((ROOT / "configs").glob(files))
    assert paths
    for path in paths:
        read = json.loads if path.suffix == ".json" else tomllib.loads
        table = read(path.read_text())
        validator.validate(table)
        assert not validator.is_valid({**table, **wrong}), path


def test_exit_codes_are_all_explained() -> None:
    codes = set()
    for path in (ROOT / "kvsim" / "cli").glob("*.py"):
        codes |= set(re.findall(r"(?:Exit|sys\.exit)\((\d+)\)", path.read_text()))
    page = (DOCS / "reference" / "exit-codes.md").read_text()
    assert codes <= set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))


@long
@pytest.mark.parametrize(
    "page", [page for page in OUTPUTS["pages"]() if name_of(page) != SHOWN], ids=name_of
)
def test_examples_print_what_the_page_shows(page: Path) -> None:
    """But for the page of the shipped cases, which `test_sample` holds to what it replays."""
    if page.stem in ("kv-offload", "replicas", "size") and not WHOLE:
        pytest.skip("takes minutes; KVSIM_WHOLE=1 runs it")
    assert page.read_text() == OUTPUTS["fresh"](page), "python docs/site/outputs.py"


def test_the_tables_of_the_agent_lab_are_those_of_its_runs() -> None:
    lab = runpy.run_path(str(DOCS / "site" / "agents.py"))
    assert lab["page"](lab["read"]()) == lab["PAGE"].read_text(), (
        "python docs/site/agents.py --page"
    )


@long
def test_pictures_show_what_pages_show_now(tmp_path: Path) -> None:
    pictures = runpy.run_path(str(ROOT / "docs/site/pictures.py"))
    known = json.loads(pictures["MADE"].read_text())
    assert pictures["made"](tmp_path) == known, "python docs/site/pictures.py"
    drawn = list(pictures["FOLDER"].glob("*.png"))
    assert {path.stem for path in drawn} == set(known)
    assert sum(path.stat().st_size for path in drawn) < 600_000


def test_the_policy_of_the_readme_is_the_example() -> None:
    (policy,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = (DOCS / "examples" / "shortest_first.py").read_text()
    for line in policy.splitlines():
        plain = line.replace("(self, batch, now_ns)", "(self, batch: Batch, now_ns: int) -> Plan")
        assert plain in example.splitlines(), line


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (None, ["one", "", "two", "three"]),
        ("two", ["two", "three"]),
        ("one … two", ["one", "", "two"]),
        ("one … nothing", ["one", "", "two", "three"]),
    ],
)
def test_a_page_shows_a_part_of_an_output(part: str | None, expected: list[str]) -> None:
    assert list(OUTPUTS["lines"]("\none  \n \n\ntwo\nthree\n", part)) == expected


def test_an_example_that_fails_or_prints_something_else_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = "<!-- run -->\n```sh\n{}\n```\n\n<!-- output: {} -->\n```text\nold\n```\n"
    page.write_text(block.format("echo new", "new"))
    assert OUTPUTS["fresh"](page) == page.read_text().replace("old", "new")
    page.write_text(block.format("kvsim run --trace nowhere", "requests"))
    with pytest.raises(RuntimeError, match="exit code 2"):
        OUTPUTS["fresh"](page)
    page.write_text("<!-- run -->\n\n```sh\necho new\n```\n")
    with pytest.raises(RuntimeError, match="without a block below it"):
        OUTPUTS["fresh"](page)
    page.write_text(block.format("echo new", "old"))
    with pytest.raises(RuntimeError, match="no line with 'old'"):
        OUTPUTS["fresh"](page)
