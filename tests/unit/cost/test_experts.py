"""Layers with experts beside the tables: by chance, whole or shared, measured or from geometry."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from command import run_here
from msgspec.structs import replace
from plans import plan
from unit.cost.calibrate.tables import (
    EXPERTS,
    META,
    attention_us,
    measured_us,
    others_us,
    write_experts,
    write_sparse_model,
    write_tables,
)

from kvsim.against.fit import with_constants
from kvsim.core.plan import Plan
from kvsim.cost import RooflineCost, TableCost, make_cost
from kvsim.cost.calibrate.llmservingsim import import_profile
from kvsim.cost.experts import Routing
from kvsim.cost.layer import (
    EXPERT_KERNELS,
    FLOOR_US,
    SAMPLER_US,
    SMALL_KERNEL_US,
    SMALL_KERNELS,
    Peaks,
    experts_us,
    head_us,
    layer_us,
    layers_us,
    mlp_us,
)
from kvsim.cost.profile import ExpertGrid, to_json
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config

H100 = load_hardware("h100-sxm")
MODEL = replace(load_model("tiny"), experts=EXPERTS, torch_dtype="bfloat16")
LAYERS = MODEL.num_hidden_layers
LINK = H100.exchange


@pytest.fixture
def config_json(tmp_path: Path) -> str:
    """The model as a file, for the importer."""
    return write_sparse_model(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_experts(write_tables(tmp_path / "tables", META))


def table(folder: Path, config_json: str, hardware: Any = H100, **keys: Any) -> TableCost:
    path = folder / "profile.json"
    path.write_text(to_json(import_profile(folder, config_json)))
    config = make_config({"dtype": "bfloat16", **keys})
    return TableCost(load_model(config_json), hardware, config, str(path))


def linear_us(cost: TableCost, tokens: int) -> float:
    """A step of a single chunk, less its attention."""
    step = plan(chunks=[(tokens, 0)])
    return cost.step_ns(step) / 1000 - LAYERS * attention_us(max(tokens, 16), 0, 0, 0)


def active(tokens: int, held: int = 16) -> float:
    return held * (1 - (1 - 2 / 16) ** tokens)


def test_measured_experts_are_read_at_import(folder: Path, config_json: str) -> None:
    grid = import_profile(folder, config_json).fit.experts
    assert isinstance(grid, ExpertGrid)
    assert grid.ctx == [2, 4, 8, 16]
    assert grid.us[0] == [measured_us(1, 2)] * 4  # one token has two experts
    assert grid.us[-1] == [measured_us(64, each) for each in (2, 4, 8, 16)]


@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_a_layer_has_as_many_active_experts_as_chance_says(
    folder: Path, config_json: str, tokens: int
) -> None:
    cost = table(folder, config_json)
    wanted = others_us(tokens) + LAYERS * measured_us(tokens, active(tokens))
    assert linear_us(cost, tokens) == pytest.approx(wanted, rel=0.01)
    assert cost.kind == "measured"
    assert "experts: measured" in cost.source


@pytest.mark.parametrize("tokens", [4, 16, 32])
def test_replicas_share_experts_and_wait_for_each_other(
    folder: Path, config_json: str, tokens: int
) -> None:
    """Each of two replicas has half of the experts, and the rows of half of all tokens."""
    keys = {"data_parallel_size": 2, "enable_expert_parallel": True}
    cost = table(folder, config_json, **keys)
    exchange = LAYERS * LINK.us(2 * tokens * MODEL.hidden_size * 2, 2)
    wanted = others_us(tokens) + LAYERS * measured_us(tokens, active(2 * tokens, held=8))
    assert linear_us(cost, tokens) == pytest.approx(wanted + exchange, rel=0.01)
    assert cost.kind == "estimated"
    assert "exchange of replicas: figures of h100-sxm" in cost.source
    assert "as many tokens" in cost.describe()["terms"]["exchange of replicas"]


@pytest.mark.parametrize("step", [plan(chunks=[(32, 0)]), plan((), 16, 1_600, 16)])
def test_uneven_replicas_pay_for_the_tokens_of_all(
    folder: Path, config_json: str, step: Plan
) -> None:
    """Only the experts and the exchange know of other replicas."""
    cost = table(folder, config_json, data_parallel_size=2, enable_expert_parallel=True)
    even_ns, tokens = cost.step_ns(step), step.tokens
    step.rank_tokens = tokens
    assert cost.step_ns(step) == even_ns

    def experts_us(mean: float) -> float:
        exchange = LAYERS * LINK.us(round(2 * mean * MODEL.hidden_size * 2), 2)
        return LAYERS * measured_us(mean, 8 * (1 - (1 - 2 / 16) ** (2 * mean))) + exchange

    step.rank_tokens = tokens / 2 + 0.5
    less_us = experts_us(tokens) - experts_us(step.rank_tokens)
    assert (even_ns - cost.step_ns(step)) / 1000 == pytest.approx(less_us, rel=0.02)
    roofline = RooflineCost(
        load_model("qwen3-30b-a3b"), H100, make_config({"data_parallel_size": 2})
    )
    few_ns, step.rank_tokens = roofline.step_ns(step), tokens
    same_ns, step.rank_tokens = roofline.step_ns(step), None
    assert few_ns < same_ns == roofline.step_ns(step)


def test_an_imported_profile_prices_ranks_that_share_experts(
    folder: Path, config_json: str, tmp_path: Path
) -> None:
    """From the tables to the figures of two ranks, by commands alone."""
    importing = ["profile", "import", str(folder), "--model", config_json, "--out", "p.json"]
    assert run_here(importing, tmp_path).returncode == 0
    running = ["run", "--trace", "chat", "--num-prompts", "12", "--model", config_json]
    running += ["--hardware", "h100", "--dtype", "bfloat16", "--set", "cost.profile=p.json"]
    running += ["--data-parallel-size", "2", "--enable-expert-parallel", "--json"]
    done = run_here([*running, "--num-gpu-blocks-override", "2000"], tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["completed"] == 12 and len(figures["replicas"]) == 2
    source = figures["meta"]["cost"]["source"]
    assert "experts: measured" in source and "exchange of replicas: figures of" in source


def test_pure_decodes_pay_for_experts_as_other_steps_do(folder: Path, config_json: str) -> None:
    cost = table(folder, config_json, data_parallel_size=2)
    step = plan(decode_seqs=8, context_tokens=800, samples=8)
    alone = cost.step_ns(step)
    copying = plan(decode_seqs=8, context_tokens=800, samples=8, copied_blocks=1)
    assert alone == pytest.approx(cost.step_ns(copying), abs=1)
    assert alone > 1000 * LAYERS * measured_us(8, 0)


def test_without_measured_experts_the_geometry_prices_them(folder: Path, config_json: str) -> None:
    (folder / "tp1" / "moe.csv").unlink()
    cost = table(folder, config_json)
    peaks = Peaks(H100.flop_s("bfloat16"), H100.memory_bandwidth_gb_s * 1e9)
    one = experts_us(MODEL.shard(1), 16, 16, active(16), peaks)
    assert linear_us(cost, 16) == pytest.approx(others_us(16) + LAYERS * one, rel=1e-3)
    assert cost.kind == "estimated"
    assert "experts: estimated from the geometry" in cost.source


def test_a_dense_profile_prices_a_model_with_experts_as_an_estimate() -> None:
    """Less than a third of the time of a dense model of as many parameters, at small batches."""
    sparse, dense = load_model("qwen3-30b-a3b"), load_model("qwen3-32b")
    h200 = load_hardware("h200-sxm")
    config = make_config({"cost": {"profile": "h200-sxm-llama-3-8b-public"}})
    costs = [make_cost(config, model, h200) for model in (sparse, dense)]
    assert [cost.kind for cost in costs] == ["estimated", "scaled"]
    step = plan(decode_seqs=1, context_tokens=1000, samples=1)
    assert 3 * costs[0].step_ns(step) < costs[1].step_ns(step)
    roofline = RooflineCost(sparse, h200, config)
    for seqs in (1, 16, 128):
        step = plan(decode_seqs=seqs, context_tokens=1000 * seqs, samples=seqs)
        assert 0.5 < costs[0].step_ns(step) / roofline.step_ns(step) < 2


def test_the_linear_layers_outside_experts_are_all_but_the_mlp() -> None:
    peaks = Peaks(1e15, 3e12)
    dense, sparse = load_model("tiny").shard(1), MODEL.shard(1)
    mlp = mlp_us(dense, dense.intermediate_size, 64, peaks)
    assert layers_us(dense, 64, peaks) == LAYERS * layer_us(dense, 64, peaks)
    assert layers_us(sparse, 64, peaks) == pytest.approx(
        LAYERS * (layer_us(dense, 64, peaks) - mlp)
    )


def test_on_a_gpu_without_limits_only_launches_take_time() -> None:
    shard, peaks = MODEL.shard(1), Peaks(1e30, 1e30)
    assert layer_us(shard, 64, peaks) == 4 * FLOOR_US + SMALL_KERNELS * SMALL_KERNEL_US
    assert mlp_us(shard, 128, 64, peaks) == 2 * FLOOR_US + SMALL_KERNEL_US
    router_and_experts = 3 * FLOOR_US + EXPERT_KERNELS * SMALL_KERNEL_US
    assert experts_us(shard, 64, 64, 8, peaks) == pytest.approx(router_and_experts)
    assert head_us(shard, 64, peaks) == FLOOR_US + SAMPLER_US


@pytest.mark.parametrize("replicas", [1, 3])
def test_active_experts_are_the_mean_of_random_draws(replicas: int) -> None:
    random, tokens, draws = Random(replicas), 5, 2000
    seen = sum(
        len({e for _ in range(tokens * replicas) for e in random.sample(range(16), 2)})
        for _ in range(draws)
    )
    routing = Routing(MODEL, make_config({"data_parallel_size": replicas}))
    assert 16 * routing.active(tokens) == pytest.approx(seen / draws, rel=0.02)


def test_replicas_of_a_dense_model_share_nothing() -> None:
    dense = load_model("llama-3-8b")
    costs = [
        RooflineCost(dense, H100, make_config({"data_parallel_size": replicas}))
        for replicas in (1, 4)
    ]
    assert len({cost.step_ns(plan(chunks=[(512, 0)])) for cost in costs}) == 1


def test_the_roofline_of_replicas_reads_fewer_experts_and_sends_tokens() -> None:
    model = load_model("qwen3-30b-a3b")
    keys = {"enable_expert_parallel": True}
    one, four = (
        RooflineCost(model, H100, make_config(keys | {"data_parallel_size": replicas}))._bounds
        for replicas in (1, 4)
    )
    assert four.experts_read_ns == pytest.approx(one.experts_read_ns / 4)
    assert four.experts_token_ns == pytest.approx(one.experts_token_ns)  # a quarter, of 4 x
    sent = model.num_hidden_layers * LINK.us(4 * 100 * model.hidden_size * 2, 4)
    assert four.exchange.us(100) == pytest.approx(sent)
    assert one.exchange.us(100) == 0


def test_a_faulty_table_of_experts_is_named(folder: Path, config_json: str) -> None:
    path = folder / "tp1" / "moe.csv"
    path.write_text("tokens,activated_experts,time_us\n1,2,3\n1,2,4\n")
    with pytest.raises(ConfigError, match=r"moe.csv:3: an earlier line has the same point"):
        import_profile(folder, config_json)
    path.write_text("tokens,activated_experts,time_us\n1,2,3\n1,4,4\n")
    with pytest.raises(ConfigError, match="need at least 2 values each"):
        import_profile(folder, config_json)


def test_a_factor_of_the_linear_layers_holds_for_measured_experts(
    folder: Path, config_json: str
) -> None:
    profile = import_profile(folder, config_json)
    changed = with_constants(profile, {"linear_factor": 0.5}).fit.experts
    assert isinstance(changed, ExpertGrid)
    assert changed.us[0] == [measured_us(1, 2) / 2] * 4


def test_whole_experts_divided_in_columns_take_less(folder: Path, config_json: str) -> None:
    """Two GPUs without expert parallelism: every expert, half of its columns."""

    def experts(**keys: Any) -> float:
        cost = table(folder, config_json, **keys)
        assert cost._experts is not None
        return cost._experts.us(64)

    whole, columns = experts(), experts(tensor_parallel_size=2)
    placed = experts(tensor_parallel_size=2, enable_expert_parallel=True)
    assert columns < whole
    half = LAYERS * measured_us(32, active(64, held=8))
    assert placed == pytest.approx(half, rel=0.01)
