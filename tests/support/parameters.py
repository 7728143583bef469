"""How many parameters of a model work on one token, which model cards publish."""

from kvsim.machine import Model


def active_parameters(model: Model) -> int:
    """Those of its own experts and all others, but for towers and tables beside the embeddings."""
    whole = model.shard(1)
    count = whole.parameters - model.vision_parameters - model.lookup_parameters
    if model.experts is None:
        return count
    idle = 1 - model.experts.num_experts_per_tok / model.experts.num_experts
    return count - round(idle * whole.expert_parameters)
