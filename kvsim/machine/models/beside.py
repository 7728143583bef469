"""What a GPU holds beside a model: a drafter with its KV, and slots for adapters."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvsim.machine.models.geometry import Shard
from kvsim.machine.models.loading import load_model
from kvsim.machine.models.weights import DTYPE_BYTES

DRAFT_VOCABULARY = 32_000
"""Words of the output projection of EAGLE-3 drafters: `draft_vocab_size` of yuhuili's checkpoints
on Hugging Face."""

_STATES_IN = {"eagle": 2, "eagle3": 3, "mtp": 2}
"""Method → hidden states that go into the projection before the layer of the drafter."""


class Drafter(NamedTuple):
    """What a drafter takes on each GPU of the target."""

    weight_bytes: int = 0
    token_bytes: int = 0
    """Of the KV cache, for one token."""


def method_of_name(name: str) -> str:
    """The method that vLLM takes for a drafter of this name."""
    lowered = name.strip("[]").lower()
    return next((each for each in ("ngram", "eagle3", "eagle") if each in lowered), "draft_model")


def drafter_of(shard: Shard, given: Mapping[str, Any], dtype: str, kv_dtype: str) -> Drafter:
    """The drafter of a `speculative_config` beside a model.

    A draft model has its weights and layers, divided as those of the target. EAGLE, EAGLE-3 and MTP
    are taken to be one layer like those of the target (`num_hidden_layers` 1), and a projection of
    two or three hidden states; EAGLE-3 has queries, keys and values of twice the width, and an
    output projection of its own. Embeddings, and otherwise the output projection, are shared. All
    their layers get KV in the target's blocks. N-grams take nothing; of other methods nothing is
    known. Sources: vLLM 0.33.0, model_executor/models, `llama_eagle.py`, `llama_eagle3.py`,
    `deepseek_mtp.py`; v1/worker/gpu/spec_decode/eagle/utils.py, `_should_share`;
    v1/core/kv_cache_planning.py, `get_kv_cache_groups`.
    """
    name = given.get("model")
    method = given.get("method") or (method_of_name(name) if isinstance(name, str) else None)
    if method == "draft_model" and isinstance(name, str):
        whole = load_model(name).shard(shard.tensor_parallel_size)
        return Drafter(whole.weight_bytes(dtype), whole.token_bytes(kv_dtype))
    if not (isinstance(method, str) and method in _STATES_IN):
        return Drafter()
    model = shard.model
    last = range(model.num_hidden_layers - 1, model.num_hidden_layers)
    if method != "mtp":  # These are not part of the target's checkpoint.
        shard = replace(shard, model=replace(model, quantization=None))
    hidden = model.hidden_size
    further = _STATES_IN[method] * hidden * hidden
    if method == "eagle3":
        words = ceil(min(model.vocab_size, DRAFT_VOCABULARY) / shard.tensor_parallel_size)
        further += hidden * (shard.qkv_size + words)
    weights = shard.layer_bytes(dtype, last) + further * DTYPE_BYTES[model.dtype(dtype)]
    return Drafter(ceil(weights), shard.token_bytes(kv_dtype, last))


def adapter_bytes(shard: Shard, dtype: str, layers: range, slots: int, rank: int) -> int:
    """Bytes of the slots for adapters in these layers: as many as may be in one step, of the
    highest rank, for every matrix product, whatever the adapters change.

    A product of `columns` inputs has `rank` x `columns` numbers, and `rank` for each output; those
    of a fused product have inputs of their own. The side that tensor parallelism divides in the
    model is divided. Attention with latent vectors or states is not counted, nor are embeddings
    (only few models take adapters there). Source: vLLM 0.33.0, lora/layers, `create_lora_weights`
    of `base_linear.py`, `column_parallel_linear.py` and `fused_moe.py`; lora/utils.py,
    `get_supported_lora_modules`.
    """
    model, hidden = shard.model, shard.model.hidden_size
    queries, fused = shard.heads * model.head_dim, 2 if model.gated_mlp else 1

    def mlp(columns: int) -> int:
        return fused * (hidden + columns) + columns + hidden

    numbers = 0
    for index in layers:
        if model.latent is None and model.layer_type(index) != "linear_attention":
            numbers += 3 * hidden + shard.qkv_size + queries + hidden
        columns = model.mlp_columns(index)
        if model.experts is None or columns is not None:
            numbers += mlp(-(-(columns or 0) // shard.tensor_parallel_size)) if columns else 0
            continue
        numbers += hidden + model.experts.num_experts
        numbers += shard.experts_held * mlp(shard.expert_columns)
        if shared := model.experts.shared_expert_intermediate_size:
            numbers += mlp(shared // shard.tensor_parallel_size)
    return slots * rank * numbers * DTYPE_BYTES[model.dtype(dtype)]
