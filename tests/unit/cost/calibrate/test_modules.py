"""Import of AIConfigurator's tables of experts and latent attention: made ones of known times."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unit.cost.calibrate.tables import write_csv

from kvsim.cost import TableCost, make_cost
from kvsim.cost.calibrate.aiconfigurator import (
    ROUTING,
    Kernels,
    import_profile,
    latent_attention,
)
from kvsim.cost.layer import Peaks, kernel_us, mlp_us, product_us
from kvsim.cost.profile import DecodeGrid, ExpertGrid, Profile, load_profile, to_json
from kvsim.cost.table import profile_for
from kvsim.errors import ConfigError
from kvsim.machine import load_hardware, load_model
from kvsim.settings.config import make_config

H200, R1 = load_hardware("h200-sxm"), load_model("deepseek-r1")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


def experts_us(tokens: float, tp: float) -> float:
    return 40 + 300 * (1 - (31 / 32) ** tokens) / tp + tokens * 2 / tp


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def roofline_us(tokens: float, tp: float) -> float:
    """Eight of 256 experts for each token, in fp8: the three matrices of those that are read, and
    for each row what goes in and out of them."""
    columns, rows, peaks = 2048 / tp, 8 * tokens, fp8_peaks()
    read = 256 * (1 - (31 / 32) ** tokens) * 3 * columns * 7168
    moved = read + rows * (2 * 7168 + 4 * columns)
    return float(kernel_us(2 * rows * 3 * columns * 7168, moved, peaks)) + 20


def fp8_peaks() -> Peaks:
    return Peaks(H200.flop_s("fp8"), H200.memory_bandwidth_gb_s * 1e9)


def write_tables(folder: Path, experts_us: Callable[[float, float], float] = experts_us) -> Path:
    """Tables of DeepSeek-R1's layers on a GPU that follows simple laws."""
    folder.mkdir(parents=True)
    sizes = (2048, 4096, 7168, 16384, 65536)
    gemm = [
        (m, n, 7168, 5 + m * n * 7168 / 3e8 + n * 7168 / 2e6)
        for m, n in product((1, 16, 64, 256, 1024, 8192), sizes)
    ]
    write_csv(folder / "gemm.csv", "m,n,k,us", gemm)
    sends = [("graph", 8, 2**size, 5 + 2**size / 2e5) for size in range(8, 30)]
    write_csv(folder / "allreduce.csv", "mode,num_gpus,bytes,us", sends)
    of = {"hidden_size": 7168, "inter_size": 2048, "topk": 8, "num_experts": 256}
    write_parquet(
        folder / "moe_perf.parquet",
        [
            of
            | {"moe_dtype": dtype, "num_tokens": tokens, "moe_tp_size": tp, "moe_ep_size": ep}
            | {"distribution": routing, "latency": times * experts_us(tokens, tp) / 1e3}
            for tokens, tp in product(TOKENS, (1, 2, 4, 8))
            for dtype, ep, routing, times in (
                ("fp8_block", 1, ROUTING, 1),
                ("fp8_block", 1, "balanced", 2),
                ("fp8_block", 8, ROUTING, 3),
                ("bfloat16", 1, ROUTING, 4),
            )
        ],
    )
    of = {"model": "deepseek-ai/DeepSeek-V3", "num_heads": 16, "gemm_type": "fp8_block"}
    of |= {"kv_cache_dtype": "bfloat16"}
    write_parquet(
        folder / "mla_generation_module_perf.parquet",
        [
            of | {"batch_size": n, "step": ctx - 1, "latency": (90 + n * ctx / 500) / 1e3}
            for n, ctx in product((1, 4, 16, 64, 256), (2, 16, 128, 1024, 8192))
        ],
    )
    write_parquet(
        folder / "mla_context_module_perf.parquet",
        [
            of | {"batch_size": n, "isl": q, "latency": (100 + n * q / 8 + n * q * q / 1e5) / 1e3}
            for n, q in product((1, 2, 8), (16, 128, 1024, 4096, 16384))
        ],
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("made") / "tables")


@pytest.fixture(scope="module")
def made(folder: Path) -> Profile:
    return import_profile(folder, "deepseek-r1", "h200-sxm", 8)


def check_experts(made: Profile, law: Callable[[float, float], float], rel: float) -> None:
    grid = made.fit.experts
    assert isinstance(grid, ExpertGrid)
    assert grid.tp == 8
    for tokens, (least, most) in zip(grid.x, grid.us, strict=True):
        router_and_shared = product_us(tokens, 256, 7168, fp8_peaks())
        router_and_shared += mlp_us(R1.shard(8), 256, tokens, fp8_peaks(), 1)
        assert least == most == pytest.approx(law(tokens, 8) + router_and_shared, rel=rel)


def test_experts_are_those_of_the_type_and_the_degree(made: Profile) -> None:
    check_experts(made, experts_us, rel=0.1)


