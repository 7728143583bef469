"""Adapters (LoRA) and clients that give up, under `kvsim run`. Every step takes 1 ms."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made import make_trace, read_with

from kvsim.core.batch import Batch
from kvsim.engines.vllm_v1.scheduler import VllmV1
from kvsim.errors import ConfigError, TraceError
from kvsim.explain.story import tell
from kvsim.fleet import simulate_fleet
from kvsim.results.ledger import TIME_PARTS
from kvsim.run.assembly import assemble
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload import TokenContent, Trace, native

MS = 1_000_000
SMALL: dict[str, Any] = {
    "model": "qwen2.5-0.5b",
    "hardware": "h100",
    "num_gpu_blocks_override": 100,
    "max_model_len": 176,
    "async_scheduling": False,
    "cost": {
        "model": "constant",
        "step_us": 1000,
        "prefill_token_us": 0,
        "decode_seq_us": 0,
        "context_token_ns": 0,
    },
}


def sent(*rows: dict[str, Any], prompt: int = 20) -> Trace:
    """Requests of ten output tokens and equal prompts, all at 0, with further fields."""
    content = TokenContent((1,) * prompt)
    trace = make_trace([(prompt, 10, content) for _ in rows])
    made = [
        replace(row, **{"arrival_ns": 0, **given})
        for row, given in zip(trace.rows, rows, strict=True)
    ]
    return replace(trace, rows=made)


def ends_ms(result: Result) -> list[float]:
    return [float(each) / MS for each in result.requests["finish_ns"]]


A, B = {"lora": "a"}, {"lora": "b"}


def test_a_request_whose_adapter_finds_no_place_is_passed_over() -> None:
    """With one place, r1 waits for both others; r2 goes first. With two, nobody waits."""
    trace = sent(A, B, A)
    result = simulate(trace, {**SMALL, "enable_lora": True})
    assert ends_ms(result) == [10, 20, 10]
    assert result.requests["waiting_loras_ns"][1] == 10 * MS
    assert result.summary["head_blocked_s"]["loras"] == pytest.approx(0.010)
    assert any("max_loras: 1 requests were passed over" in line for line in result.meta["notes"])
    result = simulate(trace, {**SMALL, "enable_lora": True, "max_loras": 2})
    assert ends_ms(result) == [10, 10, 10]
    assert not any("max_loras" in line for line in result.meta["notes"])


def test_requests_without_an_adapter_need_no_place() -> None:
    assert ends_ms(simulate(sent(A, {}), {**SMALL, "enable_lora": True})) == [10, 10]


def test_adapters_share_no_prefix() -> None:
    rows = [A, {**B, "arrival_ns": 20 * MS}, {**A, "arrival_ns": 40 * MS}]
    result = simulate(sent(*rows), {**SMALL, "enable_lora": True})
    assert list(result.requests["num_cached_tokens"]) == [0, 0, 16]


def test_without_adapters_who_names_one_is_served_and_it_is_said() -> None:
    result = simulate(sent(A, B), SMALL)
    assert ends_ms(result) == [10, 10]
    assert any(line.startswith("lora: requests name adapters") for line in result.meta["notes"])


def test_a_limit_without_adapters_limits_nothing_and_it_is_said() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 1, "acceptance_rate": 0.0}
    for further in ({}, {"speculative_config": drafts}):
        result = simulate(sent(A, B), {**SMALL, "max_loras": 1, **further})
        assert ends_ms(result) == [10, 10]
        assert any(line.startswith("max_loras: there are no") for line in result.meta["notes"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_lora": True, "engine": "sglang"}, "enable_lora: sglang serves no adapters"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assemble(make_config({**SMALL, "async_scheduling": None, **settings}))


# -- clients that give up ------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_that_is_given_up_ends_with_the_step_under_way(asynchronous: bool) -> None:
    """r0's client leaves after 3.5 ms, in the middle of the fourth step."""
    trace = sent({"abort_after_ns": 3_500_000}, {})
    result = simulate(trace, {**SMALL, "async_scheduling": asynchronous})
    requests, summary = result.requests, result.summary
    assert (requests["status"], requests["reason"]) == (["aborted", "completed"], ["aborted", ""])
    assert ends_ms(result) == [4, 10]
    assert requests["output_tokens"][0] == 4
    assert (summary["completed"], summary["aborted"], summary["rejected"]) == (1, 1, 0)
    assert summary["unfinished"] == 0
    story = tell(summary, requests, result.steps, result.transitions, 0)
    assert "given up by its client after 4.00\xa0ms" in story.about
    assert story.moments[-1].text == "given up by its client"
    lives = requests["finish_ns"] - requests["arrival_ns"]
    assert (sum(requests[name] for name in TIME_PARTS) == lives).all()


