"""Rules of prefix sharing under each engine: what they change, and what no mix of them breaks."""

from __future__ import annotations

import inspect
from random import Random
from typing import Any

import pytest
import worlds
from exact.conformance.generate_prompts import make_arrivals, make_prompt
from exact.engines.mixes import CHUNKED, ENGINES, SIZE, VARIANTS, make, play, prefills, rows

import kvsim
from kvsim.against.conform.step_log import corpus_requests
from kvsim.engines import BLOCK_MANAGERS
from kvsim.errors import ConfigError
from kvsim.policies import tables
from kvsim.policies.tables import FULL_HITS, HITS_SAVE, PUBLISH_AT

RESEARCHED = [name for name in VARIANTS if not name.startswith("v1")]
"""Engines whose rules of sharing can be changed."""
EACH = pytest.mark.parametrize("engine", [name for name in ENGINES if name in RESEARCHED])
PROMPT = [7] * 9
"""Two full blocks and a token."""


def test_the_table_of_engines_says_what_the_constructors_say() -> None:
    managers = ("prefix-caching", "nano-vllm", "nano-vllm-2025-08")
    for rule in ("publish_at", "hits_save", "full_hit"):
        (line,) = [line for line in str(tables.__doc__).splitlines() if f"| `{rule}`" in line]
        stated = [cell.strip(" `") for cell in line.split("|")[2:-1]]
        parameters = [inspect.signature(BLOCK_MANAGERS[m]).parameters[rule] for m in managers]
        del stated[1]  # vLLM V1 has its own and no others
        assert stated == [parameter.default for parameter in parameters]


# -- from when on --------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(("rule", "shared"), [("allocation", 2), ("computed", 0)])
def test_from_when_on_requests_share(engine: str, rule: str, shared: int) -> None:
    """r0 and r1 come together, r2 when they are computed."""
    made = make(engine, publish_at=rule)
    log = list(play(made, rows((0, PROMPT, 5), (0, PROMPT, 5), (2, PROMPT, 5))))
    assert log[0]["free_gpu_blocks"] == 40 - 6 + shared
    # vLLM 0.6.3 shares the blocks of the same step, and yet computes them twice.
    cached = shared * SIZE if engine != "0.6.3" else 0
    assert [p[1] for p in prefills(log, "r1")] == [cached]
    assert [p[1] for p in prefills(log, "r2")] == [2 * SIZE]


