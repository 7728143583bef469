"""Times all-reduces between the GPUs of a machine (NCCL), or processes on its CPU (gloo).

One process per GPU, as engines have them. They wait for each other, so the time is that of a clock,
not of a processor: on a CPU it is only meaningful where nothing else runs.
"""

import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.multiprocessing import get_context

from kvsim_kernels.timing import Timing

WARM_UPS, REPEATS = 3, 20
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


class Group:
    """`gpus` processes that sum tensors when they are told to; `close` ends them."""

    def __init__(self, gpus: int, device: str) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="kvsim-all-reduce-")
        meeting = str(Path(self._folder.name) / "meeting")
        self._links: list[Connection] = []
        self._workers = []
        for rank in range(gpus):
            ours, theirs = context.Pipe()
            arguments = (rank, gpus, device, meeting, theirs)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            theirs.close()
            self._links.append(ours)
            self._workers.append(worker)

    def time(self, moved_bytes: int) -> Timing:
        """One all-reduce of so many bytes, as the slowest process sees it."""
        for link in self._links:
            link.send(moved_bytes)
        slowest = np.max([link.recv() for link in self._links], axis=0)
        low, high = np.percentile(slowest, (25, 75))
        return Timing(statistics.median(slowest), float(high - low), len(slowest))

    def close(self) -> None:
        """Ends the processes."""
        for link in self._links:
            link.send(0)
            link.close()
        for worker in self._workers:
            worker.join(timeout=20)
        self._folder.cleanup()


def _work(rank: int, gpus: int, device: str, meeting: str, link: Connection) -> None:
    """A process: sums what it is told to until it is told 0 bytes."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        BACKENDS[device], init_method=f"file://{meeting}", rank=rank, world_size=gpus
    )
    while moved_bytes := link.recv():
        data = torch.zeros(max(1, moved_bytes // 2), dtype=torch.bfloat16, device=device)
        link.send([_once_us(data) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:])
    distributed.destroy_process_group()


def _once_us(data: torch.Tensor) -> float:
    distributed.barrier()
    if data.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    distributed.all_reduce(data)
    if data.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e3
