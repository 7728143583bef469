"""Speculative decoding under `kvsim run`: tokens a step, time, the ledger, and what is refused.

Unless a test says otherwise, every step takes 1 ms, and a token of a prompt or a draft nothing.
"""

import json
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import make_trace
from marks import examples
from xxhash import xxh3_64_intdigest

from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.cost import ConstantCost, RooflineCost
from kvsim.cost.estimates import Passes
from kvsim.cost.explain import Work
from kvsim.engines.vllm_v1.drafts import Drafts, Rates, Recorded
from kvsim.errors import ConfigError
from kvsim.machine.hardware import load_hardware
from kvsim.machine.models import load_model
from kvsim.results.ledger import KERNELS, TIME_PARTS
from kvsim.run.assembly import assemble
from kvsim.run.result import Result
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload import Trace

MS = 1_000_000
SMALL = {
    "model": "qwen2.5-0.5b",
    "hardware": "h100",
    "num_gpu_blocks_override": 100,
    "max_model_len": 176,
    "async_scheduling": False,
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def run(
    trace: Trace, *, draft_token_us: int = 0, speculative: dict[str, Any], **changes: Any
) -> Result:
    none = {"decode_seq_us": 0, "context_token_ns": 0}
    cost = {"model": "constant", "step_us": 1000, "prefill_token_us": draft_token_us, **none}
    table = {**SMALL, "cost": cost, "speculative_config": {**NGRAM, **speculative}}
    return simulate(trace, table | changes)


def requests(*lengths: tuple[int, int], every_ns: int = 0) -> Trace:
    """Requests of (prompt, output) tokens, one every so many nanoseconds."""
    trace = make_trace([(prompt, output, None) for prompt, output in lengths])
    rows = [replace(row, arrival_ns=row.index * every_ns) for row in trace.rows]
    return replace(trace, rows=rows)


def parts(result: Result, place: int = 0) -> dict[str, float]:
    """The parts of one request in ms, without those of no time."""
    found = {name: int(result.requests[name][place]) / MS for name in TIME_PARTS}
    return {name.removesuffix("_ns"): ms for name, ms in found.items() if ms}


def test_a_step_yields_a_token_and_the_drafts_that_are_accepted() -> None:
    """The prompt yields one token, two steps four each. Those of a step are one message."""
    result = run(requests((10, 9)), speculative={"acceptance_rate": 1.0})
    summary = result.summary
    assert list(result.requests["finish_ns"]) == [3 * MS]
    assert (summary["mean_ttft_ms"], summary["mean_tpot_ms"]) == (1.0, 2 / 8)
    assert (summary["mean_itl_ms"], summary["p99_itl_ms"]) == (1.0, 1.0)
    assert summary["spec_decode_num_drafts"] == 2
    assert summary["spec_decode_draft_tokens"] == summary["spec_decode_accepted_tokens"] == 6
    assert summary["spec_decode_acceptance_length"] == 4
    assert summary["spec_decode_accepted_share"] == 1
    assert list(result.steps["draft_tokens"]) == [0, 3, 3]
    assert list(result.steps["prefill_tokens"]) == [10, 0, 0]


def test_a_run_without_a_draft_counts_none() -> None:
    summary = run(requests((10, 1)), speculative={"acceptance_rate": 1.0}).summary
    assert summary["spec_decode_draft_tokens"] == 0
    assert summary["spec_decode_acceptance_length"] is None


def test_tokens_behind_the_last_one_are_dropped() -> None:
    result = run(requests((10, 3)), speculative={"acceptance_rate": 1.0})
    assert list(result.requests["output_tokens"]) == [3]
    assert list(result.requests["finish_ns"]) == [2 * MS]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_that_are_all_rejected_gain_nothing(asynchronous: bool) -> None:
    sent = requests((10, 9), (33, 20), every_ns=MS // 2)
    with_drafts, without = (
        run(sent, speculative=each, async_scheduling=asynchronous)
        if each
        else simulate(sent, {**SMALL, "cost": with_drafts_cost(), "async_scheduling": asynchronous})
        for each in ({"acceptance_rate": 0.0}, {})
    )
    for name in ("first_token_ns", "finish_ns"):
        assert list(with_drafts.requests[name]) == list(without.requests[name])
    assert with_drafts.summary["spec_decode_acceptance_length"] == 1


def with_drafts_cost() -> dict[str, Any]:
    none = {"prefill_token_us": 0, "decode_seq_us": 0, "context_token_ns": 0}
    return {"model": "constant", "step_us": 1000, **none}


def test_the_ledger_says_what_drafts_cost() -> None:
    """A prompt token or draft takes 100 us. One of three drafts is accepted, so that three steps
    yield 2 tokens each, and 300 us of each are for drafts. The drafter takes 50 us a step."""
    speculative = {"acceptance_distribution": [0.0, 1.0, 0.0, 0.0], "drafter_us": 50}
    result = run(requests((10, 7)), draft_token_us=100, speculative=speculative)
    assert parts(result) == {
        "own_prefill": 1.0,
        "accepted_drafts": 0.3,
        "rejected_drafts": 0.6,
        "drafting": 0.2,
        "host_overhead": 4.0,
    }
    assert list(result.steps["end_ns"] - result.steps["start_ns"]) == [2050_000] + [1350_000] * 3
    assert list(result.steps["drafter_ns"]) == [50_000] * 4
    assert list(result.steps["accepted_tokens"]) == [0, 1, 1, 1]


def test_a_prompt_of_another_request_interferes_and_its_drafts_do_not() -> None:
    """r1's prompt of 20 tokens, 2 ms, runs beside a step of r0 with three drafts."""
    sent = requests((10, 5), (20, 1), every_ns=MS)
    result = run(sent, draft_token_us=100, speculative={"acceptance_rate": 1.0})
    assert parts(result) == {
        "own_prefill": 1.0,
        "interference": 2.0,
        "accepted_drafts": 0.3,
        "host_overhead": 2.0,
    }


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(0, 3 * MS),
    st.sampled_from(["ngram", "eagle", "draft_model", "dflash"]),
    st.booleans(),
    st.integers(12, 40),
)
def test_every_nanosecond_is_accounted_for(
    lengths: list[tuple[int, int]], every_ns: int, method: str, ahead: bool, blocks: int
) -> None:
    """Also under pressure, where requests are preempted."""
    speculative = {"method": method, "acceptance_rate": 0.6, "drafter_us": 7.0}
    tight = {"num_gpu_blocks_override": blocks, "async_scheduling": ahead}
    sent = requests(*lengths, every_ns=every_ns)
    result = run(sent, draft_token_us=3, speculative=speculative, **tight)
    table, steps = result.requests, result.steps
    assert result.meta["outcome"]["kind"] == "finished"
    assert list(table["output_tokens"]) == [output for _, output in lengths]
    lives = table["finish_ns"] - table["arrival_ns"]
    assert (sum(table[name] for name in TIME_PARTS) == lives).all()
    assert all((table[name] >= 0).all() for name in TIME_PARTS)
    whole = sum(steps[name] for name in (*KERNELS, "transfer_ns", "link_wait_ns"))
    assert (whole == steps["end_ns"] - steps["start_ns"]).all()
    assert (steps["accepted_tokens"] <= steps["draft_tokens"]).all()


def sequence(id: str, length: int, prompt: int = 10) -> Request:
    made = Request(0, id, prompt)
    made.length = length
    return made


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(0, 2**40))
def test_a_draft_is_accepted_where_the_draw_is_at_most_its_rate(
    rates: list[float], seed: int
) -> None:
    """The draw is a number from 0 to 1 by the seeded hash of where the drafts stand."""
    rates.sort(reverse=True)
    for length in range(20):
        place = sequence("a request", length)
        drawn = (xxh3_64_intdigest(f"{length}/a request".encode(), seed) + 1) / 2**64
        for drafts in range(len(rates) + 1):
            expected = sum(rate >= drawn for rate in rates[:drafts])
            assert Rates(rates, seed).accepted(place, drafts) == expected


