"""Many seeds: what they change, what they share, and what comes of comparing."""

import msgspec
import numpy as np
import pytest
from marks import long
from places import ROOT

from kvsim.errors import ConfigError
from kvsim.explain.certainty import Comparison, Pair, judge, paired
from kvsim.explain.differences import compare_replay
from kvsim.results.metrics import HEADLINES
from kvsim.run.result import Result
from kvsim.search.compare import How, Load, compare_seeds, load_of, redrawn, replicate
from kvsim.settings.config import RunConfig, make_config
from kvsim.workload import open_trace
from kvsim.workload.spec import Workload

LOAD = Load(None, Workload("random", requests=60, input_len=200, output_len=60, range_ratio=0.8))


def made(**settings: object) -> RunConfig:
    table = {"num_gpu_blocks_override": 600, "request_rate": 20.0, **settings}
    return make_config({"cost": {"model": "constant"}, **table})


def figures(result: Result) -> list[float]:
    return [result.summary["mean_ttft_ms"], result.summary["num_preemptions"]]


def released(result: Result) -> list[int]:
    return list(result.requests["released_ns"])


def lengths(result: Result) -> list[int]:
    return list(result.requests["input_length"])


def run(configs: list[RunConfig], seeds: int, **options: object) -> tuple[Comparison, list[Result]]:
    named = [(f"run {i}", config) for i, config in enumerate(configs)]
    return compare_seeds(LOAD, named, seeds, how=How(jobs=1), **options)  # type: ignore[arg-type]


def test_a_seed_gives_all_configurations_the_same_load_and_every_seed_another() -> None:
    configs = [made(), made(enable_prefix_caching=True)]
    for look in (released, lengths):
        one, two = list(replicate(LOAD, configs, [0, 1], look, How(jobs=1)))
        assert one[0] == one[1] and two[0] == two[1]
        assert one[0] != two[0]


def test_results_do_not_depend_on_the_number_of_processes() -> None:
    configs = [made(), made(watermark=0.2)]
    alone, together = (
        list(replicate(LOAD, configs, range(3), figures, How(jobs=jobs))) for jobs in (1, 2)
    )
    assert alone == together


def test_a_configuration_does_not_differ_from_itself() -> None:
    """On the same seeds not in the least, so that no more than the first look is needed."""
    comparison, results = run([made(), made()], 8)
    assert {verdict.finding for verdict in comparison.verdicts.values()} == {"same"}
    assert (comparison.seeds, comparison.planned) == ((0, 1, 2, 3), 8)
    assert [result.config.seed for result in results] == [0, 0]


def test_two_samples_of_seeds_of_one_configuration_are_not_told_apart() -> None:
    rows = list(replicate(LOAD, [made()], range(16), figures, How(jobs=1)))
    values = np.array([row[0] for row in rows]).T
    estimates = [paired(v[:8], v[8:], whole=False, percentile=False) for v in values]
    assert all(v.finding in ("insignificant", "same") for v in judge(estimates, [0.0, 0.0], 0.05))
    assert values.std(axis=1)[0] > 0


def test_a_plain_difference_is_told() -> None:
    comparison, _ = run([made(), made(num_gpu_blocks_override=520, max_num_seqs=4)], 6)
    verdict = comparison.verdicts[Pair("p50_ttft_ms", 0, 1)]
    assert verdict.finding == "significant" and verdict.low > 0
    assert Pair("p50_ttft_ms", 0, 1).key in HEADLINES


def test_what_a_seed_changes_is_said() -> None:
    def words(trace: bool = False, **settings: object) -> tuple[str, ...]:
        load = Load(open_trace(str(ROOT / "traces/chat.jsonl"))) if trace else LOAD
        return redrawn(load, [("a", made(**settings)), ("b", made(**settings))])

    assert words() == ("lengths", "arrivals")
    assert words(request_rate=float("inf")) == ("lengths",)
    assert words(request_rate=None, trace=True) == ()
    assert words(request_rate=None, trace=True, victim="random") == ("victims",)
    drawing = "kvsim.policies.victims:RandomVictim"
    assert words(request_rate=None, trace=True, victim=drawing) == (
        "the draws of your own policies",
    )
    assert words(request_rate=None, trace=True, victim="kvsim.policies.victims:head") == ()
    assert words(request_rate=None, trace=True, engine="kvsim.engines:VllmV1Async") == ()
    eviction = {"eviction": "kvsim.policies.order:Order"}
    assert words(request_rate=None, trace=True, block_manager_args=eviction) == ()
    drawing_eviction = {"eviction": drawing}
    assert words(request_rate=None, trace=True, block_manager_args=drawing_eviction) != ()
    json_text = {"radix_eviction_policy_config": '{"a": 1}'}
    assert words(request_rate=None, trace=True, block_manager_args=json_text) == ()
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    assert words(request_rate=None, trace=True, speculative_config=drafts) == ()
    drawn = {**drafts, "acceptance_rate": 0.5}
    accepted = ("which drafts are accepted",)
    assert words(request_rate=None, trace=True, speculative_config=drawn) == accepted


def test_a_made_trace_is_made_again_and_a_recorded_one_is_kept() -> None:
    shipped = open_trace(str(ROOT / "traces/chat.jsonl"))
    load = load_of(shipped, [("a", made(seed=3)), ("b", made(seed=3))])
    assert load.of(3) is shipped
    assert load.of(4).rows != shipped.rows
    shipped.source = {}
    kept = load_of(shipped, [("a", made())])
    assert kept.of(0) is kept.of(1) is shipped


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload: a watermark, b victims"):
        load_of(None, [("a", made(workload="watermark")), ("b", made(workload="victims"))])
    with pytest.raises(ConfigError, match="--trace FILE"):
        load_of(None, [("a", made()), ("b", made())])
    with pytest.raises(ConfigError, match="seed: run 0 0, run 1 1"):
        run([made(), made(seed=1)], 4)


@long
def test_one_exact_replay_is_judged_by_its_stretches() -> None:
    trace = open_trace(str(ROOT / "traces/api.jsonl"))
    load = {"num_prompts": 600, "num_gpu_blocks_override": 1200, "time_scale": 3.0}
    base = make_config({**load, "cost": {"model": "roofline"}})
    slower = msgspec.structs.replace(base, max_num_seqs=6)
    [results] = replicate(Load(trace), [base, slower, base], [0], _whole, How(jobs=1))
    names = ("base", "slower", "again")
    runs = [(n, r.summary, r.requests) for n, r in zip(names, results, strict=True)]
    comparison = compare_replay(runs, level=0.05, margin=0.01)
    same = [v for pair, v in comparison.verdicts.items() if (pair.first, pair.other) == (0, 2)]
    assert {verdict.finding for verdict in same} == {"same"}
    for key in ("mean_ttft_ms", "p99_e2el_ms"):
        found = comparison.verdicts[Pair(key, 0, 1)]
        assert found.difference == pytest.approx(runs[1][1][key] - runs[0][1][key])
        assert found.low < found.difference < found.high
    assert Pair("output_throughput", 0, 1) not in comparison.verdicts


def _whole(result: Result) -> Result:
    return result
