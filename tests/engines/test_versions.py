"""What differs between releases, against facts read from them."""

import pytest

from kvsim.engines import ENGINES
from kvsim.engines.versions import gpu_memory_utilization, release, startup
from kvsim.errors import ConfigError


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
    with pytest.raises(ConfigError, match=r"vllm_version: .* is no version; write it as 0\.33\.0"):
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
