"""Hardware files: every figure has a source, peaks order as the machines do."""

from pathlib import Path

import pytest

from kvsim.errors import ConfigError
from kvsim.hardware import Hardware, load_hardware
from kvsim.library import names


@pytest.mark.parametrize("name", names("hardware"))
def test_every_figure_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    figures = set(Hardware.__struct_fields__) - {"name", "device_names", "source"}
    assert set(hardware.source) == figures
    assert all(hardware.source.values())


def test_the_shipped_set() -> None:
    gpus = ["a100-sxm-80gb", "h100-sxm", "h200-sxm", "l40s", "rtx-4090"]
    assert names("hardware") == sorted([*gpus, "cpu"])


def test_newer_machines_are_not_slower() -> None:
    a100, h100, h200 = map(load_hardware, ("a100-sxm-80gb", "h100-sxm", "h200-sxm"))
    assert a100.memory_bandwidth_gb_s < h100.memory_bandwidth_gb_s < h200.memory_bandwidth_gb_s
    assert a100.flop_s("bfloat16") < h100.flop_s("bfloat16") == h200.flop_s("bfloat16")
    assert h100.memory_bytes < h200.memory_bytes


def test_memory_is_what_the_runtime_reports() -> None:
    assert load_hardware("rtx-4090").memory_bytes == pytest.approx(25_250_627_584, rel=1e-5)


def test_missing_peak_names_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"a100-sxm-80gb: no tflop_s for fp8; use --dtype float32"
    ):
        load_hardware("a100-sxm-80gb").flop_s("fp8")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("memory_gib = 0", "memory_gib"),
        ("memory_gib = inf", "memory_gib"),
        ("memory_gib = nan", "memory_gib"),
        ('memory_gib = "80"', "memory_gib: expected `float`, got `str`"),
        ("memory_gb = 80", "unknown key 'memory_gb'; did you mean 'memory_gib'"),
        ("compute_efficiency = 1.5", "compute_efficiency"),
    ],
)
def test_bad_figures_are_named(tmp_path: Path, line: str, words: str) -> None:
    key = line.partition(" ")[0]
    shipped = Path(__file__).parents[1] / "configs" / "hardware" / "h100-sxm.toml"
    kept = [text for text in shipped.read_text().splitlines() if not text.startswith(f"{key} = ")]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join([line, *kept]))
    with pytest.raises(ConfigError, match=rf"mine\.toml: {words}"):
        load_hardware(str(path))


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no hardware named 'h100'; did you mean 'h100-sxm'\?"):
        load_hardware("h100")
    with pytest.raises(ConfigError, match=r"nowhere/h100\.toml: no such file"):
        load_hardware("nowhere/h100.toml")
