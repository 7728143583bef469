"""Reads the `quantization_config` of a checkpoint: bits of a weight, and which parts have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from kvsim.machine.models.parts import (
    ALL,
    NF4,
    Part,
    Positive,
    Quantization,
    grouped,
    is_method,
    quantization,
)
from kvsim.settings.library import converted

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
    targets: list[str] = []


class _Layer(Struct, frozen=True, kw_only=True):
    """How ModelOpt stores one module."""

    quant_algo: str = ""


class _SideCar(Struct, frozen=True, kw_only=True):
    """What ModelOpt's `hf_quant_config.json` has under `quantization`."""

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    quantized_layers: dict[str, _Layer] | None = None
    exclude_modules: list[str] | None = None


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
    kv_cache_quant_algo: str | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    config_groups: dict[str, _Group] | None = None
    quantized_layers: dict[str, _Layer] | None = None
    modules_to_not_convert: list[str] | None = None
    ignore: list[str] | None = None
    ignored_layers: list[str] | None = None
    llm_int8_skip_modules: list[str] | None = None
    exclude: list[str] | None = None
    global_quant_config: dict[str, Any] | None = None


def of_side_car(table: Mapping[str, Any], where: str) -> QuantizationConfig:
    """What `hf_quant_config.json` says, as a `quantization_config` would."""
    said = converted(table.get("quantization", {}), _SideCar, where)
    return QuantizationConfig(
        quant_method="modelopt",
        quant_algo=said.quant_algo,
        kv_cache_quant_algo=said.kv_cache_quant_algo,
        quantized_layers=said.quantized_layers,
        ignore=said.exclude_modules,
    )


def stored_as(
    config: QuantizationConfig, layers: int, expert_dtype: str | None = None
) -> Quantization | None:
    """Returns how a checkpoint stores its weights; None for an unknown method.

    `expert_dtype`: that of a `config.json` which stores experts otherwise than the rest.
    """
    rules = [*_rules(config)]
    if not rules:
        return None
    found: dict[Part, Quantization] = {}
    for modules, stored in rules:
        for part in stored.parts:
            if modules is None or any(_means(part, each) for each in modules):
                found.setdefault(part, stored)
    if expert_dtype == "fp4" and found.get("experts", rules[0][1]).bits >= 8:
        found["experts"] = quantization("mxfp4")
    if config.quantized_layers and config.weight_block_size:
        config = replace(config, ignore=None)  # what is not in 4 bits is in 8
    spared = [
        *(config.modules_to_not_convert or []),
        *(config.ignore or []),
        *(config.ignored_layers or []),
        *(config.llm_int8_skip_modules or []),
        *(config.exclude or []),
    ]
    found = {part: found[part] for part in ALL if part in found}
    found = {part: each for part, each in found.items() if not _spares(part, spared, layers)}
    first = rules[0][1]
    others = {part: each.bits for part, each in found.items() if each.bits != first.bits}
    stored = replace(first, parts=tuple(found), part_bits=others)
    return replace(stored, kv_cache_dtype="fp8") if _has_fp8_cache(config) else stored


def _has_fp8_cache(config: QuantizationConfig) -> bool:
    """Whether vLLM takes a KV cache in FP8 for a checkpoint, unless it is told otherwise.

    Source: vLLM of 2026, utils/torch_utils.py, `get_kv_cache_quant_algo_string`, for ModelOpt;
    model_executor/layers/attention/attention.py, `Attention`, for compressed-tensors.
    """
    scheme, method = config.kv_cache_scheme, config.quant_method.lower().replace("_", "-")
    if method.startswith("modelopt"):
        fp8 = {"dynamic": False, "num_bits": 8, "type": "float"}
        if scheme:
            return all(scheme.get(key) == value for key, value in fp8.items())
        return (config.kv_cache_quant_algo or "").lower() == "fp8"
    return method == "compressed-tensors" and scheme is not None


def _rules(config: QuantizationConfig) -> Iterator[tuple[list[str] | None, Quantization]]:
    """How modules are stored, with their names; None: all that are not named apart."""
    of_algo: dict[str, list[str]] = {}
    for name, layer in (config.quantized_layers or {}).items():
        of_algo.setdefault(layer.quant_algo, []).append(name)
    for algo, modules in of_algo.items():
        if stored := _of_algo(algo):
            yield modules, stored
    groups = [group for group in (config.config_groups or {}).values() if group.weights is not None]
    method = config.quant_method.lower().replace("_", "-")
    if of_algo and method != "fp8":
        return
    if groups and not of_algo and method in ("compressed-tensors", "modelopt"):
        for group in groups:
            named = [target for target in group.targets if "." in target or ":" in target]
            stored = _compressed(group)
            if method == "modelopt":
                stored = replace(stored, method="modelopt_fp4" if stored.bits < 8 else "modelopt")
            yield named or None, stored
    elif found := _bits(config):
        yield None, found


def _of_algo(algo: str) -> Quantization | None:
    """What ModelOpt calls `FP8`, `NVFP4`, `W4A16_NVFP4` and the like."""
    algo = algo.upper()
    if "MXFP8" in algo:
        return quantization("modelopt_mxfp8")
    if "FP4" in algo:
        return quantization("mxfp4" if "MXFP4" in algo else "modelopt_fp4")
    if "FP8" in algo:
        return quantization("modelopt")
    return quantization("awq") if "AWQ" in algo or "INT4" in algo else None


def _bits(config: QuantizationConfig) -> Quantization | None:
    method = config.quant_method.lower().replace("_", "-")
    bits = config.bits or config.w_bit
    group = config.group_size if config.group_size and config.group_size > 0 else None
    if method in ("awq", "gptq", "auto-round"):
        bits = bits or 4
        zeros = 0 if config.zero_point is False else bits
        return Quantization(method=method, bits=grouped(bits, group or 128, 16, zeros))
    if method == "fp8" and config.weight_block_size:
        rows, columns, *_ = [*config.weight_block_size, 1]
        return Quantization(method="fp8", bits=grouped(8, rows * columns, 32), fp8_products=True)
    if method == "modelopt" and config.quant_algo:
        return _of_algo(config.quant_algo)
    if method == "quark" and config.global_quant_config:
        weight = config.global_quant_config.get("weight")
        if isinstance(weight, Mapping) and weight.get("dtype") == "fp4":
            return replace(quantization("mxfp4"), method="quark", parts=ALL)
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
    """A group of layers of a `compressed-tensors` checkpoint."""
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


_NAMES: dict[Part, str] = {
    "attention": r"\battn|self_attn|attention|linear_attn|mixer\.(in|out|[qkvo])_proj",
    "experts": r"(?<!shared_)experts?\b",
    "mlp": r"mlp(\.?\*|\$|$|\\?\.\(?(gate|up|down)(_|\|))|shared_expert|feed_forward$",
}
"""Names of modules that mean a whole part, not one router or gate in it."""


def _means(part: Part, module: str) -> bool:
    return bool(re.search(_NAMES[part], module))
