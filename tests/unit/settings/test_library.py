"""What constructors are given: settings of the user, what a run knows, and what bases take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsim.errors import ConfigError
from kvsim.machine import load_hardware
from kvsim.policies.future import Future
from kvsim.settings import library
from kvsim.settings.library import build, find, names


class Base:
    def __init__(self, block_size: int, *, watermark: float = 0.5) -> None:
        self.seen = {"block_size": block_size, "watermark": watermark}


class Derived(Base):
    def __init__(self, *, penalty: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen["penalty"] = penalty


class Plain(Derived):
    pass


class Anything:
    def __init__(self, **settings: Any) -> None:
        self.seen = settings


class Oracle(Base):
    def __init__(self, future: Future, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen["future"] = future


class Broken:
    def __init__(self, **settings: Any) -> None:
        self.lookup = settings["nowhere"]


class Narrow(Base):
    def __init__(self, **settings: Any) -> None:
        super().__init__(block_size=4, **settings)


FUTURE = Future()
GIVEN = {"block_size": 16, "seed": 3, "future": FUTURE}


@pytest.mark.parametrize("constructor", [Derived, Plain])
def test_settings_stand_for_what_the_base_takes(constructor: type[Derived]) -> None:
    made = build("x", constructor, {"penalty": 7, "watermark": 1}, **GIVEN)
    assert made.seen == {"block_size": 16, "watermark": 1.0, "penalty": 7}


@pytest.mark.parametrize("constructor", [Derived, Plain])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"penaly": 7}, "x takes no 'penaly'; did you mean 'penalty'. it takes penalty, watermark"),
        ({"watermark": "high"}, "x: watermark: expected `float`"),
    ],
)
def test_they_are_checked_as_those_of_the_base(
    constructor: type[Derived], args: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build("x", constructor, args, **GIVEN)


def test_without_a_base_they_are_everything_but_the_future() -> None:
    made = build("x", Anything, {"mine": "any"}, **GIVEN)
    assert made.seen == {"block_size": 16, "seed": 3, "mine": "any"}


def test_only_who_names_the_future_gets_it() -> None:
    assert build("x", Oracle, {}, **GIVEN).seen["future"] is FUTURE
    assert FUTURE.oracles == ["x"]
    with pytest.raises(ConfigError, match="x needs 'future'"):
        build("x", Oracle, {}, block_size=16)


@pytest.mark.parametrize(
    ("constructor", "words"),
    [
        (Broken, "x: KeyError: 'nowhere'"),
        (Narrow, "x: TypeError: .*multiple values for keyword argument 'block_size'"),
    ],
)
def test_whatever_a_constructor_raises_is_one_line(constructor: type, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build("x", constructor, {}, **GIVEN)


def test_shipped_traces_are_found_by_name() -> None:
    assert {"agents", "api", "burst", "chat"} <= set(names("traces"))
    assert find("traces", "chat").read_text().startswith("{")
    with pytest.raises(ConfigError, match="no trace named 'caht'; did you mean 'chat'"):
        find("traces", "caht")


def test_files_of_an_installed_package_are_inside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A wheel holds `configs` as `kvsim/_configs` and `traces` as `kvsim/_traces`."""
    for name in ("_configs/models/small.toml", "_traces/short.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(library, "__file__", str(tmp_path / "settings" / "library.py"))
    assert (names("models"), names("traces")) == (["small"], ["short"])
    assert find("traces", "short") == tmp_path / "_traces" / "short.jsonl"


def test_a_shipped_file_is_read_once_and_ones_own_each_time(tmp_path: Path) -> None:
    shipped = find("hardware", names("hardware")[0])
    assert load_hardware(shipped.stem) is load_hardware(shipped.stem)
    own = tmp_path / "own.toml"
    own.write_text(shipped.read_text())
    before = load_hardware(str(own))
    own.write_text(shipped.read_text().replace(f'name = "{before.name}"', 'name = "mine"'))
    assert load_hardware(str(own)).name == "mine" != before.name
