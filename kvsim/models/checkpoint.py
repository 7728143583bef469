"""Reads the `quantization_config` of a checkpoint: bits of a weight, and which parts have them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from kvsim.models.parts import Natural, Positive
from kvsim.models.weights import (
    ALL,
    MXFP4,
    NF4,
    NVFP4,
    Part,
    Quantization,
    grouped,
    is_method,
    quantization,
)

Bits = Annotated[int, Meta(ge=1, le=16)]


class _Weights(Struct, frozen=True, kw_only=True):
    """How one group of a `compressed-tensors` checkpoint stores its weights."""

    num_bits: Bits = 8
    type: str = "float"
    group_size: int | None = None
    symmetric: bool = True


class _Group(Struct, frozen=True, kw_only=True):
    weights: _Weights | None = None
    input_activations: dict[str, Any] | None = None


class QuantizationConfig(Struct, frozen=True, kw_only=True):
    """The keys of a `quantization_config` that matter here."""

    quant_method: str = ""
    bits: Bits | None = None
    w_bit: Bits | None = None
    group_size: int | None = None
    zero_point: bool | None = None
    sym: bool | None = None
    weight_block_size: list[Positive] | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    quant_algo: str | None = None
    config_groups: dict[str, _Group] | None = None
    modules_to_not_convert: list[str] | None = None
    ignore: list[str] | None = None
    ignored_layers: list[str] | None = None
    llm_int8_skip_modules: list[str] | None = None
    num_hidden_layers: Natural = 0


def stored_as(config: QuantizationConfig, layers: int) -> Quantization | None:
    """Returns how a checkpoint stores its weights; None for an unknown method."""
    found = _bits(config)
    if found is None:
        return None
    spared = [
        *(config.modules_to_not_convert or []),
        *(config.ignore or []),
        *(config.ignored_layers or []),
        *(config.llm_int8_skip_modules or []),
    ]
    parts = tuple(part for part in found.parts if not _spares(part, spared, layers))
    return replace(found, parts=parts)


def _bits(config: QuantizationConfig) -> Quantization | None:
    method = config.quant_method.lower().replace("_", "-")
    bits = config.bits or config.w_bit
    group = config.group_size if config.group_size and config.group_size > 0 else None
    if method == "compressed-tensors" and config.config_groups:
        return _compressed(next(iter(config.config_groups.values())))
    if method in ("awq", "gptq", "auto-round"):
        bits = bits or 4
        zeros = 0 if config.zero_point is False else bits
        return Quantization(method=method, bits=grouped(bits, group or 128, 16, zeros))
    if method == "fp8" and config.weight_block_size:
        rows, columns, *_ = [*config.weight_block_size, 1]
        return Quantization(method="fp8", bits=grouped(8, rows * columns, 32), fp8_products=True)
    if method == "mxfp4":
        # Only experts are stored so (vLLM 0.33.0, quantization/mxfp4.py).
        return Quantization(method="mxfp4", bits=MXFP4, parts=("experts",))
    if method == "modelopt" and "FP4" in (config.quant_algo or "").upper():
        return Quantization(method="modelopt_fp4", bits=NVFP4)
    if method in ("bitsandbytes", ""):
        if config.load_in_4bit:
            return Quantization(method="bitsandbytes", bits=NF4)
        return Quantization(method="bitsandbytes", bits=8) if config.load_in_8bit else None
    named = config.quant_method.lower()
    for name in (named, method):
        if is_method(name):
            return quantization(name)
    return None


def _compressed(group: _Group) -> Quantization:
    """A `compressed-tensors` checkpoint, by the first group of its layers."""
    weights = group.weights or _Weights()
    size = weights.group_size if weights.group_size and weights.group_size > 0 else None
    is_float = weights.type == "float"
    bits = float(weights.num_bits)
    if size is not None:
        # Microscaling formats (4-bit floats) have scales of 8 bits, the others of 16.
        scale = 8 if is_float and weights.num_bits == 4 else 16
        bits = grouped(weights.num_bits, size, scale, 0 if weights.symmetric else weights.num_bits)
    fp8 = is_float and weights.num_bits == 8 and group.input_activations is not None
    return Quantization(method="compressed-tensors", bits=bits, parts=ALL, fp8_products=fp8)


def _spares(part: Part, modules: list[str], layers: int) -> bool:
    """Whether a list of unquantised modules names a part in more than half of the layers."""
    named: set[str] = set()
    for module in modules:
        if not _means(part, module):
            continue
        number = re.search(r"layers\.(\d+)", module)
        if number is None:
            return True
        named.add(number[1])
    return 2 * len(named) > layers


def _means(part: Part, module: str) -> bool:
    """Whether the name of a module means a whole part, not one router or gate in it."""
    if part == "attention":
        return bool(re.search(r"self_attn|attention|linear_attn", module))
    if part == "experts":
        return bool(re.search(r"(?<!shared_)experts?\b", module))
    return bool(re.search(r"mlp(\.\*|\$|$)|shared_expert|feed_forward$", module))