def test_experts_that_follow_the_roofline_do_so_between_the_rows(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables", roofline_us)
    made = import_profile(folder, "deepseek-r1", "h200-sxm", 8)
    check_experts(made, roofline_us, rel=2e-4)


def test_latent_attention_holds_its_projections(made: Profile) -> None:
    decode = made.fit.decode_v2
    assert isinstance(decode, DecodeGrid)
    for n, row in zip(decode.x, decode.us, strict=True):
        laws = [90 + n * ctx / 500 for ctx in decode.ctx[: len(row)]]
        assert row == pytest.approx(laws, rel=0.1)
    alone = [row[0] for row in made.fit.prefill.us]
    laws = [100 + q / 8 + q * q / 1e5 for q in made.fit.prefill.x]
    assert alone == pytest.approx(laws, rel=0.1)
    assert all(row == sorted(row) for row in made.fit.prefill.us)


def test_long_decodes_of_all_heads_are_arithmetic(tmp_path: Path) -> None:
    """Each of 128 heads compares 576 numbers of a token and adds 512 of them: more than their
    reading takes, at six tenths of the peak."""
    of = {"model": "deepseek-ai/DeepSeek-V3", "num_heads": 128, "gemm_type": "fp8_block"}
    of |= {"kv_cache_dtype": "bfloat16", "step": 15, "isl": 16, "latency": 0.1}
    rows = [of | {"batch_size": n} for n in range(1, 99)]
    for kind in ("context", "generation"):
        write_parquet(tmp_path / f"mla_{kind}_module_perf.parquet", rows)
    peaks = Peaks(H200.flop_s("bfloat16"), H200.memory_bandwidth_gb_s * 1e9)
    kernels = Kernels.of(tmp_path, R1.shard(1), peaks, H200.tflop_s["fp8"])
    us = latent_attention(kernels).decode_us
    more = us(np.array([64.0]), np.array([2e6])) - us(np.array([64.0]), np.array([1e6]))
    flops = 64 * 1e6 * 128 * 2 * (576 + 512)
    assert more == pytest.approx(1e6 * flops / 0.6 / peaks.flop_s, rel=1e-3)


def test_it_prices_its_own_model_alone(made: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(to_json(made))
    config = make_config({"tensor_parallel_size": 8, "cost": {"profile": str(path)}})
    cost = make_cost(config, R1, H200)
    assert isinstance(cost, TableCost)
    assert cost.kind == "estimated"
    assert "tokens choose experts by a power law" in cost.source
    assert "public runs took 1.09 times as long" in cost.source
    for model, tp in ((R1, 4), (load_model("llama-3-8b"), 8)):
        other = make_config({"tensor_parallel_size": tp, "cost": {"profile": str(path)}})
        with pytest.raises(
            ConfigError, match=r"times of latent attention, fp8 weights are not scaled"
        ):
            make_cost(other, model, H200)


def test_what_was_not_measured_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 heads in fp8_block; this model and degree"):
        import_profile(folder, "deepseek-r1", "h200-sxm", 32)
    with pytest.raises(ConfigError, match=r"a100.* no products in FP8|no products in FP8"):
        import_profile(folder, "deepseek-r1", "a100-sxm-80gb", 8)
    with pytest.raises(ConfigError, match="sliding windows, mxfp4 weights"):
        import_profile(folder, "gpt-oss-20b", "h200-sxm")
    with pytest.raises(ConfigError, match="0 rows of deepseek-v2's latent attention"):
        import_profile(folder, "deepseek-v2", "h200-sxm", 8)
    broken = write_tables(tmp_path / "broken")
    path = broken / "moe_perf.parquet"
    for text, words in ((b"PAR1", "not such a table"), (None, "cannot be read")):
        path.unlink() if text is None else path.write_bytes(text)
        with pytest.raises(ConfigError, match=rf"moe_perf\.parquet: {words}"):
            import_profile(broken, "deepseek-r1", "h200-sxm", 8)


SHIPPED = {
    "h100-sxm-mixtral-8x7b-2-public": ("mixtral-8x7b", "h100-sxm", 2),
    "h200-sxm-deepseek-r1-8-public": ("deepseek-r1", "h200-sxm", 8),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_price_what_they_were_made_for(name: str) -> None:
    model_name, hardware_name, tp = SHIPPED[name]
    model, hardware = load_model(model_name), load_hardware(hardware_name)
    assert profile_for(model, hardware, make_config({"tensor_parallel_size": tp})) == name
    assert profile_for(model, hardware, make_config({"tensor_parallel_size": 2 * tp})) is None
    profile, shard = load_profile(name), model.shard(tp)
    grid, bandwidth = profile.fit.experts, hardware.memory_bandwidth_gb_s * 1e3
    assert isinstance(grid, ExpertGrid)
    read = shard.expert_bytes("bfloat16") / model.expert_layers / bandwidth
    assert grid.us[grid.x.index(256.0)][0] > read
    assert profile.error["experts"]["median_percent"] < 5
    assert json.loads(to_json(profile))["software"]["source"].startswith("kernel tables of")
