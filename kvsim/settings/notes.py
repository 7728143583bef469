"""What the settings ask for and a run does not simulate.

A run is one replica: `tensor_parallel_size` x `pipeline_parallel_size` GPUs with one scheduler.
`kvsim run`, `check` and `profile fit-run` simulate all replicas of `data_parallel_size`
(`kvsim.fleet`).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsim.settings.config import RunConfig

GPUS_OF_A_MACHINE = 8


def left_out(config: RunConfig, stages: int = 1) -> tuple[str, ...]:
    """What the settings ask for and a run does not simulate, one line each.

    `stages`: how many stages of a pipeline work on different steps at once.
    """
    lines = {
        "enable_expert_parallel: the experts of each GPU are taken to have as many tokens; uneven"
        " loads are not simulated": config.enable_expert_parallel,
        f"cpu_offload_gb {config.cpu_offload_gb:g}: GPU memory is saved, but reading these weights"
        " over the host link in every step is not simulated": config.cpu_offload_gb > 0,
        "max_loras: there are no adapters without --enable-lora, so it limits nothing": (
            config.max_loras is not None and not config.enable_lora
        ),
        "cuda_graph_max_bs: only SGLang's memory depends on it, so it changes nothing": (
            config.cuda_graph_max_bs is not None and config.engine != "sglang"
        ),
        "cost.front_end: it takes time before the engine only; what answers cost there"
        " (detokenizer, streams) is not simulated": "front_end" in config.cost,
        "enforce_eager: no memory goes to CUDA graphs, but step times are those with graphs": (
            config.enforce_eager
        ),
    }
    return (*_of_pipeline(config, stages), *(line for line, applies in lines.items() if applies))


def _of_pipeline(config: RunConfig, stages: int) -> list[str]:
    if config.pipeline_parallel_size == 1:
        return []
    key = f"pipeline_parallel_size {config.pipeline_parallel_size}"
    if stages == 1:
        return [
            f"{key}: each step passes all stages before the next begins; overlapping steps and"
            " their bubbles are not simulated"
        ]
    lines = [
        f"{key}: times of stages are ESTIMATED: layers share the price of a step, the last stage"
        " computes the logits, and activations are sent at the speed of the all-reduce or of"
        " cost.stage_link"
    ]
    gpus = config.tensor_parallel_size * stages
    if gpus > GPUS_OF_A_MACHINE and "stage_link" not in config.cost:
        lines.append(
            f"{key}: {gpus} GPUs are taken to be in one machine; for several, give latency_us and"
            " bandwidth_gb_s of their network in cost.stage_link"
        )
    return lines


def one_of_several(config: RunConfig) -> tuple[str, ...]:
    """What is not simulated where one of several replicas is, one line each."""
    if config.data_parallel_size == 1:
        return ()
    return (
        f"data_parallel_size {config.data_parallel_size}: one replica is simulated, and it serves"
        " the whole trace; `kvsim run` simulates all of them. Where replicas share experts, the"
        " others are taken to have as many tokens in each step",
    )


def unheeded_wishes(
    adapters: Iterable[str | None], config: RunConfig, goes_on: bool
) -> tuple[str, ...]:
    """What requests of a trace ask for and a run does not simulate, one line each. `adapters`: of
    the requests. `goes_on`: the engine goes on with those that their clients give up."""
    lines = []
    if not config.enable_lora and any(adapters):
        lines.append(
            "lora: requests name adapters, but all are served by the model itself (they share no"
            " prefixes across adapters); --enable-lora of vllm-v1 serves them by their adapters"
        )
    if goes_on:
        lines.append(
            f"abort_after_s: clients give requests up, but {config.engine} goes on with them here;"
            " vllm-v1 ends them"
        )
    return tuple(lines)