def test_a_draft_is_accepted_at_exactly_its_rate_and_not_below_it() -> None:
    """At a place whose draw is small enough to be a float without rounding."""
    for length in count():
        drawn = xxh3_64_intdigest(f"{length}/a request".encode(), 0) + 1
        if drawn < 1 << 53:
            break
    place = sequence("a request", length)
    assert Rates([drawn / 2**64], seed=0).accepted(place, 1) == 1
    assert Rates([(drawn - 1) / 2**64], seed=0).accepted(place, 1) == 0


def test_rates_are_those_of_many_steps_and_belong_to_the_place_in_the_output() -> None:
    rates, number = Rates([0.8, 0.5, 0.1], seed=3), 4000
    places = [sequence("a", 11 + place) for place in range(number)]
    drawn = [rates.accepted(each, 3) for each in places]
    shares = [sum(each > place for each in drawn) / number for place in range(3)]
    # Three deviations of a share of 4,000 draws are below 0.024.
    assert shares == pytest.approx([0.8, 0.5, 0.1], abs=0.024)
    assert [rates.accepted(each, 3) for each in places[::-1]] == drawn[::-1]
    assert [rates.accepted(each, 1) for each in places] == [min(each, 1) for each in drawn]
    assert [Rates([0.8, 0.5, 0.1], seed=4).accepted(each, 3) for each in places] != drawn


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 40))
def test_recorded_steps_are_met_again(steps: list[int], drafts: int, output: int) -> None:
    """A dull twin writes the recorded run out token by token."""
    left = [step - place for step in steps * output for place in range(step + 1)]
    known = Recorded()
    known.learn([steps])
    tokens = 1
    while tokens < output:
        expected = min(drafts, left[tokens - 1])
        assert known.accepted(sequence("a", 10 + tokens), drafts) == expected
        tokens += 1 + expected


