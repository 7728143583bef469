"""Routers decide what the real ones decided: every recorded decision, and the books after it."""

from itertools import islice
from pathlib import Path

import pytest
from command import run_here
from marks import long
from places import DATA
from shared import SHARED, needs_shared

from kvsim.against.conform.cases import RouterRun, read_router_runs
from kvsim.against.conform.routers import REPLAYS, replay
from kvsim.against.conform.step_log import first_divergence
from kvsim.errors import TraceError
from kvsim.fleet.routers.dynamo import Tier
from kvsim.fleet.routers.sglang import Tree
from kvsim.fleet.routers.vllm import DataParallel

RECORDED = SHARED / "conformance" / "routers"
DECISIONS = {"dynamo": 10_006, "sglang": 11_323, "production-stack": 7_200, "vllm-dp": 5_375}


@needs_shared("conformance/routers")
@pytest.mark.parametrize("router", REPLAYS)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=long)])
def test_every_recorded_decision_is_repeated(router: str, every: int) -> None:
    """One run of so many."""
    decisions = 0
    for run in islice(read_router_runs(RECORDED, router), 0, None, every):
        divergence = first_divergence(run.records, replay(router, run))
        assert divergence is None, f"{run.name}: recorded | kvsim: {divergence}"
        decisions += sum(record["op"] == "route" for record in run.records)
    assert decisions == DECISIONS[router] if every == 1 else decisions > 0


def differs(router: str) -> bool:
    """Whether a run of the router in the sample is not repeated."""
    return run_here(["conform", str(DATA / f"router-{router}.jsonl.gz")]).returncode == 1


def test_a_score_that_ignores_who_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataParallel, "_score", lambda self, worker: self.load[worker])
    assert differs("vllm-dp")


def test_a_cache_that_forgets_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tier, "removed", lambda self, keys: None)
    assert differs("dynamo")


def test_a_tree_that_is_never_cut_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "evict", lambda self, most: None)
    assert differs("sglang")


HEADER = '{"case": "x", "config": {"policy": "vllm_dp"}, "workers": [0, 1]}'
ROUTE = '{"op": "route", "id": "a", "snapshot": [[0, 0, 0], [0, 0, 0]], "chosen": %d}'


def test_the_command_says_where_decisions_part(tmp_path: Path) -> None:
    (tmp_path / "right.jsonl").write_text(f"{HEADER}\n{ROUTE % 0}\n")
    (tmp_path / "wrong.jsonl").write_text(f"{HEADER}\n{ROUTE % 1}\n")
    same = run_here(("conform", "right.jsonl", "--router", "vllm-dp"), tmp_path)
    assert (same.returncode, same.stdout) == (0, "1 runs, 1 identical, 1 decisions\n")
    other = run_here(("conform", ".", "--router", "vllm-dp"), tmp_path)
    assert other.returncode == 1
    assert (
        "wrong: recorded | kvsim: record 0: another worker is chosen (chosen: 1 | 0)"
        in other.stdout
    )


def test_bad_input_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(f'{HEADER}\n{{"op": "route"}}\n')
    (tmp_path / "empty").mkdir()
    for arguments, said in [
        (("bad.jsonl", "--router", "vllm-dp"), "bad: record 0 is none of a vllm-dp router"),
        (("bad.jsonl", "--router", "vllm"), "--router: unknown 'vllm'; did you mean 'vllm-dp'?"),
        (("empty", "--router", "vllm-dp"), "no *.jsonl files"),
        (("nothing", "--router", "vllm-dp"), "nothing: no such file or folder"),
    ]:
        result = run_here(("conform", *arguments), tmp_path)
        assert result.returncode == 2
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_record_that_is_none_is_named() -> None:
    run = RouterRun("x", {"config": {"block_size": 16}, "workers": [0]}, [{"op": "free"}])
    with pytest.raises(TraceError, match="x: record 0"):
        replay("dynamo", run)
