"""vLLM's v1/v2 rule at its edges, and the rule made of measurements."""

import pytest
from batches import torch  # noqa: F401 - skips where torch is missing
from kvsim_kernels.dispatch import DecodeTiming, measured_best, vllm_rule


@pytest.mark.parametrize(
    ("max_seq_len", "num_seqs", "num_query_heads", "version"),
    [
        (1, 1, 1, "v1"),
        (512, 1, 1, "v1"),  # one partition
        (513, 1, 1, "v2"),  # two partitions, little parallel work
        (513, 16, 32, "v2"),  # exactly 512 rows are not more than 512
        (513, 27, 19, "v1"),  # 513
        (8192, 17, 32, "v1"),
        (8193, 17, 32, "v2"),  # the length rules, however many rows
        (8192, 16, 32, "v2"),
        (100_000, 1000, 32, "v2"),
    ],
)
def test_vllm_rule(max_seq_len: int, num_seqs: int, num_query_heads: int, version: str) -> None:
    assert vllm_rule(max_seq_len, num_seqs, num_query_heads) == version


def test_measured_best_takes_the_nearest_shape() -> None:
    rule = measured_best(
        [
            DecodeTiming(max_seq_len=512, num_seqs=64, v1_us=20.0, v2_us=25.0),
            DecodeTiming(max_seq_len=8192, num_seqs=1, v1_us=90.0, v2_us=30.0),
        ]
    )
    assert rule(600, 50, 32) == "v1"
    assert rule(16_000, 2, 32) == "v2"
    assert rule(8192, 1, 8) == "v2"


def test_measured_best_needs_a_measurement() -> None:
    with pytest.raises(ValueError, match="at least one timing"):
        measured_best([])
