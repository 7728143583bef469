"""Reads layers of several kinds, which families declare under keys of their own.

| key | family |
|---|---|
| `hybrid_override_pattern`, `layers_block_type` | Nemotron-H and 3: Mamba 2, attention or MLP |
| `mamba_n_heads` | Granite 4, Bamba: Mamba 2 or attention, and an MLP |
| `linear_attn_config` | Kimi Linear, K3 |
| `conv_L_cache` | LFM2 |
| `block_configs` | Nemotron NAS |
| `hybrid_layer_pattern` | MiMo-V2 |
| `global_head_dim`, `num_global_key_value_heads` | Gemma 4 |
| `attention_other_setting` | Step-3.5 |
| `compress_ratios` | DeepSeek-V4 |
| `index_head_dim` | DeepSeek-V3.2, GLM-5 |
| `sparse_attention_config` | MiniMax-M3 |
| `moe_layer_freq`, `moe_layers_enum` | which layers have experts |

Each `_Kind` takes its keys, and says in usual ones what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from msgspec import Struct, field

from kvsim.machine.models.families import CHUNKED, FULL, LINEAR, SLIDING
from kvsim.machine.models.parts import Natural, Positive
from kvsim.settings.library import converted

NONE = "none"
_SAME = {FULL: FULL, SLIDING: SLIDING, LINEAR: LINEAR, CHUNKED: CHUNKED, "attention": FULL}
LAYER_TYPES = {**_SAME, "mamba": LINEAR, "conv": LINEAR, "sliding": SLIDING, "global": FULL}
"""`layer_types` of files → ours."""


class _Kind(Struct, frozen=True, kw_only=True):
    """Keys of one kind of layers; of a file that has any of `keys`."""

    keys: ClassVar[tuple[str, ...]]

    def usual(self) -> dict[str, Any]:
        """The same under usual keys; raises `ValueError` where it is not understood."""
        raise NotImplementedError


class _Mamba2(_Kind, frozen=True, kw_only=True):
    """Source: vLLM 0.33.0, model_executor/models/nemotron_h.py, granitemoehybrid.py."""

    keys = ("hybrid_override_pattern", "layers_block_type", "mamba_num_heads")
    mamba_num_heads: Positive
    mamba_head_dim: Positive
    ssm_state_size: Positive
    n_groups: Positive = 1
    conv_kernel: Positive = 4
    model_type: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    hybrid_override_pattern: str | None = None
    layers_block_type: list[str] | None = None
    attention_head_dim: Positive | None = None
    n_shared_experts: Natural = 0
    moe_shared_expert_intermediate_size: Natural = 0

    def usual(self) -> dict[str, Any]:
        # vLLM 0.33.0, model_executor/models/config.py, `NemotronHForCausalLMConfig`.
        unsaid = "float32" if self.model_type == "nemotron_h" else None
        linear = {
            "kind": "mamba2",
            "linear_num_key_heads": self.n_groups,
            "linear_num_value_heads": self.mamba_num_heads,
            "linear_key_head_dim": self.ssm_state_size,
            "linear_value_head_dim": self.mamba_head_dim,
            "linear_conv_kernel_dim": self.conv_kernel,
            "mamba_ssm_dtype": self.mamba_ssm_cache_dtype or unsaid,
        }
        letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        blocks = self.layers_block_type
        if self.hybrid_override_pattern is not None:
            blocks = [letters.get(each, each) for each in self.hybrid_override_pattern]
        found: dict[str, Any] = {"linear": linear}
        if blocks is None:
            return found
        if others := set(blocks) - set(letters.values()):
            raise ValueError(f"layers of kind {min(others)!r:.40} are not simulated")
        found["num_hidden_layers"] = len(blocks)
        mixers = {"mamba": LINEAR, "attention": FULL}
        found["layer_types"] = [mixers.get(each, NONE) for each in blocks]
        mlps = {"mlp": "dense", "moe": "sparse"}
        found["mlp_layer_types"] = [mlps.get(each, NONE) for each in blocks]
        found["shared_expert_intermediate_size"] = (
            self.n_shared_experts * self.moe_shared_expert_intermediate_size
        )
        if self.attention_head_dim is not None:
            found["head_dim"] = self.attention_head_dim
        return found


class _KimiLayers(Struct, frozen=True, kw_only=True):
    full_attn_layers: list[Positive]
    """Counted from 1."""
    kda_layers: list[Positive]
    head_dim: Positive
    num_heads: Positive
    short_conv_kernel_size: Positive = 4
    use_full_rank_gate: bool = False


class _Kimi(_Kind, frozen=True, kw_only=True):
    """Source: vLLM 0.33.0, model_executor/models/kimi_linear.py."""

    keys = ("linear_attn_config",)
    linear_attn_config: _KimiLayers
    mla_use_output_gate: bool = False

    def usual(self) -> dict[str, Any]:
        said = self.linear_attn_config
        layers = len(said.full_attn_layers) + len(said.kda_layers)
        full = set(said.full_attn_layers)
        return {
            "layer_types": [FULL if place in full else LINEAR for place in range(1, layers + 1)],
            "latent_output_gate": self.mla_use_output_gate,
            "linear": {
                "kind": "kimi_delta",
                "linear_num_key_heads": said.num_heads,
                "linear_num_value_heads": said.num_heads,
                "linear_key_head_dim": said.head_dim,
                "linear_value_head_dim": said.head_dim,
                "linear_conv_kernel_dim": said.short_conv_kernel_size,
                "mamba_ssm_dtype": "float32",
                "full_rank_gate": said.use_full_rank_gate,
            },
        }


class _ShortConv(_Kind, frozen=True, kw_only=True):
    """Source: transformers 5.24, models/lfm2, `Lfm2MLP` and `Lfm2ShortConv`."""

    keys = ("conv_L_cache",)
    conv_cache: Positive = field(name="conv_L_cache")
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    full_attn_idxs: list[Natural] | None = None
    num_dense_layers: Natural = 0
    block_auto_adjust_ff_dim: bool = False
    block_ffn_dim_multiplier: float = 1.0
    block_multiple_of: Positive = 256

    def usual(self) -> dict[str, Any]:
        columns = self.intermediate_size
        if self.block_auto_adjust_ff_dim:
            columns = int(self.block_ffn_dim_multiplier * int(2 * columns / 3))
            columns = self.block_multiple_of * -(-columns // self.block_multiple_of)
        found: dict[str, Any] = {
            "intermediate_size": columns,
            "first_k_dense_replace": self.num_dense_layers,
            "linear": {
                "kind": "short_conv",
                "linear_num_key_heads": 0,
                "linear_num_value_heads": 1,
                "linear_key_head_dim": 0,
                "linear_value_head_dim": self.hidden_size,
                "linear_conv_kernel_dim": self.conv_cache,
            },
        }
        if self.full_attn_idxs is not None:
            places = range(self.num_hidden_layers)
            found["layer_types"] = [FULL if i in self.full_attn_idxs else LINEAR for i in places]
        return found


class _NasPart(Struct, frozen=True):
    """Attention or MLP of a layer."""

    n_heads_in_group: Positive | None = None
    ffn_mult: float | None = None
    no_op: bool = False
    replace_with_linear: bool = False


class _NasBlock(Struct, frozen=True):
    attention: _NasPart
    ffn: _NasPart


class _Nas(_Kind, frozen=True, kw_only=True):
    """Source: vLLM 0.33.0, model_executor/models/nemotron_nas.py."""

    keys = ("block_configs",)
    block_configs: list[_NasBlock]
    hidden_size: Positive
    num_attention_heads: Positive

    def usual(self) -> dict[str, Any]:
        blocks = self.block_configs
        if any(
            each.attention.replace_with_linear or each.ffn.replace_with_linear for each in blocks
        ):
            raise ValueError("block_configs: layers replaced by one matrix are not simulated")
        shares = {each.attention.n_heads_in_group for each in blocks if not each.attention.no_op}
        if len(shares) != 1:
            raise ValueError("block_configs: layers of several n_heads_in_group are not simulated")
        columns = [0 if each.ffn.no_op else self._columns(each.ffn.ffn_mult) for each in blocks]
        return {
            "num_key_value_heads": self.num_attention_heads // (shares.pop() or 1),
            "intermediate_size": max(columns),
            "layer_types": [NONE if each.attention.no_op else FULL for each in blocks],
            "mlp_layer_types": columns,
        }

    def _columns(self, ratio: float | None) -> int:
        return 256 * -(-int(2 * (ratio or 0) * self.hidden_size / 3) // 256)


class _Mimo(_Kind, frozen=True, kw_only=True):
    """Source: vLLM 0.33.0, model_executor/models/mimo_v2_flash.py."""

    keys = ("hybrid_layer_pattern",)
    hybrid_layer_pattern: list[Natural]
    swa_num_attention_heads: Positive
    swa_num_key_value_heads: Positive
    swa_head_dim: Positive
    swa_v_head_dim: Positive

    def usual(self) -> dict[str, Any]:
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        own = {key: getattr(self, f"swa_{key}") for key in keys}
        types = [SLIDING if each else FULL for each in self.hybrid_layer_pattern]
        return {"layer_types": types, "heads": {SLIDING: own}}


class _Gemma4(_Kind, frozen=True, kw_only=True):
    """Source: transformers 5.24, models/gemma4, `Gemma4TextAttention` and `Gemma4TextMLP`."""

    keys = ("global_head_dim", "num_global_key_value_heads", "hidden_size_per_layer_input")
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_hidden_layers: Positive
    global_head_dim: Positive | None = None
    num_global_key_value_heads: Positive | None = None
    attention_k_eq_v: bool = False
    enable_moe_block: bool = False
    num_kv_shared_layers: Natural = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: Natural = 0
    vocab_size_per_layer_input: Natural = 0

    def usual(self) -> dict[str, Any]:
        size, equal = self.global_head_dim or self.head_dim, self.attention_k_eq_v
        own = {
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": (equal and self.num_global_key_value_heads)
            or self.num_key_value_heads,
            "head_dim": size,
            "v_head_dim": size,
            "attention_k_eq_v": equal,
        }
        found: dict[str, Any] = {"heads": {FULL: own}}
        if self.enable_moe_block:  # a dense MLP beside the experts, as a shared one
            found["shared_expert_intermediate_size"] = self.intermediate_size
        layers, shared, width = self.num_hidden_layers, self.num_kv_shared_layers, self.hidden_size
        if self.use_double_wide_mlp and shared:
            columns = self.intermediate_size
            found["mlp_layer_types"] = [columns] * (layers - shared) + [2 * columns] * shared
        if inputs := self.hidden_size_per_layer_input:
            # A table of all layers and its projection; a gate and a projection of each layer.
            rows = self.vocab_size_per_layer_input + width
            found["lookup_parameters"] = layers * inputs * (rows + 2 * width)
        return found


class _OtherHeads(Struct, frozen=True):
    num_attention_heads: Positive | None = None
    num_attention_groups: Positive | None = None
    head_dim: Positive | None = None


class _Step(_Kind, frozen=True, kw_only=True):
    """Source: transformers 5.24, models/step3p7/configuration_step3p7.py."""

    keys = ("attention_other_setting",)
    attention_other_setting: _OtherHeads
    num_attention_heads: Positive
    head_dim: Positive
    num_key_value_heads: Positive | None = None
    num_attention_groups: Positive = 1

    def usual(self) -> dict[str, Any]:
        said = self.attention_other_setting
        size = said.head_dim or self.head_dim
        own = {
            "num_attention_heads": said.num_attention_heads or self.num_attention_heads,
            "num_key_value_heads": said.num_attention_groups
            or self.num_key_value_heads
            or self.num_attention_groups,
            "head_dim": size,
            "v_head_dim": size,
        }
        return {"heads": {SLIDING: own}}


class _Compressed(_Kind, frozen=True, kw_only=True):
    """Source: vLLM 0.33.0, models/deepseek_v4; a ratio beyond the last layer is a drafter's."""

    keys = ("compress_ratios",)
    compress_ratios: list[Natural]
    num_hidden_layers: Positive
    q_lora_rank: Positive
    o_lora_rank: Positive
    o_groups: Positive
    qk_rope_head_dim: Positive
    hc_mult: Positive = 1

    def usual(self) -> dict[str, Any]:
        ratios = self.compress_ratios[: self.num_hidden_layers]
        if len(ratios) < self.num_hidden_layers:
            raise ValueError(f"compress_ratios: {len(ratios)} entries are too few")
        keys = ("q_lora_rank", "o_lora_rank", "o_groups", "qk_rope_head_dim", "hc_mult")
        own = {key: getattr(self, key) for key in keys}
        return {
            "layer_types": [FULL] * self.num_hidden_layers,
            "compressed": {**own, "compress_ratios": ratios},
        }


