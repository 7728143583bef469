"""What the settings ask for and a run does not simulate.

A run is one replica: `tensor_parallel_size` x `pipeline_parallel_size` GPUs with one scheduler.
`kvsim run` simulates all replicas of `data_parallel_size` (`kvsim.fleet`).
"""

from __future__ import annotations

from kvsim.config import RunConfig


def left_out(config: RunConfig) -> tuple[str, ...]:
    """What the settings ask for and a run does not simulate, one line each."""
    lines = []
    if config.pipeline_parallel_size > 1:
        lines.append(
            f"pipeline_parallel_size {config.pipeline_parallel_size}: each step passes all stages"
            " before the next begins; overlapping steps and their bubbles are not simulated"
        )
    if config.enable_expert_parallel:
        lines.append(
            "enable_expert_parallel: the experts of each GPU are taken to have as many tokens;"
            " uneven loads are not simulated"
        )
    if config.cpu_offload_gb > 0:
        lines.append(
            f"cpu_offload_gb {config.cpu_offload_gb:g}: GPU memory is saved, but reading these"
            " weights over the host link in every step is not simulated"
        )
    if config.enforce_eager:
        lines.append(
            "enforce_eager: no memory goes to CUDA graphs, but step times are those with graphs"
        )
    return tuple(lines)


def one_of_several(config: RunConfig) -> tuple[str, ...]:
    """What is not simulated where one of several replicas is, one line each."""
    if config.data_parallel_size == 1:
        return ()
    return (
        f"data_parallel_size {config.data_parallel_size}: one replica is simulated, and it serves"
        " the whole trace; `kvsim run` simulates all of them. Where replicas share experts, the"
        " others are taken to have as many tokens in each step",
    )
