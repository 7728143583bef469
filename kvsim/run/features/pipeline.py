"""The stages of a pipeline that the settings of a run ask for, and what does not go with them."""

from __future__ import annotations

from kvsim.cost import Cost, make_cost
from kvsim.cost.stages import StagedCost
from kvsim.engines import Engine
from kvsim.errors import ConfigError
from kvsim.machine.hardware import Hardware
from kvsim.machine.models import Model
from kvsim.run.checks import check_features
from kvsim.settings.config import RunConfig

KEY = "pipeline_parallel_size"


def stages_at_work(config: RunConfig, engine: Engine, model: Model) -> int:
    """How many stages work on different steps at once; 1 without a pipeline.

    Other engines than vLLM V1 pass each step through all stages before the next begins, and say so
    (`kvsim.settings.notes`). Raises `ConfigError` for what is not simulated together with a
    pipeline.
    """
    stages = config.pipeline_parallel_size
    if stages == 1 or not engine.groups:
        return 1
    check_features(KEY, config, engine, "has no pipeline")
    others = {
        "speculative_config": config.speculative_config,
        "kv_offloading_size": config.kv_offloading_size,
        "kv_transfer_config": config.kv_transfer_config,
        "data_parallel_size": config.data_parallel_size > 1 and model.experts is not None,
    }
    for key, given in others.items():
        if given:
            raise ConfigError(
                f"{key}: not simulated together with a pipeline; leave it out, or use"
                " --pipeline-parallel-size 1"
            )
    return stages


def cost_of_stages(config: RunConfig, model: Model, hardware: Hardware, stages: int) -> Cost:
    """The cost model of a run, divided among `stages` stages. Raises `ConfigError`."""
    cost = make_cost(config, model, hardware)
    return cost if stages == 1 else StagedCost(cost, model, hardware, config)