class _Index(_Kind, frozen=True, kw_only=True):
    """Source: vLLM 0.33.0, model_executor/models/deepseek_v2.py, `Indexer`."""

    keys = ("index_head_dim",)
    index_head_dim: Positive
    index_n_heads: Positive
    index_topk: Positive = 2048
    indexer_types: list[str] | None = None

    def usual(self) -> dict[str, Any]:
        types = self.indexer_types or []
        without = [place for place, kind in enumerate(types) if kind == "shared"]
        return {
            "indexer": {
                "index_n_heads": self.index_n_heads,
                "index_head_dim": self.index_head_dim,
                "index_topk": self.index_topk,
                "without": without,
            }
        }


class _Sparse(Struct, frozen=True, kw_only=True):
    use_sparse_attention: bool = True
    sparse_attention_freq: list[Natural] = []
    sparse_index_dim: Positive
    sparse_num_index_heads: Positive
    sparse_topk_blocks: Positive
    sparse_block_size: Positive


class _MiniMax(_Kind, frozen=True, kw_only=True):
    """Source: transformers 5.24, models/minimax_m3_vl, `MiniMaxM3VLIndexer`."""

    keys = ("sparse_attention_config",)
    sparse_attention_config: _Sparse

    def usual(self) -> dict[str, Any]:
        said = self.sparse_attention_config
        if not said.use_sparse_attention:
            return {}
        without = [place for place, used in enumerate(said.sparse_attention_freq) if not used]
        return {
            "indexer": {
                "index_n_heads": said.sparse_num_index_heads,
                "index_head_dim": said.sparse_index_dim,
                "index_topk": said.sparse_topk_blocks * said.sparse_block_size,
                "without": without,
                "weighs_heads": False,
            }
        }


