"""The workloads are those that the known figures were made with."""

import os
import random
from pathlib import Path

import pytest
from marks import long
from shared import SHARED

from kvsim.against.bench.measure import measure
from kvsim.against.bench.settings import SETTINGS, USUAL, Case, choose
from kvsim.against.bench.workloads import (
    DEFAULT,
    WORKLOADS,
    decode,
    named,
)
from kvsim.errors import ConfigError
from kvsim.workload.trace import Trace

WHOLE = bool(os.environ.get("KVSIM_WHOLE"))
QUICK = ("W2", "W2s", "chunked-W2", "decode-1", "decode-16")
CONVERSATION = SHARED / "traces/mooncake/conversation_trace.jsonl.gz"


def sums(trace: Trace) -> tuple[int, int, int, int]:
    arrivals = [row.arrival_ns for row in trace.rows]
    prompts = sum(row.input_length for row in trace.rows)
    return arrivals[0], arrivals[-1], prompts, sum(row.output_length for row in trace.rows)


def test_generators_make_the_published_sums() -> None:
    assert sums(WORKLOADS["W1"].make(None)) == (27_197_276, 397_190_974_943, 5_120_000, 1_280_000)
    assert sums(WORKLOADS["W2"].make(None))[1] == 165_496_239_559
    assert sums(WORKLOADS["W2x"].make(None))[2:] == (665_067, 5_794_350)
    assert sums(WORKLOADS["W3"].make(None))[1:] == (4_986_175_699_119, 41_797_169, 17_571_878)


def test_the_draws_of_decode_workloads_follow_one_another() -> None:
    rng = random.Random(1)
    for running in (1, 16, 256, 1024, 4096):
        prompts = [rng.randint(100, 600) for _ in range(running)]
        outputs = [rng.randint(2000, 6000) for _ in range(running)]
        rows = decode(running).rows
        assert [row.input_length for row in rows] == prompts
        assert [row.output_length for row in rows] == outputs
        assert {row.arrival_ns for row in rows} == {0}


def test_a_word_means_a_workload_or_a_family() -> None:
    assert named("W2") == ["W2"]
    assert named("decode") == [f"decode-{n}" for n in (1, 16, 256, 1024, 4096)]
    assert named("chunked") == ["chunked-W1", "chunked-W2", "chunked-W3"]
    with pytest.raises(ConfigError, match=r"unknown 'W22'; did you mean 'W2'\?"):
        named("W22")


def test_without_names_every_engine_is_measured_the_default_first() -> None:
    cases = choose([], [], None)
    assert [*dict.fromkeys(case.settings for case in cases)] == list(SETTINGS)
    assert cases[:2] == [Case("W1", DEFAULT), Case("W2", DEFAULT)]
    assert set(choose([], [], "x")) - set(cases) == {
        Case(name, settings)
        for settings, names in USUAL.items()
        for name in names
        if not WORKLOADS[named(name)[0]].own
    }
    with pytest.raises(ConfigError, match="give --trace FILE"):
        WORKLOADS["W4"].make(None)


def test_workloads_alone_run_with_the_default_and_settings_on_their_usual_ones() -> None:
    assert choose(["W2"], [], None) == [Case("W2", DEFAULT)]
    assert choose([], ["vllm-v1-table"], None) == [
        Case("W1", "vllm-v1-table"),
        Case("W2x", "vllm-v1-table"),
    ]


def test_a_file_of_settings_is_an_engine_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('engine = "vllm-v1"\nasync_scheduling = false\n')
    (case,) = choose(["W1"], [str(path)], None)
    assert case.table == WORKLOADS["W1"].settings | {
        "engine": "vllm-v1",
        "async_scheduling": False,
    }
    assert case.checks is None


LONG = ("W4", "W4-300k", "W2s", "chunked-W2", "decode-1")
KNOWN = [
    pytest.param(Case(name, settings), marks=long if name in LONG else ())
    for name, each in WORKLOADS.items()
    for settings in each.checks
]


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_a_run_comes_to_what_is_known(case: Case) -> None:
    own = WORKLOADS[case.workload].own
    if own and not (WHOLE or case.workload in QUICK):
        pytest.skip("long; KVSIM_WHOLE=1 runs it")
    if not own and not CONVERSATION.exists():
        pytest.skip("public data ../shared/traces is not here")
    measured = measure(case, None if own else str(CONVERSATION))
    assert case.checks is not None and measured.meets(case.checks), measured
