"""How many bits a weight takes, quantised or not.

Quantised are the matrix products of the layers. Embeddings, the output projection, norms, biases,
routers and vision towers keep the type of the model, as they do in the usual checkpoints.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvsim.errors import check_choice

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}

Part = Literal["attention", "mlp", "experts"]
"""A part of a layer that is quantised or not; `mlp` includes shared experts."""

ALL: tuple[Part, ...] = ("attention", "mlp", "experts")


class Quantization(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the weights of the layers are stored."""

    method: str
    """Name of the method, as `--quantization` of vLLM takes it."""
    bits: Annotated[float, Meta(gt=0, le=64)]
    """Bits a weight takes on average, with its share of scales and zero points."""
    parts: tuple[Part, ...] = ALL
    """The parts that are quantised."""
    part_bits: dict[Part, Annotated[float, Meta(gt=0, le=64)]] = {}
    """Bits of the parts that have others than `bits`."""
    fp8_products: bool = False
    """Whether activations are quantised to FP8 too, so that products run at the FP8 peak."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Type of the KV cache for which the checkpoint has scales."""


def grouped(bits: int, group_size: int, scale_bits: int, zero_bits: int = 0) -> float:
    """Bits a weight takes, if every `group_size` weights share a scale and a zero point."""
    return bits + (scale_bits + zero_bits) / group_size


INT4 = grouped(4, 128, 16, 4)
"""AWQ and GPTQ at their usual group of 128: a 16-bit scale, a 4-bit zero point."""
NF4 = 4 + 8 / 64 + 32 / (64 * 256)
"""bitsandbytes: 8-bit scales of 64 weights, themselves scaled in groups of 256 (QLoRA, section 3).
"""
BLOCK_FP8 = grouped(8, 128 * 128, 32)
"""One float32 scale for a block of 128 x 128 weights, as in DeepSeek-V3."""
NVFP4 = grouped(4, 16, 8)
MXFP4 = grouped(4, 32, 8)
"""An 8-bit exponent for 32 weights (OCP Microscaling Formats 1.0)."""
MXFP8 = grouped(8, 32, 8)

_FP8 = [
    "fp8",
    "fp8_per_tensor",
    "fp8_per_channel",
    "fbgemm_fp8",
    "compressed-tensors",
    "modelopt",
    "quark",
]
_METHODS = {
    **{name: Quantization(method=name, bits=8, fp8_products=True) for name in _FP8},
    "fp8_per_block": Quantization(method="fp8_per_block", bits=BLOCK_FP8, fp8_products=True),
    "mxfp8": Quantization(method="mxfp8", bits=MXFP8, fp8_products=True),
    "modelopt_mxfp8": Quantization(method="modelopt_mxfp8", bits=MXFP8, fp8_products=True),
    "modelopt_fp4": Quantization(method="modelopt_fp4", bits=NVFP4),
    "nvfp4_per_token": Quantization(method="nvfp4_per_token", bits=NVFP4),
    **{
        name: Quantization(method=name, bits=INT4)
        for name in ["awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "w4a16"]
    },
    "gptq-int8": Quantization(method="gptq-int8", bits=grouped(8, 128, 16, 8)),
    "w8a8": Quantization(method="w8a8", bits=8),
    "int8_per_channel_weight_only": Quantization(method="int8_per_channel_weight_only", bits=8),
    "bitsandbytes": Quantization(method="bitsandbytes", bits=NF4),
    "mxfp4": Quantization(method="mxfp4", bits=MXFP4, parts=("experts",)),
    "gpt_oss_mxfp4": Quantization(method="gpt_oss_mxfp4", bits=MXFP4, parts=("experts",)),
    "experts_int8": Quantization(method="experts_int8", bits=8, parts=("experts",)),
}
"""Name → its usual form. Names and the parts that they quantise are vLLM 0.33.0's,
`model_executor/layers/quantization/`; `w4a16`, `w8a8` and `gptq-int8` stand for suffixes of names.
"""


def quantization(method: str) -> Quantization:
    """The usual form of a method; raises `ConfigError` with the nearest name for an unknown one."""
    check_choice("quantization", method, _METHODS)
    return _METHODS[method]


def is_method(method: str) -> bool:
    """Whether `quantization` knows a method."""
    return method in _METHODS