class _MoeLayers(_Kind, frozen=True, kw_only=True):
    keys = ("moe_layer_freq", "moe_layers_enum", "moe_layer_start_index")
    num_hidden_layers: Positive
    moe_layer_freq: Positive | list[Natural] | None = None
    moe_layers_enum: str | list[Natural] | None = None
    moe_layer_start_index: Natural | None = None
    moe_layer_interval: Positive = 1
    dense_intermediate_size: Positive | None = None

    def usual(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.dense_intermediate_size is not None:
            found["intermediate_size"] = self.dense_intermediate_size
        if self.moe_layer_start_index is not None:
            found["first_k_dense_replace"] = self.moe_layer_start_index
            found["decoder_sparse_step"] = self.moe_layer_interval
        if isinstance(self.moe_layer_freq, int):
            found["decoder_sparse_step"] = self.moe_layer_freq
        elif self.moe_layer_freq is not None:
            found["mlp_layer_types"] = ["sparse" if x else "dense" for x in self.moe_layer_freq]
        if self.moe_layers_enum is not None:
            listed = self.moe_layers_enum
            numbers = listed.split(",") if isinstance(listed, str) else listed
            named = {int(each) for each in numbers}
            places = range(self.num_hidden_layers)
            found["mlp_layer_types"] = ["sparse" if i in named else "dense" for i in places]
        return found


def layouts(table: Mapping[str, Any], where: str) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """What each kind of keys that a file has means under usual ones, and the keys that it read.

    Raises `ConfigError` for a value of another type, and `ValueError` for one that is not
    understood.
    """
    for kind in _Kind.__subclasses__():
        if any(table.get(key) for key in kind.keys):
            yield converted(table, kind, where).usual(), set(kind.__struct_encode_fields__)
