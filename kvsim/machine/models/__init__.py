"""Today's models as geometries, each by a name or a path, without a network.

| module | what it does |
|---|---|
| `geometry` | counts parameters and bytes of a model, and of the share of one GPU |
| `parts` | describes experts, kinds of attention, groups of layers, bits of a weight |
| `hugging_face` | reads a `config.json`; `families` and `layouts` help it |

`meta-llama/Llama-3.1-8B-Instruct`, `Llama-3.1-8B` and `unsloth/llama-3.1-8b-bnb-4bit` are all
`llama-3.1-8b`. Who publishes it, case, dots and dashes do not matter. Words for tuning, such as
`instruct`, are dropped unless a file is shipped under the full name, because its longest sequence
differs. Words for quantised weights tell how they are stored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvsim.errors import ConfigError
from kvsim.machine.models.geometry import Model, Shard
from kvsim.machine.models.parts import (
    DTYPE_BYTES,
    NAMES,
    Experts,
    KvGroup,
    Latent,
    Linear,
    Quantization,
    method_of,
    quantization,
    words_of,
)
from kvsim.settings.config import RunConfig, read_toml
from kvsim.settings.library import convert, find, is_at, names, read_by, read_json

__all__ = [
    "DTYPE_BYTES",
    "Experts",
    "KvGroup",
    "Latent",
    "Linear",
    "Model",
    "Quantization",
    "Shard",
    "load_model",
    "model_of",
]


class Meaning(NamedTuple):
    """What a spelling stands for."""

    name: str
    """A shipped name."""
    quantization: str | None
    """The method by which the name says that weights are stored; "": they are not quantised."""


def meaning(spelling: str, shipped: Iterable[str]) -> Meaning | None:
    """The shipped model that a spelling means; None for an unknown one."""
    known = {_compact(name): name for name in shipped}
    known |= {
        _compact(alias): name for alias, name in NAMES["aliases"].items() if name in known.values()
    }
    words = words_of(spelling)
    method = method_of(spelling)
    for candidate in _candidates(words):
        if _compact(candidate) in known:
            return Meaning(known[_compact(candidate)], method)
    return None


def nearest_names(spelling: str, shipped: Iterable[str]) -> list[str]:
    """Up to three shipped names that look most like a spelling."""
    compact = {_compact(name): name for name in shipped}
    *_, plain = _candidates(words_of(spelling))
    found = difflib.get_close_matches(_compact(plain), list(compact), n=3, cutoff=0.5)
    return [compact[each] for each in found]


def _candidates(words: list[str]) -> Iterator[str]:
    """Names that the words may mean, the most exact one first."""
    yield "-".join(words)
    stored = {*NAMES["method_of"], *NAMES["quantization"].split()}
    words = [word for word in words if word not in stored]
    yield "-".join(words)
    if "coder" in words:  # the longest sequence of the instruct model of the size
        words = [*(word for word in words if word not in ("coder", "instruct")), "instruct"]
        yield "-".join(words)
    words = [word for word in words if word not in NAMES["tuning"].split()]
    yield "-".join(words)
    words = [word for word in words if word != "instruct"]
    yield "-".join(words)
    # The month of a release, as in `-2507`.
    words = [word for word in words if not re.fullmatch(r"\d{4}|\d{6}", word)]
    yield "-".join(words)


def _compact(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def model_of(config: RunConfig) -> Model:
    """The model of a run, with weights, vectors and states stored as the settings say."""
    model = load_model(config.model_name)
    if config.quantization is not None:
        model = model.quantized(config.quantization)
    if model.latent is not None and config.kv_cache_dtype == "fp8_ds_mla":
        model = replace(model, latent=replace(model.latent, fp8_ds_mla=True))
    states = config.mamba_ssm_cache_dtype
    if model.linear is not None and states not in (None, "auto"):
        model = replace(model, linear=replace(model.linear, mamba_ssm_dtype=states))
    return model


def load_model(name_or_path: str) -> Model:
    """The model with a shipped name, or that of a TOML, a `config.json` or a folder with one.

    A name may be spelt as on Hugging Face; `source` and `notes` say what it was taken for. Raises
    `ConfigError` that names the file and the key, or the nearest names.
    """
    path = Path(name_or_path)
    if is_at(Path.is_dir, path):
        path /= "config.json"
    if is_at(Path.is_file, path):
        if path.suffix == ".json":
            from kvsim.machine.models.hugging_face import from_hugging_face, of_side_car

            beside, side_car = path.with_name("hf_quant_config.json"), None
            if path.name == "config.json" and is_at(Path.is_file, beside):
                side_car = of_side_car(read_json(beside), str(beside))
            return from_hugging_face(read_json(path, infinities=True), str(path), side_car)
        return _read(path)
    return _shipped(name_or_path)


def _read(path: Path) -> Model:
    return convert(read_toml(str(path)), Model, str(path))


def _shipped(spelling: str) -> Model:
    known = names("models")
    found = meaning(spelling, known)
    if found is None:
        raise ConfigError(_unknown(spelling, known))
    model = read_by(_read, "models", find("models", found.name))
    if spelling == found.name:
        return model
    said = found.quantization
    if said is not None and not _stored_alike(model, said):
        stored = quantization(said) if said else None
        how = f"as {said} at {stored.bits:.4g} bits" if stored else "unquantised"
        source = f"{model.source}; weights {how}, by the name"
        model = replace(model, quantization=stored, source=source)
    if model.name == spelling.lower():
        return model
    weights = f" with {model.quantization.method} weights" if model.quantization else ""
    remark = (
        f"{' '.join(spelling.split())} is read as the shipped {model.name}{weights},"
        f" {model.max_position_embeddings:,} tokens long"
    )
    return replace(model, remarks=(*model.remarks, remark))


def _stored_alike(model: Model, method: str) -> bool:
    """Whether the shipped weights have about as many bits as a name says."""
    own = model.quantization
    if own is None or not method:
        return own is None and not method
    bits = own.part_bits.get("experts", own.bits)
    return round(bits) == round(quantization(method).bits)


def _unknown(spelling: str, known: list[str]) -> str:
    if spelling and is_at(Path.is_dir, Path(spelling)):
        return f"{spelling}: no config.json in this folder; give a folder that has one"
    if Path(spelling).suffix in (".toml", ".json"):
        return f"{spelling}: no such file; give a model file that exists"
    near = nearest_names(spelling, known)
    words = f" did you mean {', '.join(map(repr, near))}?" if near else ""
    return (
        f"no model named {spelling!r:.200};{words} give one of the {len(known)} names in"
        " configs/models, or the path of a config.json or a TOML"
    )
