"""What parallelism gives to one GPU of a replica, and what a run leaves out.

A run is one replica: `tensor_parallel_size` x `pipeline_parallel_size` GPUs with one scheduler.
"""

from __future__ import annotations

from kvsim.config import RunConfig
from kvsim.errors import ConfigError


def stage_layers(num_hidden_layers: int, pipeline_parallel_size: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, as vLLM divides them.

    What is left over goes to the stages before the last, one layer each, from the back. Source:
    vLLM 0.33.0, vllm/distributed/utils.py, `get_pp_indices`. Raises `ConfigError` for more stages
    than layers.
    """
    size = pipeline_parallel_size
    if size > num_hidden_layers:
        raise ConfigError(
            f"pipeline_parallel_size: {size} stages for {num_hidden_layers} layers; use at most"
            f" {num_hidden_layers}"
        )
    each, left = divmod(num_hidden_layers, size)
    return tuple(each + (size - 1 - left <= stage < size - 1) for stage in range(size))


def left_out(config: RunConfig) -> tuple[str, ...]:
    """What the settings ask for and a run does not simulate, one line each."""
    lines = []
    if config.pipeline_parallel_size > 1:
        lines.append(
            f"pipeline_parallel_size {config.pipeline_parallel_size}: each step passes all stages"
            " before the next begins; overlapping steps and their bubbles are not simulated"
        )
    if config.data_parallel_size > 1:
        lines.append(
            f"data_parallel_size {config.data_parallel_size}: one replica is simulated, and it"
            " serves the whole trace; give it its share, with --request-rate or a smaller trace"
        )
    if config.enable_expert_parallel:
        lines.append(
            "enable_expert_parallel: what GPUs send each other for experts is not simulated"
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
