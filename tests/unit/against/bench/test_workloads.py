"""The workloads are those of the known figures, and runs of them come to known results."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from marks import long, whole

from kvsim import simulate
from kvsim.against.bench_workloads import DEFAULT, SETTINGS, WORKLOADS, Case, choose, decode, named
from kvsim.errors import ConfigError
from kvsim.workload import Trace


def sums(trace: Trace) -> tuple[int, int, int, int]:
    arrivals = [row.arrival_ns for row in trace.rows]
    prompts = sum(row.input_length for row in trace.rows)
    return arrivals[0], arrivals[-1], prompts, sum(row.output_length for row in trace.rows)


def test_generators_make_the_published_sums() -> None:
    """`shared/design/speed.md` states them, so that others can make the same workloads."""
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


def test_a_word_means_a_name_or_a_family() -> None:
    assert named("--workload", "W2", WORKLOADS) == ["W2"]
    assert named("--workload", "conversation", WORKLOADS) == [
        "conversation-30000",
        "conversation-300000",
    ]
    assert {"own-scheduler", "own-victim", "own-price"} == {*named("--settings", "own", SETTINGS)}
    with pytest.raises(ConfigError, match=r"unknown 'W22'; did you mean 'W2'\?"):
        named("--workload", "W22", WORKLOADS)


def test_without_names_everything_is_measured_the_default_first() -> None:
    cases = choose([], [], None)
    assert [*dict.fromkeys(case.settings for case in cases)] == list(SETTINGS)
    assert cases[:2] == [Case("W1", DEFAULT), Case("W2", DEFAULT)]
    assert {case.workload for case in {*choose([], [], "x")} - {*cases}} == {
        *named("--workload", "conversation", WORKLOADS)
    }
    with pytest.raises(ConfigError, match="give --trace FILE"):
        WORKLOADS["conversation-30000"].make(None)


def test_what_a_case_is_compared_with_is_measured_as_well() -> None:
    assert choose(["W2"], [], None) == [Case("W2", DEFAULT)]
    assert choose(["W2x"], ["own-victim"], None)[1:] == [Case("W2x", DEFAULT)]
    assert choose([], ["own-price"], None) == [
        Case(workload, settings)
        for settings in ("own-price", "constant")
        for workload in ("marked", "W2x")
    ]
    assert choose(["fleet-64"], [], None) == [Case("fleet-64", DEFAULT), Case("fleet-1", DEFAULT)]
    for case in choose([], [], "x"):
        assert case.base is None or case.base.base is None


def test_a_file_of_settings_is_an_engine_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('engine = "vllm-v1"\nasync_scheduling = false\n')
    (case,) = choose(["W1"], [str(path)], None)
    own = {"engine": "vllm-v1", "async_scheduling": False}
    assert case.table == WORKLOADS["W1"].settings | own


class Known(NamedTuple):
    """What a run comes to."""

    steps: int
    """Steps that compute something."""
    seq_steps: int
    """Decodes, over all steps."""
    preemptions: int
    end_ns: int
    digest: str
    """The first 16 digits of the SHA-256 of when each request began and ended, in trace order."""


SYNC = {"engine": "vllm-0.6.3", "disable_async_output_proc": True, "max_model_len": 8_192}
SWAP = {"preemption_mode": "swap", "num_cpu_blocks_override": 4_000}
CHUNKED = {"enable_chunked_prefill": True, "max_num_batched_tokens": 512}
V1 = {"engine": "vllm-v1"}


KNOWN = [
    ("W2", V1, Known(11_941, 1_268_299, 1_703, 366_062_987_236, "548791c1348f88fc")),
    ("W2", SYNC, Known(12_850, 1_268_368, 1_632, 374_928_381_422, "7192dad9f2567c1d")),
    ("decode-16", SYNC, Known(5_659, 66_671, 0, 42_929_055_125, "b73f9d981e1f347c")),
]
SLOW = [
    ("W1", V1, Known(22_755, 1_270_000, 0, 398_212_557_276, "11703a7f3067630a")),
    ("W2", SYNC | SWAP, Known(12_440, 1_270_000, 1_761, 339_917_912_198, "912ebb7fe0f374d9")),
    ("W2", SYNC | CHUNKED, Known(12_603, 1_270_000, 0, 337_284_692_198, "fbda8e3fa6079cf9")),
]
SLOWEST = [
    ("W1", SYNC, Known(22_772, 1_270_000, 0, 398_314_557_276, "cfda454bec194361")),
    ("W2x", SYNC, Known(61_961, 5_761_925, 22_425, 723_200_968_960, "ac7549971330a363")),
    ("W3", SYNC, Known(421_598, 17_471_878, 0, 4_989_754_650_692, "aceced870c2c8220")),
    ("decode-1024", SYNC, Known(6_000, 4_109_017, 0, 577_823_165_506, "c1faa49c9f4347d3")),
]


@pytest.mark.parametrize(
    ("workload", "settings", "known"),
    [
        *KNOWN,
        *(pytest.param(*each, marks=long) for each in SLOW),
        *(pytest.param(*each, marks=whole) for each in SLOWEST),
    ],
)
def test_a_run_comes_to_what_is_known(
    workload: str, settings: dict[str, Any], known: Known
) -> None:
    made = WORKLOADS[workload]
    result = simulate(made.make(None), made.settings | settings)
    steps, requests = result.steps, result.requests
    names = "first_token_ns", "finish_ns", "num_preemptions"
    times = [list(each) for each in zip(*(requests[name].tolist() for name in names), strict=True)]
    assert known == Known(
        int((steps["prefill_seqs"] + steps["decode_seqs"] > 0).sum()),
        int(steps["decode_seqs"].sum()),
        int(requests["num_preemptions"].sum()),
        int(steps["end_ns"].max()),
        hashlib.sha256(json.dumps(times).encode()).hexdigest()[:16],
    )
