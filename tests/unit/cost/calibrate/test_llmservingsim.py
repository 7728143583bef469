"""Import of LLMServingSim's tables: what is added up, what is refused, what a step then costs."""

import math
from pathlib import Path

import pytest
from msgspec import UNSET
from plans import plan
from unit.cost.calibrate.tables import (
    LAYERS,
    META,
    OPERATORS,
    attention_us,
    write_csv,
    write_experts,
    write_sparse_model,
    write_tables,
)

from kvsim.cost import TableCost
from kvsim.cost.calibrate.llmservingsim import _grid_values, import_profile, read_bundle
from kvsim.cost.profile import DecodeGrid, Tail, load_profile, to_json
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config

H100 = load_hardware("h100-sxm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tables(tmp_path / "tables")


def dense_us(tokens: int) -> int:
    """Per token: two norms and one of everything else in each layer, two more once."""
    once = OPERATORS["embedding"] + OPERATORS["final_layernorm"]
    layer = sum(OPERATORS.values()) - once + OPERATORS["layernorm"]
    return tokens * (once + LAYERS * layer)


def test_operators_are_added_up_over_a_step(folder: Path) -> None:
    fit = import_profile(folder).fit
    assert fit.dense.x == [1, 2, 16, 64]
    assert fit.dense.us == [dense_us(tokens) for tokens in (1, 2, 16, 64)]
    assert fit.head.x == [1, 8]
    assert fit.head.us == [50 + 5 + 2, 50 + 5 + 16]


def test_what_was_measured_is_kept(folder: Path) -> None:
    profile = import_profile(folder)
    assert (profile.source, profile.created) == ("measured", "2026-01-02")
    assert profile.device == {"name": "Test GPU"}
    assert profile.software["vllm"] == "0.19.0"
    assert (profile.model.name, profile.model.layers) == ("tiny", LAYERS)
    assert (profile.model.dtype, profile.model.tp) == ("bfloat16", 1)
    assert profile.engine.block_size == 16
    assert profile.fit.step == (0.0, 1.0, 0.0)


def test_a_step_costs_what_was_measured(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(to_json(import_profile(folder)))
    config = make_config({"dtype": "bfloat16"})
    cost = TableCost(load_model("tiny"), H100, config, str(path))

    def step_ns(tokens: int, samples: int, attention: float) -> int:
        head = 55 + 2 * samples if samples else 0
        return round(1000 * (dense_us(tokens) + LAYERS * attention + head))

    decodes = plan(decode_seqs=5, context_tokens=500, samples=5)
    assert cost.step_ns(decodes) == step_ns(5, 5, attention_us(0, 0, 5, 100))
    assert cost.step_ns(plan(chunks=[(20, 40)])) == step_ns(20, 0, attention_us(20, 40, 0, 0))
    mixed = plan(chunks=[(20, 40)], decode_seqs=5, context_tokens=500, samples=5)
    assert cost.step_ns(mixed) == step_ns(25, 5, attention_us(20, 40, 5, 100))
    two = plan(chunks=[(20, 40), (30, 0)], decode_seqs=5, context_tokens=500)
    further = attention_us(20, 40, 1, 16) - attention_us(16, 0, 1, 16)
    assert cost.step_ns(two) == step_ns(55, 0, attention_us(30, 0, 5, 100) + further)
    assert cost.describe()["extrapolated_steps"] == 0
    cost.step_ns(plan(chunks=[(65, 0)], decode_seqs=1, context_tokens=16))
    assert cost.describe()["extrapolated_steps"] == 1
    cost.step_ns(plan(decode_seqs=5, context_tokens=50_000, samples=5))
    assert cost.describe()["extrapolated_steps"] == 2


def test_saved_and_read_back(folder: Path, tmp_path: Path) -> None:
    profile = import_profile(folder)
    path = tmp_path / "profile.json"
    path.write_text(to_json(profile))
    assert load_profile(str(path)) == profile
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["profile.json"]


def test_equal_tables_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(to_json(import_profile(folder)))
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_operators_that_some_models_have_count_where_the_table_has_them(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables")
    path = folder / "tp1" / "dense.csv"
    rows = "".join(f"qk_norm,{tokens},{23 * tokens}\n" for tokens in (1, 2, 16, 64))
    path.write_text(path.read_text() + rows)
    more = [23 * tokens * LAYERS for tokens in (1, 2, 16, 64)]
    assert import_profile(folder).fit.dense.us == [
        dense_us(tokens) + each for tokens, each in zip((1, 2, 16, 64), more, strict=True)
    ]


# -- what no table holds --------------------------------------------------------------------------

KNOWN = META.replace("Test GPU", "NVIDIA GeForce RTX 4090")
SKEW = "n,nb,pc,kp,kvs,kv_big,kv_mean,t_mean_us,t_skew_us"


def test_uneven_batches_of_an_unknown_gpu_are_priced_as_even(folder: Path) -> None:
    profile = import_profile(folder)
    assert profile.fit.tail is UNSET
    assert "multiprocessors are not known" in profile.error["ragged"]


def test_the_rates_of_uneven_batches_are_slopes_of_tables(tmp_path: Path) -> None:
    """`attention_us` has n x length / 4; the RTX 4090 has 128 multiprocessors."""
    profile = import_profile(write_tables(tmp_path / "tables", KNOWN))
    kv_heads = load_model("tiny").num_key_value_heads
    tail = profile.fit.tail
    assert isinstance(tail, Tail)
    assert (tail.alone_ns, tail.share_ns) == (250, 250)
    assert tail.unsplit_seqs == math.ceil(0.8 * 2 * 128 / kv_heads)
    assert not tail.used
    assert "there are no uneven batches" in profile.error["ragged"]
    assert profile.source == "measured"


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("held_up", [True, False])
def test_measured_uneven_batches_decide(tmp_path: Path, iterations: int, held_up: bool) -> None:
    """Times may be sums over the iterations; those of even batches tell."""
    meta = KNOWN + f"measurement_iterations: {iterations}\n"
    folder = write_tables(tmp_path / "tables", meta)
    rows = []
    for long in (64, 128, 256):
        mean = (long + 7 * 16) / 8
        even = attention_us(16, 0, 8, mean)
        uneven = even + (long - mean) / 4 * 7 / 8 if held_up else even
        rows.append((8, 1, 16, 0, 16, long, mean, even * iterations, uneven * iterations))
    write_csv(folder / "tp1" / "skew.csv", SKEW, rows)
    path = folder / "tp1" / "attention.csv"
    # One block alone is slow: the term is not 0.
    slow = "".join(
        f"{line},{float(us) * 5}\n" if line.startswith("16,0,1,") else f"{line},{us}\n"
        for line, us in (row.rsplit(",", 1) for row in path.read_text().splitlines()[1:])
    )
    path.write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n" + slow)
    profile = import_profile(folder)
    errors = profile.error["uneven"]
    assert errors["points"] == 3
    assert errors["even"]["max_percent"] == 0 if not held_up else errors["even"]["max_percent"] > 5
    assert isinstance(profile.fit.tail, Tail)
    better = errors["median_percent"] < errors["even"]["median_percent"]
    assert profile.fit.tail.used == (better and held_up)


def test_several_gpus_need_all_reduces(tmp_path: Path) -> None:
    shared = META.replace("tp_degrees: [1]", "tp_degrees: [1, 2]")
    unknown, known = (
        write_tables(tmp_path / name, meta)
        for name, meta in (("a", shared), ("b", shared.replace("Test GPU", "NVIDIA L40S")))
    )
    for folder in (unknown, known):
        (folder / "tp1").rename(folder / "tp2")
    with pytest.raises(ConfigError, match="all-reduces were not measured, and no GPU is named"):
        import_profile(unknown, tp=2)
    l40s = load_hardware("l40s")
    for profile in (import_profile(known, tp=2), import_profile(unknown, tp=2, hardware=l40s)):
        assert profile.source == "estimated"
        assert profile.fit.all_reduce == l40s.all_reduce
        assert profile.terms["all-reduce"] == "figures of l40s, not measured with the kernels"


def test_all_reduces_are_priced_and_labelled(tmp_path: Path) -> None:
    meta = META.replace("tp_degrees: [1]", "tp_degrees: [1, 2]")
    folder = write_tables(tmp_path / "tables", meta.replace("Test GPU", "NVIDIA L40S"))
    (folder / "tp1").rename(folder / "tp2")
    path = tmp_path / "profile.json"
    path.write_text(to_json(import_profile(folder, tp=2)))
    model, l40s = load_model("tiny"), load_hardware("l40s")
    cost = TableCost(
        model, l40s, make_config({"dtype": "bfloat16", "tensor_parallel_size": 2}), str(path)
    )
    reduce_us = l40s.all_reduce.us(16 * model.hidden_size * 2, 2)
    attention = attention_us(16, 0, 0, 0)
    expected = dense_us(16) + LAYERS * (attention + 2 * reduce_us)
    assert cost.step_ns(plan(chunks=[(16, 0)])) == round(1000 * expected)
    assert cost.kind == "estimated"
    assert cost.source.endswith("all-reduce: figures of l40s, not measured with the kernels")


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("meta.yaml", "variant: bf16", "variant: fp4", "variant: 'fp4' is not one of bf16, fp16"),
        ("meta.yaml", "gpu: Test GPU\n", "", "gpu: missing"),
        ("meta.yaml", "gpu: Test", "gpu: [", "not YAML"),
        (
            "meta.yaml",
            "block_size: 16",
            "block_size: x",
            "block_size: expected a number of tokens, got 'x'",
        ),
        (
            "meta.yaml",
            "num_attention_heads: 4",
            "num_attention_heads: 5",
            r"num_attention_heads: measured with 5, but tiny has 4; give the model",
        ),
        ("tp1/dense.csv", "tokens", "token", r":1: no column 'tokens'"),
        ("tp1/dense.csv", "act_fn,2,34", "act_fn,2,fast", r":\d+: time_us: expected a number"),
        ("tp1/dense.csv", "act_fn,2,34", "act_fn,2,nan", r":\d+: time_us: expected a number"),
        ("tp1/dense.csv", "act_fn,2,34\n", "", r"no row of act_fn for 2 tokens"),
        ("tp1/dense.csv", "act_fn,2", "moe,2", r":\d+: layer: unknown operator 'moe'; known"),
        ("tp1/attention.csv", "0,0,2,64,34.0\n", "", "no row for prefill_chunk 0, kv_prefill 0"),
        ("tp1/attention.csv", "0,0,2,64", "0,0,2,16", r":\d+: an earlier line has the same point"),
    ],
)
def test_unclean_tables_are_refused_with_their_place(
    folder: Path, file: str, old: str, new: str, words: str
) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=words) as caught:
        import_profile(folder)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_gpus_share_of_a_model_is_known_by_its_degree(tmp_path: Path) -> None:
    """The overrides are those of the last degree that was measured."""
    shared = META.replace("tp_degrees: [1]", "tp_degrees: [1, 2]")
    halved = shared.replace("num_attention_heads: 4", "num_attention_heads: 2")
    assert import_profile(write_tables(tmp_path / "a", halved)).model.heads == 4
    other = shared.replace("num_attention_heads: 4", "num_attention_heads: 3")
    with pytest.raises(ConfigError, match="num_attention_heads: measured with 3, but tiny has 4"):
        import_profile(write_tables(tmp_path / "b", other))


