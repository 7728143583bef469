"""What `profile show` and `profile diff` compute, and what the commands print."""

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from command import run_here
from unit.cost.calibrate.tables import write_tables

from kvsim.cost.calibrate.compare import parts, ratios, settings_that_differ
from kvsim.cost.calibrate.llmservingsim import import_profile
from kvsim.cost.profile import Profile, load_profile, to_json


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "one.json"
    path.write_text(to_json(import_profile(write_tables(tmp_path / "tables"))))
    return path


def changed(saved: Path, **fit: Any) -> Profile:
    """The profile with parts of its fit replaced, read from a file of its own."""
    table = json.loads(saved.read_text())
    table["fit"] |= fit
    table["device"]["name"] = "Other GPU"
    other = saved.with_name("other.json")
    other.write_text(json.dumps(table))
    return load_profile(str(other))


def test_parts_have_ranges_and_times(saved: Path) -> None:
    found = {part.name: part for part in parts(load_profile(str(saved)))}
    assert list(found) == ["dense", "head", "prefill", "decode_v2", "mixed"]
    assert found["dense"].axes == {"tokens": (1, 64, 4)}
    assert found["decode_v2"].axes == {"n": (1, 8, 3), "ctx": (16, 256, 3)}
    assert found["decode_v2"].us == (2 + 1 * 16 / 4, 2 + 8 * 256 / 4)
    assert found["mixed"].points == 81


def test_a_table_of_experts_has_two_axes() -> None:
    profile = load_profile("h100-sxm-mixtral-8x7b-2-public")
    found = {part.name: part for part in parts(profile)}
    assert found["experts"].axes == {"tokens": (1, 8192, 35), "active": (1, 8, 2)}
    assert found["experts"].points == 70


def test_a_profile_does_not_differ_from_itself(saved: Path) -> None:
    profile = load_profile(str(saved))
    assert settings_that_differ(profile, profile) == []
    for ratio in ratios(profile, profile):
        assert (ratio.median, ratio.least, ratio.greatest) == (1, 1, 1)
        assert ratio.points > 0


def test_ratios_are_of_the_second_over_the_first_where_both_have_points(saved: Path) -> None:
    dense = json.loads(saved.read_text())["fit"]["dense"]
    twice = {"tokens": dense["tokens"][1:], "us": [2 * us for us in dense["us"][1:]]}
    one, other = load_profile(str(saved)), changed(saved, dense=twice)
    found = {ratio.name: ratio for ratio in ratios(one, other)}
    assert found["dense"].points == 3
    assert found["dense"].median == found["dense"].greatest == 2
    assert found["head"].median == 1
    assert settings_that_differ(one, other) == [("device.name", "Test GPU", "Other GPU")]


def kvsim(*arguments: str) -> CompletedProcess[str]:
    return run_here(["profile", *arguments])


def test_the_commands(saved: Path, tmp_path: Path) -> None:
    made = kvsim("import", str(tmp_path / "tables"), "--out", str(tmp_path / "made.json"))
    assert made.returncode == 0
    assert (tmp_path / "made.json").read_bytes() == saved.read_bytes()
    shown = kvsim("show", str(saved))
    assert "Test GPU" in shown.stdout
    assert "tokens 1..64 (4)" in shown.stdout
    changed(saved)
    compared = kvsim("diff", str(saved), str(saved.with_name("other.json")))
    assert "device.name" in compared.stdout
    assert "decode_v2" in compared.stdout


def test_bad_input_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    failed = kvsim("import", str(tmp_path), "--out", str(tmp_path / "made.json"))
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1
    assert failed.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_where_there_is_no_folder_to_read(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "one.json" / "made.json"
    failed = kvsim("import", str(tmp_path / "tables"), "--out", str(target))
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1
    assert str(saved) in failed.stderr


def test_each_source_of_tables_asks_for_what_it_lacks(saved: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "tables")
    extra = kvsim("import", folder, "--created", "2026-01-02", "--out", str(saved))
    assert "leave out --created and --note" in extra.stderr
    (tmp_path / "gemm.csv").touch()
    lacking = kvsim("import", str(tmp_path), "--out", str(saved))
    assert "give --model and --hardware" in lacking.stderr
