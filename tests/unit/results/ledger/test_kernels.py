"""The time of steps by kernel: what cost models say of rows, against what they say of plans."""

from typing import Any

import numpy as np
import pytest
from small_engines import make_trace
from worlds import MS, config, trace

import kvsim
from kvsim.core.batch import Batch
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.cost.explain import Work
from kvsim.results.ledger import KERNELS
from kvsim.results.ledger.account import alone_ns, completions, split_piece, work_of
from kvsim.run.assembly import assemble
from kvsim.settings.config import make_config

DRAWN = [(7 * (i % 3), 1 + 5 * i % 40, 1 + 3 * i % 19, i % 4) for i in range(25)]
PROFILE = "h200-sxm-llama-3-8b-public"
COSTS: dict[str, dict[str, Any]] = {
    "constant": {"model": "constant"},
    "roofline": {"model": "roofline"},
    "table": {"model": "table", "profile": PROFILE},
}
ENGINES: dict[str, dict[str, Any]] = {
    "0.6.3": {},
    "0.6.3 chunked": {"enable_chunked_prefill": True, "max_num_batched_tokens": 16},
    "0.6.3 samples": {"n": 2, "num_cpu_blocks_override": 200},
    "v1": {"engine": "vllm-v1", "max_num_batched_tokens": 16, "async_scheduling": False},
    "nano": {"engine": "nano-vllm", "max_num_batched_tokens": 16},
}


def settings(engine: str, cost: str, **more: Any) -> dict[str, Any]:
    table = config(num_gpu_blocks_override=20, watermark=0.1)
    del table["disable_async_output_proc"]
    table |= ENGINES[engine] | more
    table["cost"] = COSTS[cost]
    if engine == "nano":
        del table["watermark"]
    return table


class Plans:
    """Keeps what a step's row does not tell."""

    def begin(self) -> None:
        self.samples: list[int] = []

    def composed(self, batch: Batch, plan: Plan, now_ns: int, arrived: int) -> None:
        if plan.computes:
            # The last tokens of prompts of vLLM V1 that look like decodes count twice ...
            twice = sum([request.first_token_ns < 0 for request in plan.decodes])
            # ... where a chunk of another request hides that.
            most = plan.decode_seqs + len(plan.prefills)
            self.samples.append(min(plan.samples + twice, most))

    def settled(self, batch: Batch, ended: list[Request]) -> None:
        pass


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_logits_are_found_again(engine: str) -> None:
    plans = Plans()
    result = kvsim.simulate(make_trace(DRAWN), settings(engine, "constant"), watcher=plans)
    steps = result.steps
    instants = steps["start_ns"], steps["end_ns"]
    prompts = completions(*instants, result.requests, result.transitions)
    work = work_of(steps, prompts)
    computes = steps["prefill_seqs"] + steps["decode_seqs"] > 0
    assert work.samples[computes].tolist() == plans.samples
    assert result.requests["num_preemptions"].sum() > 0


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_terms_add_up_to_the_price_of_the_step(engine: str, cost: str) -> None:
    """A decode step to a few nanoseconds of rounding; a prompt's attention is what is left."""
    result = kvsim.simulate(make_trace(DRAWN), settings(engine, cost))
    steps = result.steps
    whole = sum(steps[name] for name in (*KERNELS, "transfer_ns", "link_wait_ns"))
    assert (whole == steps["end_ns"] - steps["start_ns"]).all()
    decodes = (steps["prefill_tokens"] == 0) & (steps["decode_seqs"] > 0)
    assert decodes.any()
    host = steps["host_ns"][decodes]
    assert np.ptp(host - host.min()) <= len(KERNELS) + 1
    assert not steps["unexplained_ns"].any()
    assert not steps["attention_prefill_ns"][decodes].any()
    prompts = steps["prefill_tokens"] > 0
    assert (steps["attention_prefill_ns"][prompts] > 0).all() == (cost != "constant")


@pytest.mark.parametrize("cost", COSTS)
def test_what_decodes_take_alone_is_the_price_of_the_step_without_prompts(cost: str) -> None:
    model = assemble(make_config(settings("v1", cost))).cost
    seqs, contexts = np.array([1, 7, 30, 30]), np.array([40, 700, 90_000, 3_000])
    none = np.zeros(4, dtype=np.int64)
    mixed = Work(np.array([64, 500, 1, 9]), none + 1, seqs, contexts, seqs + 1, none)
    found = []
    for place in range(4):
        plan = Plan(8)
        plan.decode_seqs = plan.samples = int(seqs[place])
        plan.context_tokens = int(contexts[place])
        found.append(model.step_ns(plan))
    computing = np.array(found) + 50 * MS
    split = split_piece(model, mixed.without_prompts(), np.array(found))
    host = split[:, KERNELS.index("host_ns")]
    alone = alone_ns(model, mixed, computing, host)
    assert np.abs(alone - (np.array(found) - host)).max() <= len(KERNELS)


def test_a_cost_model_that_explains_nothing_is_shared_by_tokens() -> None:
    work = Work(*(np.array([each]) for each in (6, 1, 3, 50, 4, 0)))
    assert split_piece(object(), work, np.array([1000])).sum(axis=1).tolist() == [1000]
    assert alone_ns(object(), work, np.array([1000]), np.array([0])).tolist() == [333]


def test_a_launch_floor_is_the_hosts() -> None:
    """The kernels of a step take less than launching them does."""
    result = kvsim.simulate(
        trace((0, 4, 3)),
        config(cost={"model": "constant", "step_us": 0, "decode_seq_us": 5}),
    )
    work = Work(*(np.array([each]) for each in (0, 0, 1, 5, 1, 0)))
    model = assemble(make_config(config(cost={"step_us": 0, "decode_seq_us": 5}))).cost
    [split] = split_piece(model, work, np.array([9_000])).tolist()
    assert dict(zip(KERNELS, split, strict=True))["host_ns"] == 4_000
    assert result.steps["dense_ns"].tolist() == [4 * MS, 5_000, 5_000]