GRID = """
attention_grid:
  chunks: 0, 16-64 x2
  n_decode: 0, 1, 2, 8
  kv: 0, 16-256 x4
"""


def test_rows_off_the_stated_grid_are_held_out(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables", META + GRID)
    path = folder / "tp1" / "attention.csv"
    rows = f"0,0,2,32,{2 * attention_us(0, 0, 2, 32)}\n24,0,0,0,{attention_us(24, 0, 0, 0)}\n"
    path.write_text(path.read_text() + rows)
    profile, beside = read_bundle(folder)
    decode = profile.fit.decode_v2
    assert isinstance(decode, DecodeGrid)
    assert decode.ctx == [16, 64, 256]
    assert sorted(beside) == [(0, 0, 2, 32), (24, 0, 0, 0)]
    assert profile.error["decode"]["max_percent"] == 50
    assert profile.error["prefill"]["max_percent"] == pytest.approx(0, abs=0.01)
    assert profile.error["held_out"] == "rows off the grid"


def test_a_grid_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables", META + GRID.replace("16-64 x2", "16 to 64"))
    with pytest.raises(ConfigError, match=r"meta\.yaml: attention_grid\.chunks: expected a grid"):
        import_profile(folder)


def test_a_folder_without_tables(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"meta\.yaml: cannot be read: No such file"):
        import_profile(tmp_path)
    with pytest.raises(ConfigError, match=r"tp2/attention\.csv: cannot be read: No such file"):
        import_profile(folder, tp=2)


# -- what newer profilers write ------------------------------------------------------------------


def test_newer_attention_counts_the_past_from_the_middle_of_a_chunk(tmp_path: Path) -> None:
    """Rows of other kernels, and of several queries a decode, are not the plain kernel's."""
    old, new = (write_tables(tmp_path / name) for name in ("old", "new"))
    path = new / "tp1" / "attention.csv"
    rows: list[tuple[object, ...]] = [
        ("indexer", 0, 0, 1, 16, 1, 9e9),
        ("attention", 0, 0, 1, 16, 4, 9e9),
    ]
    for line in path.read_text().splitlines()[1:]:
        chunk, past, *rest, us = map(float, line.split(","))
        rows.append(("attention", chunk, past + chunk / 2 if chunk else 0, *rest, 1, us))
    head = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us"
    write_csv(path, head, rows)
    assert import_profile(new).fit == import_profile(old).fit


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_newer_experts_are_measured_by_degree(tmp_path: Path, ep: int) -> None:
    """The least degree counts; each of its GPUs has the rows of its share of the tokens."""
    model = write_sparse_model(tmp_path)
    old = write_experts(write_tables(tmp_path / "old"))
    new = write_experts(write_tables(tmp_path / "new"), ep)
    path = new / "tp1" / "moe.csv"
    path.write_text(path.read_text() + f"{2 * ep},1,1,9\n")
    found = import_profile(new, model).fit.experts
    assert found == import_profile(old, model).fit.experts is not UNSET


def test_a_degree_of_experts_below_1_is_named(tmp_path: Path) -> None:
    folder = write_experts(write_tables(tmp_path / "tables"), 1)
    path = folder / "tp1" / "moe.csv"
    path.write_text(path.read_text() + "0,1,1,9\n")
    with pytest.raises(ConfigError, match=r"moe\.csv: ep: expected at least 1, got 0"):
        import_profile(folder, write_sparse_model(tmp_path))


@pytest.mark.parametrize("key", ["1", "'1'"])
def test_newer_metadata_says_which_block_size_the_engine_chose(tmp_path: Path, key: str) -> None:
    chosen = f"engine_resolved:\n  per_tp:\n    {key}:\n      block_size: 32\n"
    meta = META.replace("  block_size: 16\n", "") + chosen
    assert import_profile(write_tables(tmp_path / "a", meta)).engine.block_size == 32
    assert import_profile(write_tables(tmp_path / "b", META + chosen)).engine.block_size == 16
    with pytest.raises(ConfigError, match="block_size: expected a number of tokens, got None"):
        import_profile(write_tables(tmp_path / "c", meta.replace(f"    {key}:", "    2:")))


@pytest.mark.parametrize(
    ("grid", "values"),
    [
        ("0, 16-64 x2", {0, 16, 32, 64}),
        ("16-100 x2", {16, 32, 64, 100}),
        ("1-8 x1.5", {1, 2, 3, 5, 8}),
        ([0, 1, 7], {0, 1, 7}),
        (5, {5}),
    ],
)
def test_grids_in_every_spelling(grid: object, values: set[float]) -> None:
    assert _grid_values({"kv": grid}, "kv", Path("meta.yaml")) == values


@pytest.mark.parametrize("grid", ["16-64", "0-64 x2", "1-8 x1", "", None, [1, "x"], "1-8 x2.5.1"])
def test_what_is_no_grid_is_refused(grid: object) -> None:
    with pytest.raises(ConfigError, match=r"meta\.yaml: attention_grid\.kv: expected a grid, got"):
        _grid_values({"kv": grid}, "kv", Path("meta.yaml"))