def test_its_blocks_are_free_for_others() -> None:
    """The pool holds one prompt. r1 waits until r0 is given up; r2 is given up while it waits."""
    rows = {"abort_after_ns": 3 * MS}, {}, {"abort_after_ns": 5 * MS}
    tight = {"num_gpu_blocks_override": 12, "enable_prefix_caching": False}
    result = simulate(sent(*rows, prompt=100), SMALL | tight)
    assert ends_ms(result) == [3, 13, 5]
    assert result.requests["output_tokens"].tolist() == [3, 10, 0]


def test_who_gives_up_later_than_its_answer_comes_completes() -> None:
    result = simulate(sent({"abort_after_ns": 11 * MS}), SMALL)
    assert "aborted" not in result.summary and ends_ms(result) == [10]


class Hasty(VllmV1):
    """Gives up every second request at once."""

    def compose(self, batch: Batch, now_ns: int) -> Any:
        for request in [*batch.waiting]:
            if request.index % 2:
                self.abort(batch, request)
        return super().compose(batch, now_ns)


def test_a_policy_gives_up_at_the_time_at_which_it_is_asked() -> None:
    """r1 arrives when the engine has been idle for 20 ms."""
    own = {key: value for key, value in SMALL.items() if key != "async_scheduling"}
    trace = sent({}, {"arrival_ns": 30 * MS})
    result = simulate(trace, {**own, "engine": f"{__name__}:Hasty"})
    requests = result.requests
    assert (requests["status"], ends_ms(result)) == (["completed", "aborted"], [10, 30])
    lives = requests["finish_ns"] - requests["arrival_ns"]
    assert (sum(requests[name] for name in TIME_PARTS) == lives).all()


def test_the_next_turn_of_a_session_is_sent_all_the_same() -> None:
    rows = {"abort_after_ns": 2 * MS, "session": "s"}, {"after": 0, "session": "s"}
    result = simulate(sent(*rows), SMALL)
    assert ends_ms(result) == [2, 12]


def test_replicas_end_early_what_is_given_up() -> None:
    rows = ({"abort_after_ns": 2 * MS}, {}, {}, {"abort_after_ns": 5 * MS})
    result = simulate_fleet(sent(*rows), [SMALL, SMALL])
    assert (result.requests["finish_ns"] / MS).tolist() == [2, 10, 10, 5]


class Reluctant(VllmV1):
    """Does nothing as long as r0 is its only request."""

    def compose(self, batch: Batch, now_ns: int) -> Any:
        if len(batch) == len(batch.waiting) == 1 and batch.waiting[0].index == 0:
            return batch.begin(now_ns, self.max_num_seqs)
        return super().compose(batch, now_ns)


RELUCTANT = {**SMALL, "async_scheduling": None, "engine": f"{__name__}:Reluctant"}


def test_an_idle_engine_is_woken_by_who_comes_before_another_one_is_given_up() -> None:
    """r0 is alone in its engine. r1 ends in the other one, and its client sends r2 to the first."""
    rows = {"abort_after_ns": 100 * MS}, {}, {"after": 1}
    result = simulate_fleet(sent(*rows), [RELUCTANT, RELUCTANT])
    assert list(result.chosen) == [0, 1, 0]
    assert (result.requests["finish_ns"] / MS).tolist() == [20, 10, 20]
    ends_s = [replica.meta["outcome"]["time_s"] for replica in result.replicas]
    assert ends_s == [0.02, 0.02], "nobody waits for a client that has its answer"


def test_an_idle_engine_is_woken_when_a_request_is_given_up() -> None:
    result = simulate(sent({"abort_after_ns": 7 * MS}), RELUCTANT)
    assert ends_ms(result) == [7]
    assert result.meta["outcome"]["time_s"] == 0.007


def test_an_engine_that_goes_on_says_so() -> None:
    trace = sent({"abort_after_ns": 2 * MS})
    result = simulate(trace, {**SMALL, "engine": "vllm-0.6.3", "async_scheduling": None})
    assert result.summary["completed"] == 1
    assert any(line.startswith("abort_after_s: clients") for line in result.meta["notes"])


def test_the_native_format_keeps_all_of_it(tmp_path: Path) -> None:
    trace = sent({**A, "abort_after_ns": 1_250_000, "accepted_drafts": (0, 3)}, {})
    path = tmp_path / "x.jsonl"
    native.write(trace, str(path))
    read = read_with(native.read, str(path))
    assert [replace(row, line=0) for row in read.rows] == [replace(r, line=0) for r in trace.rows]


@pytest.mark.parametrize(
    "field", ['"abort_after_s":-1', '"accepted_drafts":[]', '"accepted_drafts":[-1]', '"lora":7']
)
def test_bad_fields_are_refused(field: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    row = f'{{"input_length":1,"output_length":1,{field}}}'
    path.write_text(f'{{"kvsim_trace":1}}\n{row}\n')
    with pytest.raises(TraceError, match=field.split('"')[1]):
        read_with(native.read, str(path))
