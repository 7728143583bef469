"""What differs between releases, against facts read from them."""

import pytest

from kvsim.engines import ENGINES
from kvsim.errors import ConfigError
from kvsim.settings.versions import (
    batch_limits,
    gpu_memory_utilization,
    release,
    server_defaults,
    startup,
)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.33.0", (0, 33, 0)),
        ("0.6.3.post1", (0, 6, 3)),
        ("v0.19.0rc1", (0, 19, 0)),
        ("0.9", (0, 9)),
        (None, ()),
    ],
)
def test_release(version: str | None, expected: tuple[int, ...]) -> None:
    assert release(version) == expected


@pytest.mark.parametrize("version", ["", "latest", "33", "x0.6.3"])
def test_no_release(version: str) -> None:
    with pytest.raises(
        ConfigError, match=r"vllm_version: .* is not a version; write it as 0\.33\.0"
    ):
        release(version)


@pytest.mark.parametrize(
    ("version", "share"),
    [
        (None, 0.9),
        ("0.3.3", 0.9),
        ("0.6.3", 0.9),
        ("0.9.2", 0.9),
        ("0.19.1", 0.9),
        ("0.20.0", 0.92),
        ("0.33.0", 0.92),
        ("1.0", 0.92),
    ],
)
def test_gpu_memory_utilization(version: str | None, share: float) -> None:
    """`gpu_memory_utilization` in vllm/config/cache.py, or engine/arg_utils.py, of each release."""
    assert gpu_memory_utilization(version) == share


def test_engines_name_the_release_that_they_follow() -> None:
    versions = {name: engine.vllm_version for name, engine in ENGINES.items()}
    assert versions == {
        "vllm-0.3.3": "0.3.3",
        "vllm-0.6.3": "0.6.3",
        "vllm-v1": "0.33.0",
        "nano-vllm": None,
        "nano-vllm-2025-08": None,
        "sglang": None,
    }


@pytest.mark.parametrize(
    ("version", "charged"),
    [
        ("0.6.3", False),
        ("0.19.1", False),  # VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is 0
        ("0.20.0", True),
        ("0.25.1", True),
        ("0.26.0", False),  # another model runner, whose profile_cudagraph_memory returns 0
        ("0.28.0", False),
        ("0.29.0", True),
        ("0.33.0", True),
    ],
)
def test_which_releases_charge_cuda_graphs(version: str, charged: bool) -> None:
    assert startup(version).charges_cudagraphs is charged


def test_sampling_takes_less_from_release_to_release() -> None:
    bytes_per_logit = [startup(v).sampling_bytes for v in ("0.6.3", "0.16.0", "0.17.1", "0.33.0")]
    assert bytes_per_logit == [39, 39, 14, 2]


GIB = 2**30
H100, A100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"


@pytest.mark.parametrize(
    ("version", "device", "gib", "limits"),
    [
        ("0.33.0", "NVIDIA GeForce RTX 4090", 23.5, (256, 2048)),
        ("0.33.0", "NVIDIA L40S", 44.4, (256, 2048)),
        ("0.33.0", A100, 79.2, (256, 2048)),
        ("0.33.0", H100, 79.2, (1024, 8192)),
        ("0.33.0", "NVIDIA H200", 139.8, (1024, 8192)),
        ("0.33.0", B200, 178.4, (1024, 16384)),
        ("0.33.0", "NVIDIA GB10", 119.7, (256, 2048)),
        ("0.32.0", "NVIDIA GB10", 119.7, (1024, 8192)),
        ("0.28.0", B200, 178.4, (1024, 16384)),
        ("0.27.1", B200, 178.4, (1024, 8192)),
        ("0.9.0", A100, 79.2, (256, 2048)),
        ("0.8.5", A100, 79.2, (1024, 8192)),
        ("0.8.5.post1", "NVIDIA L40S", 44.4, (256, 2048)),
    ],
)
def test_tiers(version: str, device: str, gib: float, limits: tuple[int, int]) -> None:
    assert batch_limits(release(version), device, int(gib * GIB))[:2] == limits


def test_asynchronous_since_0_14_and_whole_prompts_since_0_19() -> None:
    found = {v: server_defaults(v, H100, 80 * GIB, 8192) for v in ("0.13.0", "0.14.0", "0.19.0")}
    assert [found[v]["async_scheduling"].value for v in found] == [False, True, True]
    assert [found[v]["scheduler_reserve_full_isl"].value for v in found] == [False, False, True]


def test_without_chunked_prefill_the_longest_prompt_fits_into_a_step() -> None:
    found = server_defaults("0.33.0", H100, 80 * GIB, 131072, enable_chunked_prefill=False)
    assert found["max_num_batched_tokens"].value == 131072


@pytest.mark.parametrize("version", ["0.6.3", "0.8.4"])
def test_defaults_before_v1_are_not_known(version: str) -> None:
    with pytest.raises(ConfigError, match=r"vllm_version: .* known from 0\.8\.5 on"):
        server_defaults(version, H100, 80 * GIB, 8192)
