"""What `--json` prints: one JSON value of known keys and types, and nothing else; what is said
besides goes to standard error."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from msgspec import Struct

from kvsim.cli import main
from kvsim.cli.commands import asked

Figures = dict[str, float | None]


class Configuration(Struct, forbid_unknown_fields=True):
    settings: dict[str, Any]
    outcome: str
    seeds: int
    seeds_met: int
    figures: Figures


class Swept(Struct, forbid_unknown_fields=True):
    verdict: list[str]
    rule: str
    best: list[list[int]]
    configurations: list[Configuration]


class Tried(Struct, forbid_unknown_fields=True):
    value: float
    outcome: str
    seeds_met: int
    figures: Figures


class Trace(Struct, forbid_unknown_fields=True):
    name: str
    sha256: str
    requests: int


class Search(Struct, forbid_unknown_fields=True):
    router: str | None
    config: dict[str, Any]
    trace: Trace
    value: float | None
    meets: bool
    longer_requests: int | None
    cost: dict[str, Any] | None
    verdict: list[str]
    tried: list[Tried]


class Sized(Struct, forbid_unknown_fields=True):
    kvsim_version: str
    find: str
    slo: str
    seeds: list[int]
    searches: list[Search]


class Policy(Struct, forbid_unknown_fields=True):
    name: str
    about: str = msgspec.field(name="what it is")
    parameters: str | None = None


Finding = Literal["same", "better", "worse", "different", "significant", "equal", "insignificant"]


class Difference(Struct, forbid_unknown_fields=True):
    first: str
    other: str
    finding: Finding
    words: str
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    level: float | None = None


class Spread(Struct, forbid_unknown_fields=True):
    mean: float | None
    std: float | None
    values: list[float | None]


class Compared(Struct, forbid_unknown_fields=True):
    label: str
    unit: str
    better: Literal["lower", "higher", ""]
    runs: dict[str, float | None]
    differences: list[Difference]


class Table(Struct, forbid_unknown_fields=True):
    runs: list[str]
    method: Literal["one run"]
    figures: dict[str, Compared]


class ComparedSeeds(Struct, forbid_unknown_fields=True):
    label: str
    unit: str
    better: Literal["lower", "higher", ""]
    runs: dict[str, Spread]
    differences: list[Difference]


class Comparison(Struct):
    runs: list[str]
    method: Literal["seeds"]
    redrawn: list[str]
    seeds: list[int]
    planned_seeds: int
    confidence: float
    margin: float
    settled: bool
    unfinished: list[Any]
    figures: dict[str, ComparedSeeds]


FEW = ["chat", "--num-prompts", "40"]
SEARCH = ["size", "burst", "--config", "capacity-cliff", "--num-prompts", "20", "--seeds", "2"]
COMMANDS: dict[str, tuple[list[str], Any]] = {
    "size": ([*SEARCH, "--slo", "p99_ttft<300ms", "--find", "num_gpu_blocks"], Sized),
    "sweep": (
        [
            "sweep",
            *FEW,
            "--grid",
            "max_num_seqs=4,64",
            "--slo",
            "p99_ttft<2s",
            "--out",
            "swept",
            "--jobs",
            "1",
        ],
        Swept,
    ),
    "policies": (["policies"], dict[str, list[Policy]]),
    "compare": (["compare", *FEW, "naive", "prefix-caching"], Table),
    "compare seeds": (
        ["compare", *FEW, "naive", "prefix-caching", "--seeds", "3", "--jobs", "1"],
        Comparison,
    ),
}
PROGRESS = {"size": "looking for", "sweep": "sweeping", "compare seeds": "comparing"}


class Seen:
    """The standard error of a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in an empty folder, its standard error a terminal; (stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def ran(*words: str) -> tuple[str, str]:
        seen = Seen()
        monkeypatch.setattr(sys, "stderr", seen)
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert not stop.value.code, seen.text
        return capsys.readouterr().out, seen.text

    yield ran
    asked["quiet"] = False


@pytest.mark.parametrize("name", COMMANDS)
def test_json_is_alone_on_standard_output(name: str, run: Any) -> None:
    """Progress goes to standard error, a terminal here. Bytes are equal with and without
    `--quiet`, which leaves nothing there."""
    words, kind = COMMANDS[name]
    printed, said = run(*words, "--json")
    assert PROGRESS.get(name, "") in said
    msgspec.convert(json.loads(printed), kind)
    assert printed.startswith(("{", "[")) and printed.endswith("\n")
    quiet, silence = run(*words, "--json", "--quiet")
    assert (quiet, silence) == (printed, "")


def test_what_json_says_is_what_ran(run: Any) -> None:
    swept = msgspec.convert(json.loads(run(*COMMANDS["sweep"][0], "--json")[0]), Swept)
    few, many = swept.configurations
    assert [few.settings, many.settings] == [{"max_num_seqs": 4}, {"max_num_seqs": 64}]
    assert (few.seeds_met, many.seeds_met, swept.best) == (0, 1, [[1]])
    assert few.figures["completed"] == many.figures["completed"] == 40
    sized = msgspec.convert(json.loads(run(*COMMANDS["size"][0], "--json")[0]), Sized)
    [search] = sized.searches
    met = {each.value: each.seeds_met == len(sized.seeds) for each in search.tried}
    assert search.meets and search.value is not None and met[search.value]
    assert not any(met[value] for value in met if value < search.value)
