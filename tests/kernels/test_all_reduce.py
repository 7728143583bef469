"""All-reduces between processes of this machine."""

from batches import torch
from kvsim_kernels.all_reduce import REPEATS, Group
from marks import long


@long
def test_two_processes_sum_and_end() -> None:
    device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    group = Group(2, device)
    try:
        small, large = group.time(1024), group.time(16 << 20)
    finally:
        group.close()
    assert small.reps == large.reps == REPEATS
    assert 0 < small.us < large.us
    assert not any(worker.is_alive() for worker in group._workers)
