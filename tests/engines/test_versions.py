"""Defaults of `vllm serve` by release and GPU, as read from the releases themselves."""

import pytest
from packaging.version import Version

from kvsim.engines.versions import batch_limits, gpu_memory_utilization, parse_version
from kvsim.engines.versions import server_defaults as defaults
from kvsim.errors import ConfigError

GIB = 2**30
H100, A100, B200 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"


@pytest.mark.parametrize(
    ("release", "device", "gib", "limits"),
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
def test_tiers(release: str, device: str, gib: float, limits: tuple[int, int]) -> None:
    assert batch_limits(Version(release), device, int(gib * GIB))[:2] == limits


def test_memory_share_changed_in_0_20() -> None:
    shares = [gpu_memory_utilization(Version(v)) for v in ("0.19.1", "0.20.0", "0.33.0")]
    assert shares == [0.9, 0.92, 0.92]


def test_asynchronous_since_0_14_and_whole_prompts_since_0_19() -> None:
    found = {v: defaults(Version(v), H100, 80 * GIB, 8192) for v in ("0.13.0", "0.14.0", "0.19.0")}
    assert [found[v]["async_scheduling"].value for v in found] == [False, True, True]
    assert [found[v]["scheduler_reserve_full_isl"].value for v in found] == [False, False, True]


def test_without_chunked_prefill_the_longest_prompt_fits_into_a_step() -> None:
    found = defaults(Version("0.33.0"), H100, 80 * GIB, 131072, enable_chunked_prefill=False)
    assert found["max_num_batched_tokens"].value == 131072


@pytest.mark.parametrize("text", ["latest", "0.33.x", "", "0.6.3", "0.8.4"])
def test_a_version_that_is_not_known_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^vllm_version: .*[^\n]$"):
        parse_version(text)


def test_a_later_release_is_taken_to_be_like_the_newest() -> None:
    assert batch_limits(parse_version("v0.40.0rc1"), H100, 80 * GIB)[:2] == (1024, 8192)
