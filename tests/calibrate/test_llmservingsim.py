"""Import of LLMServingSim's tables: what is added up, what is refused, what a step then costs."""

from pathlib import Path

import pytest
from calibrate.tables import META, OPERATORS, attention_us, write_tables
from cost.plans import plan

from kvsim.calibrate.document import to_json
from kvsim.calibrate.llmservingsim import import_profile, read_bundle
from kvsim.config import make_config
from kvsim.cost import TableCost
from kvsim.cost.profile import DecodeGrid, load_profile
from kvsim.errors import ConfigError
from kvsim.hardware import load_hardware
from kvsim.models import load_model

H100 = load_hardware("h100-sxm")
LAYERS = load_model("tiny").num_hidden_layers


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
    launches = attention_us(20, 40, 5, 100) + attention_us(30, 0, 5, 100)
    assert cost.step_ns(two) == step_ns(55, 0, launches - attention_us(16, 0, 5, 100))
    assert cost.extrapolated_steps == 0
    cost.step_ns(plan(chunks=[(65, 0)], decode_seqs=1, context_tokens=16))
    assert cost.extrapolated_steps == 1


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


def test_a_correction_that_is_not_applied_is_said(tmp_path: Path) -> None:
    disabled = import_profile(write_tables(tmp_path / "a")).error["ragged"]
    enabled_meta = META.replace("enabled: false", "enabled: true")
    enabled = import_profile(write_tables(tmp_path / "b", enabled_meta)).error["ragged"]
    assert "disabled" in disabled
    assert "not applied" in enabled


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("meta.yaml", "variant: bf16", "variant: fp4", "variant: 'fp4' is not one of bf16, fp16"),
        ("meta.yaml", "gpu: Test GPU\n", "", "gpu: missing"),
        ("meta.yaml", "gpu: Test", "gpu: [", "not YAML"),
        ("meta.yaml", "block_size: 16", "block_size: x", "block_size: expected tokens, got 'x'"),
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
        ("tp1/attention.csv", "0,0,2,64", "0,0,2,16", r":\d+: the point of this line was given"),
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
    bundle = read_bundle(folder)
    decode = bundle.profile.fit.decode_v2
    assert isinstance(decode, DecodeGrid)
    assert decode.ctx == [16, 64, 256]
    assert sorted(bundle.beside) == [(0, 0, 2, 32), (24, 0, 0, 0)]
    assert bundle.profile.error["decode"]["max_percent"] == 50
    assert bundle.profile.error["prefill"]["max_percent"] == pytest.approx(0, abs=0.01)
    assert bundle.profile.error["held_out"] == "rows off the grid"


def test_a_grid_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables", META + GRID.replace("16-64 x2", "16 to 64"))
    with pytest.raises(ConfigError, match=r"meta\.yaml: attention_grid\.chunks: expected a grid"):
        import_profile(folder)


def test_a_folder_without_tables(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"meta\.yaml: cannot be read: No such file"):
        import_profile(tmp_path)
    with pytest.raises(ConfigError, match=r"tp2/attention\.csv: cannot be read: No such file"):
        import_profile(folder, tp=2)
