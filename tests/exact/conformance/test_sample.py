"""The sample of recorded logs that ships: a checkout by itself shows that kvsim decides alike."""

import gzip
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from command import run_here
from exact.conformance.test_vllm_v1_releases import GROUPS
from marks import long, whole
from places import DATA, ROOT
from sample import LEAST, sample
from shared import needs_shared

from kvsim.against.conform.cases import RECORDED, Case, RouterRun, files_in, read_named, stem
from kvsim.settings.versions import release

FILES = files_in(DATA)
RELEASES = sorted((min(group, key=release) for group in GROUPS), key=release)
MOST_BYTES = 3_000_000
SHOWN = "docs/results/conformance.md"


def test_every_case_is_repeated_as_the_pages_say() -> None:
    """The one command of the README, and its last line; all that it prints is on a page."""
    done = run_here(["conform", str(DATA)])
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *by_file, total = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in by_file] == [stem(file) for file in FILES]
    assert f"`{total}`" in (ROOT / "README.md").read_text()
    assert f"```text\n{done.stdout}```" in (ROOT / SHOWN).read_text()


def kind_of(name: str, read: Case | RouterRun) -> tuple[str, str | None]:
    if isinstance(read, RouterRun):
        return name, read.header["config"].get("policy")
    return name, None


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_there_are_enough_of_each_kind(file: Path) -> None:
    """Two policies of SGLang's router were recorded once."""
    found = Counter(kind_of(name, read) for name, read in read_named(file))
    rare = {("sglang", "random"), ("sglang", "power_of_two")}
    assert all(count >= LEAST for kind, count in found.items() if kind not in rare), found


def test_no_engine_and_no_release_is_left_out() -> None:
    names = {stem(file) for file in FILES}
    assert names >= {*RECORDED, *(f"vllm-v1-{name}" for name in RELEASES)}
    assert sum(file.stat().st_size for file in FILES) <= MOST_BYTES


@pytest.mark.parametrize(("older", "newer"), list(pairwise(RELEASES)))
def test_it_tells_each_release_from_its_neighbours(older: str, newer: str) -> None:
    """A case of the older may be decided alike: what the newer brought is off in it."""
    assert replayed_as(newer, older) == 1 or replayed_as(older, newer) == 1


def replayed_as(recorded: str, other: str) -> int:
    """Exit code of the cases of one release, decided as by another."""
    file = DATA / f"vllm-v1-{recorded}.jsonl.gz"
    return run_here(["conform", str(file), "--engine", "vllm-v1", "--release", other]).returncode


@long
@whole
@needs_shared("conformance")
def test_it_is_what_is_drawn() -> None:
    assert sample() == {stem(file): gzip.decompress(file.read_bytes()).decode() for file in FILES}
