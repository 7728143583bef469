"""Hardware files: every figure has a source, names are found as people write them."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from kvsim.errors import ConfigError
from kvsim.machine import Hardware, load_hardware
from kvsim.machine.hardware import hardware_path
from kvsim.settings.library import names

NAMES = names("hardware")
BOXES_GB = {
    "a10": 24, "a100-pcie-40gb": 40, "a100-pcie-80gb": 80, "a100-sxm-40gb": 40,
    "a100-sxm-80gb": 80, "a10g": 24, "a30": 24, "a40": 48, "a800-sxm-80gb": 80, "b200-sxm": 180,
    "b300-sxm": 288, "gb10": 128, "gb200": 186, "gb300": 288, "gh200": 96, "h100-nvl": 94,
    "h100-pcie": 80, "h100-sxm": 80, "h20-sxm": 96, "h200-nvl": 141, "h200-sxm": 141,
    "h800-sxm": 80, "l20": 48, "l4": 24, "l40": 48, "l40s": 48, "mi300x": 192, "mi325x": 256,
    "mi350x": 288, "mi355x": 288, "rtx-3090": 24, "rtx-3090-ti": 24, "rtx-4080": 16,
    "rtx-4090": 24, "rtx-5080": 16, "rtx-5090": 32, "rtx-6000-ada": 48, "rtx-a5000": 24,
    "rtx-a6000": 48, "rtx-pro-6000-server": 96, "rtx-pro-6000-workstation": 96, "t4": 16,
    "v100-sxm-16gb": 16, "v100-sxm-32gb": 32,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    figures = set(Hardware.__struct_fields__) - {"name", "device_names", "aliases", "source"}
    optional = ("multiprocessors", "gather_scatter", "expert_products")
    figures -= {key for key in optional if not getattr(hardware, key)}
    assert set(hardware.source) == figures
    assert all(hardware.source.values())


def test_the_shipped_set() -> None:
    assert set(NAMES) == {"cpu", *BOXES_GB}


def test_newer_machines_are_not_slower() -> None:
    a100, h100, h200, b200 = map(load_hardware, ("a100", "h100", "h200", "b200"))
    bandwidths = [each.memory_bandwidth_gb_s for each in (a100, h100, h200, b200)]
    assert bandwidths == sorted(set(bandwidths))
    peaks = [each.flop_s("bfloat16") for each in (a100, h100, h200, b200)]
    assert peaks == sorted(peaks)
    assert h100.memory_bytes < h200.memory_bytes < b200.memory_bytes


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_dense_and_double_with_half_the_bits(name: str) -> None:
    """A figure with sparsity, or of another type, would break the ratio."""
    peaks = load_hardware(name).tflop_s
    if "bfloat16" in peaks:
        assert peaks["bfloat16"] == peaks["float16"]
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["float16"], rel=0.02)
    assert all(peaks["float32"] <= peak for peak in peaks.values())


@pytest.mark.parametrize("name", BOXES_GB)
def test_memory_is_what_the_runtime_reports(name: str) -> None:
    """Below the box's GiB; the maker's GB are at times GiB, and ECC may take an eighth of them."""
    assert 0.9 * BOXES_GB[name] < load_hardware(name).memory_gib < BOXES_GB[name] + 0.01


def test_memory_of_a_logged_machine() -> None:
    """The logs are named under `[source]` in the files of these GPUs."""
    assert load_hardware("rtx-4090").memory_bytes == pytest.approx(25_250_627_584, rel=1e-5)
    assert load_hardware("a100-40gb").memory_bytes == pytest.approx(42_298_834_944, rel=3e-3)
    assert load_hardware("mi300x").memory_bytes == pytest.approx(196_592 * 2**20, rel=1e-4)


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
    shipped = ROOT / "configs" / "hardware" / "h100-sxm.toml"
    kept = [text for text in shipped.read_text().splitlines() if not text.startswith(f"{key} = ")]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join([line, *kept]))
    with pytest.raises(ConfigError, match=rf"mine\.toml: {words}"):
        load_hardware(str(path))


# -- names -----------------------------------------------------------------------------------------

SPELLINGS = {
    "a100-sxm-40gb": ["a100-40gb", "A100 40GB", "NVIDIA A100-SXM4-40GB"],
    "a100-sxm-80gb": [
        *["a100", "A100", "A100-80GB", "A100-SXM4-80GB", "nvidia_a100-sxm4-80gb", "a100-80"],
        *["nvidia-a100-80gb", "A100 SXM 80G"],
    ],
    "a100-pcie-40gb": ["NVIDIA A100-PCIE-40GB", "A100 40GB PCIe"],
    "a100-pcie-80gb": ["A100 PCIe", "NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"],
    "a10": ["A10", "NVIDIA A10", "a10-24gb"],
    "a10g": ["A10G", "NVIDIA A10G"],
    "a30": ["A30", "NVIDIA A30"],
    "a40": ["A40", "NVIDIA A40", "a40-48gb"],
    "a800-sxm-80gb": ["A800", "NVIDIA A800-SXM4-80GB"],
    "b200-sxm": ["B200", "nvidia b200"],
    "b300-sxm": ["B300", "NVIDIA B300"],
    "gb10": ["GB10", "DGX Spark", "NVIDIA GB10"],
    "gb300": ["GB300", "GB300 NVL72"],
    "h100-nvl": ["H100 NVL", "NVIDIA H100 NVL", "h100-nvl-94gb"],
    "h200-nvl": ["H200 NVL", "NVIDIA H200 NVL"],
    "h800-sxm": ["H800", "NVIDIA H800", "h800-80gb"],
    "l20": ["L20", "NVIDIA L20"],
    "mi350x": ["MI350X", "AMD Instinct MI350X"],
    "mi355x": ["MI355X", "AMD Instinct MI355X", "MI355X-288GB"],
    "rtx-3090-ti": ["3090 Ti", "NVIDIA GeForce RTX 3090 Ti"],
    "rtx-4080": ["RTX 4080", "4080"],
    "rtx-5080": ["RTX 5080"],
    "rtx-6000-ada": ["RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"],
    "rtx-a5000": ["RTX A5000", "A5000"],
    "rtx-pro-6000-workstation": [
        "RTX PRO 6000 Workstation",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    ],
    "v100-sxm-16gb": ["V100-16GB", "Tesla V100-SXM2-16GB"],
    "gb200": ["GB200", "GB200 NVL72"],
    "gh200": ["GH200", "NVIDIA GH200 480GB"],
    "h100-pcie": ["H100 PCIe", "h100_pcie"],
    "h100-sxm": ["h100", "H100", "NVIDIA H100 80GB HBM3", "h100-80gb", "H100 SXM5"],
    "h20-sxm": ["H20", "h20-96gb"],
    "h200-sxm": ["h200", "NVIDIA H200", "H200 SXM"],
    "l4": ["L4", "NVIDIA L4"],
    "l40": ["L40"],
    "l40s": ["L40S", "NVIDIA L40S"],
    "mi300x": ["MI300X", "AMD Instinct MI300X"],
    "mi325x": ["mi325x", "AMD_Instinct_MI325X"],
    "rtx-3090": ["3090", "GeForce RTX 3090"],
    "rtx-4090": ["rtx4090", "RTX 4090", "4090", "NVIDIA GeForce RTX 4090"],
    "rtx-5090": ["RTX5090", "5090"],
    "rtx-a6000": ["A6000", "NVIDIA RTX A6000"],
    "rtx-pro-6000-server": [
        "RTX PRO 6000",
        "RTX PRO 6000 Blackwell",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    ],
    "t4": ["T4", "Tesla T4", "NVIDIA T4"],
    "v100-sxm-32gb": ["V100", "Tesla V100-SXM2-32GB"],
}


@pytest.mark.parametrize(
    ("spelling", "name"), [(each, name) for name, all_ in SPELLINGS.items() for each in all_]
)
def test_a_name_is_found_as_people_write_it(spelling: str, name: str) -> None:
    assert load_hardware(spelling).name == name


def test_no_two_files_share_a_name() -> None:
    loaded = [load_hardware(name) for name in NAMES]
    every = [
        found
        for hardware in loaded
        for found in {
            hardware_path(other).stem
            for other in (hardware.name, *hardware.device_names, *hardware.aliases)
        }
    ]
    assert Counter(every) == Counter(NAMES)
    devices = [device for hardware in loaded for device in hardware.device_names]
    assert len(devices) == len(set(devices))


def test_engines_see_the_name_of_the_runtime() -> None:
    """vLLM's defaults look for `a100` in the lower-cased name of the device."""
    with_a100 = {name for name in NAMES if "a100" in load_hardware(name).device_name.lower()}
    assert with_a100 == {name for name in NAMES if name.startswith("a100")}
    assert load_hardware("h100").device_name == "NVIDIA H100 80GB HBM3"


@given(st.sampled_from(NAMES), st.randoms(use_true_random=False))
def test_case_and_punctuation_do_not_count(name: str, random: object) -> None:
    written = "".join(
        random.choice([c, c.upper()]) if c != "-" else random.choice("-_ ")  # type: ignore[attr-defined]
        for c in name
    )
    assert load_hardware(written).name == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "h10",
            r"no hardware named 'h10'; it could be h100-nvl, h100-pcie, h100-sxm; give one of them",
        ),
        ("RTX 6000", r"it could be rtx-6000-ada, rtx-a6000, rtx-pro-6000-server"),
        ("l40x", r"no hardware named 'l40x'; did you mean 'l40'\? give one of a10, "),
        ("tpu-v5e", r"no hardware named 'tpu-v5e'; give one of a10, "),
        ("nowhere/h100.toml", r"nowhere/h100\.toml: no such file"),
    ],
)
def test_unknown_and_ambiguous_names_are_one_line(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_hardware(name)
    assert "\n" not in str(caught.value)


def test_a_file_is_taken_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = ROOT / "configs" / "hardware" / "l4.toml"
    (tmp_path / "h100").write_text(shipped.read_text())
    monkeypatch.chdir(tmp_path)
    assert load_hardware("h100").name == "l4"