def test_a_trace_may_say_what_is_accepted() -> None:
    sent = requests((10, 9))
    rows = [replace(row, accepted_drafts=(2, 0, 3)) for row in sent.rows]
    result = run(replace(sent, rows=rows), speculative={})
    assert list(result.steps["accepted_tokens"]) == [0, 2, 0, 3]
    assert list(result.requests["finish_ns"]) == [4 * MS]


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"acceptance_rate": 0.5}, (0.5, 0.25, 0.125)),
        # vLLM 0.33.0 config/speculative.py, `_acceptance_length_to_rates`
        ({"synthetic_acceptance_length": 2.6}, (1.0, 0.6, 0.0)),
        ({"synthetic_acceptance_rates": [0.9, 0.9, 0.2]}, (0.9, 0.9, 0.2)),
        ({"acceptance_distribution": [0.4, 0.3, 0.2, 0.1]}, (0.6, 0.3, 0.1)),
    ],
)
def test_ways_to_say_what_is_accepted(keys: dict[str, Any], rates: tuple[float, ...]) -> None:
    config = make_config({**SMALL, "speculative_config": {**NGRAM, **keys}})
    speculation = assemble(config).speculation
    assert speculation is not None and isinstance(speculation.verifier, Rates)
    assert speculation.verifier.rates == pytest.approx(rates)


class EverySecond:
    """A user's own verifier: the whole draft or nothing, in turn."""

    def accepted(self, sequence: Request, drafts: int) -> int:
        return drafts * (sequence.length % 2)


class Short(Drafts):
    """A user's own drafter: one draft a step, whatever was asked for, and 1 ms for it."""

    def propose(self, sequence: Request) -> int:
        return 1

    def drafter_ns(self, plan: Plan) -> int:
        return MS if plan.samples else 0


def test_a_users_own_parts_are_obeyed() -> None:
    own = {"acceptance": f"{__name__}:EverySecond", "drafter_us": 0}
    result = run(requests((10, 9)), speculative=own)
    # Known tokens before each step: 11, 15, 19.
    assert list(result.steps["accepted_tokens"]) == [0, 3, 3]
    drafter = {"method": f"{__name__}:Short", "acceptance_rate": 1.0}
    result = run(requests((10, 5)), speculative=drafter)
    assert list(result.steps["draft_tokens"]) == [0, 1, 1]
    assert list(result.requests["finish_ns"]) == [6 * MS]


def test_passes_of_a_drafter_are_priced_by_what_the_cost_model_explains() -> None:
    """10 us a prompt or draft token, 20 us a sequence, 1 ns a token of context; two sequences with
    three drafts each and 100 tokens: 2 x 20 + 6 x 10 + 0.1 us in the first pass of all layers."""
    cost = ConstantCost(1000, 10, 20, 1)
    plan = Plan(8)
    plan.decode_seqs, plan.draft_tokens, plan.context_tokens = 2, 6, 100
    assert Passes(cost, 1.0, 1)(plan) == 100_100
    assert Passes(cost, 0.5, 3)(plan) == (100_100 + 2 * 40_100) / 2
    assert Passes(cost, 1.0, 3)(Plan(8)) == 0


