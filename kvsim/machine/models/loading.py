"""Gives the model that a name or a path stands for."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from kvsim.errors import ConfigError
from kvsim.machine.models.geometry import Model
from kvsim.machine.models.names import meaning, nearest_names
from kvsim.machine.models.parts import quantization
from kvsim.settings.config import RunConfig, read_toml
from kvsim.settings.library import convert, find, is_at, names, read_by, read_json


def model_of(config: RunConfig) -> Model:
    """The model of a run, with its weights stored as `quantization` says."""
    model = load_model(config.model_name)
    return model if config.quantization is None else model.quantized(config.quantization)


def load_model(name_or_path: str) -> Model:
    """The model with a shipped name, or that of a TOML, a `config.json` or a folder with one.

    A name may be spelt as on Hugging Face (`kvsim.machine.models.names`); `source` and `notes` say
    what it was taken for. Raises `ConfigError` that names the file and the key, or the nearest
    names.
    """
    path = Path(name_or_path)
    if is_at(Path.is_dir, path):
        path /= "config.json"
    if is_at(Path.is_file, path):
        if path.suffix == ".json":
            from kvsim.machine.models.checkpoint import of_side_car
            from kvsim.machine.models.hugging_face import from_hugging_face

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
    if found.quantization is not None and not _stored_alike(model, found.quantization):
        stored = model.quantized(found.quantization)
        assert stored.quantization is not None
        source = (
            f"{model.source}; weights as {found.quantization} at {stored.quantization.bits:.4g}"
            " bits, by the name"
        )
        model = replace(stored, source=source)
    if model.name == spelling.lower():
        return model
    remark = f"{' '.join(spelling.split())} is read as {_words(model)}"
    return replace(model, remarks=(*model.remarks, remark))


def _stored_alike(model: Model, method: str) -> bool:
    """Whether the shipped weights have about as many bits as a name says."""
    own = model.quantization
    if own is None:
        return False
    bits = own.part_bits.get("experts", own.bits)
    return round(bits) == round(quantization(method).bits)


def _words(model: Model) -> str:
    stored = f" with {model.quantization.method} weights" if model.quantization else ""
    return f"the shipped {model.name}{stored}, {model.max_position_embeddings:,} tokens long"


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