class Witness:
    """Remembers which blocks the steps of a run have computed."""

    def __init__(self) -> None:
        self.computed: set[int] = set()
        self.hits = 0
        """Prefills that skip something."""
        self.blind = 0
        """Of these, those that skip what no step has computed."""

    def look(self, plan: Any) -> None:
        """A step is composed."""
        for each in plan.prefills:
            if each.cached:
                keys = self._keys(each.request, each.computed_before + each.cached + SIZE - 1)
                self.hits += 1
                self.blind += not self.computed.issuperset(keys[each.computed_before // SIZE :])

    def saw(self, plan: Any) -> None:
        """The step of a plan is over, its tokens are not booked yet."""
        for each in plan.prefills:
            self.computed.update(self._keys(each.request, each.computed_before + each.scheduled))
        for request in plan.decodes:
            if request.finish_ns < 0:
                self.computed.update(self._keys(request, request.sequences[0].length))

    @staticmethod
    def _keys(request: Any, tokens: int) -> list[int]:
        sequence = request.sequences[0]
        known = min(tokens, sequence.length + sequence.placeholders)
        keys: list[int] = sequence._stream.keys(0, known // SIZE, SIZE)
        return keys


def random_case(seed: int) -> tuple[str, dict[str, str], Any, list[dict[str, Any]]]:
    """An engine under random rules, and requests that share a lot."""
    rng = Random(seed)
    engine = rng.choice(sorted(RESEARCHED))
    rules = {
        "publish_at": rng.choice(sorted(PUBLISH_AT)),
        "hits_save": rng.choice(sorted(HITS_SAVE)),
        "full_hit": rng.choice(sorted(FULL_HITS)),
    }
    requeue = rng.choice(["head", "tail", "arrival"])
    blocks = rng.choice([8, 9, 11, 20])
    budget = rng.choice([8, 16, 32]) if engine in CHUNKED else 60
    longest, values = min(2 * blocks, 28), rng.choice([1, 2, 3, 40])
    trace: list[dict[str, Any]] = []
    for arrival in make_arrivals(rng, rng.randint(4, 18)):
        prompt = make_prompt(rng, trace, values, longest)
        output = rng.choice([1, 2, rng.randint(1, 12)])
        trace += rows((arrival, prompt, output), first=len(trace))
    return engine, rules, make(engine, blocks, budget, requeue, **rules), trace


def test_any_mix_of_rules_keeps_the_books_and_every_request_ends() -> None:
    preempted = hits = 0
    for seed in range(350):
        engine, rules, made, trace = random_case(seed)
        log = list(play(made, trace))
        where = f"seed {seed}: {engine}, {rules}"
        assert "error" not in log[-1], where
        assert sorted(name for step in log for name in step["finished"]) == sorted(
            row["id"] for row in trace
        ), where
        scheduler, tables = made
        assert tables.gpu.used == 0, where
        for step in log:
            assert step.get("batched_tokens", 0) <= scheduler.max_num_batched_tokens, where
            preempted += len(step.get("preempted", ()))
            hits += sum(each[2] > 0 for each in step.get("prefill", ()))
    assert min(preempted, hits) > 150


def test_under_computed_nobody_skips_what_no_step_has_computed() -> None:
    """The steps are settled as late as the engine allows."""
    hits, blind = dict.fromkeys(PUBLISH_AT, 0), dict.fromkeys(PUBLISH_AT, 0)
    for seed in range(800):
        engine, rules, made, trace = random_case(seed)
        if engine != "nano 2025":  # which believes in stale hits
            witness = watched_run(*made, trace)
            hits[rules["publish_at"]] += witness.hits
            blind[rules["publish_at"]] += witness.blind
    assert blind["computed"] == 0
    assert blind["allocation"] > 20  # so the witness can tell
    assert min(hits.values()) > 500


def watched_run(scheduler: Any, tables: Any, trace: list[dict[str, Any]]) -> Witness:
    """Run all requests."""
    batch = worlds.batch_of(tables, scheduler, [row["output_len"] for row in trace])
    arrivals = corpus_requests(trace)
    witness, steps, now = Witness(), worlds.Steps(scheduler, batch), 0
    while arrivals or len(batch) or steps.flying:
        while arrivals and arrivals[0][0] <= now:
            worlds.arrive(scheduler, batch, arrivals.pop(0)[1])
        plan = steps.compose(now)
        witness.look(plan)
        if steps.late(plan):
            witness.saw(steps.flying[0])
            steps.settle(now)
        now += 1
        batch.ended.clear()
    return witness


# -- at what gain --------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(("rule", "charged"), [("computation", 9), ("charge", 1), ("admission", 1)])
def test_what_a_hit_is_charged(engine: str, rule: str, charged: int) -> None:
    log = list(play(make(engine, hits_save=rule), rows((0, PROMPT, 5), (1, PROMPT, 2))))
    assert prefills(log, "r1") == [[charged, 8]]


@EACH
@pytest.mark.parametrize(
    ("rule", "budget", "admitted"),
    [
        ("computation", 10, 1),
        ("charge", 9, 1),
        ("charge", 10, 2),  # the first is charged 1, so that 9 are left for the second's 9 tokens
        ("admission", 9, 2),
    ],
)
def test_what_must_fit_the_token_budget(engine: str, rule: str, budget: int, admitted: int) -> None:
    """r1 and r2 find the blocks of r0, which has ended."""
    made = make(engine, budget=budget, hits_save=rule)
    log = list(play(made, rows((0, PROMPT, 1), (3, PROMPT, 1), (3, PROMPT, 1))))
    step = next(step for step in log if step["added"] == 2)
    assert len(step["prefill"]) == admitted


@EACH
@pytest.mark.parametrize(("rule", "at"), [("computation", 3), ("charge", 3), ("admission", 1)])
def test_what_must_fit_the_pool(engine: str, rule: str, at: int) -> None:
    """r0 holds 3 of 5 blocks in steps 0 to 2; r1 shares two of its three."""
    log = list(play(make(engine, blocks=5, hits_save=rule), rows((0, PROMPT, 3), (1, PROMPT, 2))))
    (step,) = [step["step"] for step in log if any(each[0] == "r1" for each in step["prefill"])]
    assert step == at


@pytest.mark.parametrize("engine", ["nano", "0.6.3 chunked"])
def test_hits_take_part_in_chunks_if_they_are_charged(engine: str) -> None:
    """The prompt of r1 begins with the 16 tokens of r0's; a step takes 8."""
    trace = rows((0, [7] * 17, 1), (6, [7] * 16 + [8] * 4, 1))
    log = list(play(make(engine, budget=8, hits_save="computation"), trace))
    # One token of a chunk is always computed.
    assert prefills(log, "r1") == [[8, 7], [8, 7], [4, 0]]
    log = list(play(make(engine, budget=8, hits_save="admission"), trace))
    assert prefills(log, "r1") == [[4, 16]]


# -- up to where ---------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize(
    ("rule", "charged", "cached"), [("last-block", 4, 4), ("last-token", 1, 7), ("nothing", 0, 8)]
)
def test_what_is_left_of_a_prompt_that_is_all_there(
    engine: str, rule: str, charged: int, cached: int
) -> None:
    made = make(engine, full_hit=rule, hits_save="admission")
    log = list(play(made, rows((0, [7] * 8, 1), (3, [7] * 8, 2))))
    assert prefills(log, "r1") == [[charged, cached]]
    assert log[-1]["finished"] == ["r1"]


@EACH
def test_a_whole_last_block_is_shared_if_it_is_looked_up(engine: str) -> None:
    """While r0 and r1 run, they hold two blocks, and one each for their outputs."""
    free = {}
    for rule in FULL_HITS:
        trace = rows((0, [7] * 8, 6), (2, [7] * 8, 4))
        log = list(play(make(engine, full_hit=rule), trace))
        free[rule] = log[4]["free_gpu_blocks"]
    assert free["last-token"] == free["nothing"] == 40 - 4
    # vLLM 0.6.3 merges blocks with equal content in any case.
    assert free["last-block"] == (40 - 4 if engine == "0.6.3" else 40 - 5)


# -- in whole runs -------------------------------------------------------------------------------

SAME = worlds.hashed(4, *((i * 5.0, 8, 3, [1, 2]) for i in range(12)))


def cached_tokens(engine: str, **rules: str) -> int:
    settings: dict[str, Any] = {"engine": engine, "enable_prefix_caching": True}
    if engine != "vllm-0.6.3":
        settings["disable_async_output_proc"] = None
    if engine.startswith("nano"):
        settings["watermark"] = None
    config = worlds.config(**settings, block_manager_args=rules)
    return int(sum(kvsim.simulate(SAME, config).steps["cached_tokens"]))


@pytest.mark.parametrize("engine", ["vllm-0.6.3", "nano-vllm", "nano-vllm-2025-08"])
def test_rules_can_be_set_for_a_run(engine: str) -> None:
    """All have the same two blocks; none is computed when the first two come."""
    by_rule = {
        rule: cached_tokens(engine, full_hit=rule, publish_at="computed") for rule in FULL_HITS
    }
    assert 0 < by_rule["last-block"] < by_rule["last-token"] < by_rule["nothing"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"publish_at": "compute"},
            "publish_at: unknown 'compute'; did you mean 'computed'. choose from",
        ),
        ({"hits_save": "all"}, "hits_save: unknown 'all'; choose from"),
        ({"full_hit": "none"}, "full_hit: unknown 'none'; choose from last-block"),
    ],
)
def test_an_unknown_rule_is_refused_with_the_names(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cached_tokens("vllm-0.6.3", **settings)


@pytest.mark.parametrize("key", ["publish_at", "hits_save", "full_hit"])
def test_rules_of_sharing_need_a_prefix_cache(key: str) -> None:
    with pytest.raises(ConfigError, match=f"block_manager_args.{key}: naive has no prefix cache"):
        kvsim.simulate(SAME, worlds.config(block_manager_args={key: "any"}))