def test_every_pass_of_a_drafter_has_logits_whatever_its_share_of_the_layers() -> None:
    cost = RooflineCost(load_model("tiny"), load_hardware("h100-sxm"), make_config({}))
    plan = Plan(8)
    plan.decode_seqs, plan.context_tokens = 2, 100
    counts = [0, 0, 2, 100, 2, 0]
    head_ns = cost.explain(Work(*(np.array([count]) for count in counts)))["head"][0]
    assert head_ns > 0
    assert Passes(cost, 0.0, 3)(plan) == round(3 * head_ns)


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    random = Random(5)
    lengths = [(random.randint(1, 60), random.randint(2, 40)) for _ in range(20)]
    sent = requests(*lengths, every_ns=MS)
    ends = [
        list(run(sent, speculative={"acceptance_rate": 0.6}, seed=each).requests["finish_ns"])
        for each in (1, 1, 2)
    ]
    assert ends[0] == ends[1] != ends[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vllm-0.6.3", "async_scheduling": None}, "vllm-0.6.3 has no speculative"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens"),
        ({"speculative_config": {"num_speculative_tokens": 2}}, "give a method"),
        ({"speculative_config": {**NGRAM, "metod": 1}}, "unknown key 'metod'; did you mean"),
        ({"speculative_config": {**NGRAM, "method": "medusa"}}, "unknown 'medusa'"),
        (
            {"speculative_config": {**NGRAM, "acceptance_rate": 1, "acceptance": "a:b"}},
            "acceptance and acceptance_rate are both given",
        ),
        (
            {"speculative_config": {**NGRAM, "synthetic_acceptance_rates": [0.1, 0.2, 0.1]}},
            "none above the one before it",
        ),
        (
            {"speculative_config": {**NGRAM, "acceptance_distribution": [0.5, 0.5]}},
            "give 4 shares that add up to 1",
        ),
        (
            {"speculative_config": {**NGRAM, "synthetic_acceptance_length": 4.5}},
            "4.5 is not in 1 .. 4",
        ),
        (
            {"speculative_config": {**NGRAM, "method": "draft_model", "acceptance_rate": 1}},
            "give the name of the draft model",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    table = {**SMALL, "speculative_config": {**NGRAM, "acceptance_rate": 0.5}, **settings}
    with pytest.raises(ConfigError) as caught:
        assemble(make_config(table))
    assert message in str(caught.value) and str(caught.value).startswith("speculative_config")


def test_a_trace_that_says_nothing_of_drafts_needs_a_rate() -> None:
    with pytest.raises(ConfigError, match="nothing says how many drafts are accepted"):
        run(requests((10, 9)), speculative={})


def test_a_threshold_below_the_drafts_is_remarked_upon_and_ends_the_engine() -> None:
    """r1 arrives while r0 decodes; its prompt of one token is padded to 1 + 3 tokens."""
    result = run(
        requests((10, 20), (1, 5), every_ns=2 * MS),
        speculative={"acceptance_rate": 0.5},
        long_prefill_token_threshold=3,
    )
    assert any("is below 1 + 3 drafts" in note for note in result.meta["notes"])
    outcome = result.meta["outcome"]
    assert outcome["kind"] == "engine-error" and "request 1 was padded" in outcome["explanation"]


def test_estimates_are_called_estimates() -> None:
    eagle = {"method": "eagle3", "num_speculative_tokens": 2, "acceptance_rate": 0.5}
    parts = assemble(make_config({**SMALL, "speculative_config": eagle}))
    assert "ESTIMATED: 2 passes of one layer" in parts.cost.describe()["drafter"]
    assert any("memory of the drafter on each GPU, ESTIMATED" in note for note in parts.notes)
    other = {**eagle, "method": None, "model": "qwen2.5-0.5b"}
    parts = assemble(make_config({**SMALL, "model": "llama-3.1-8b", "speculative_config": other}))
    assert "2 passes of qwen2.5-0.5b" in parts.cost.describe()["drafter"]
    assert any("ESTIMATED: 2 passes of qwen2.5-0.5b" in note for note in parts.notes)


def test_without_speculation_there_are_no_columns_of_it() -> None:
    result = simulate(requests((10, 9)), {**SMALL, "cost": with_drafts_cost()})
    assert "draft_tokens" not in result.steps
    assert not [key for key in result.summary if key.startswith("spec_decode")]
    assert not np.any(result.steps["drafter_ns"])
    json.dumps(result.summary)


def test_drafts_are_tokens_of_a_step() -> None:
    """Ranks that share experts are padded to the tokens of the largest step."""
    plan = Plan(8)
    plan.decode_seqs, plan.draft_tokens = 2, 6
    plan.add_chunk(0, 5, 0, 0)
    assert plan.tokens == 2 + 6 + 5
