"""Estimates how many parameters towers for images and sounds, and their projectors, have.

They take memory on the GPU and, in a text-only run, nothing else. A tower is a stack of encoder
layers of four square projections and an MLP; its projector maps `hidden_size` to that of the text.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

from kvsim.machine.models.parts import Natural, Positive


class VisionConfig(Struct, frozen=True, kw_only=True):
    """The keys of a `vision_config` that matter here."""

    model_type: str | None = None
    hidden_size: Positive | None = None
    embed_dim: Positive | None = None
    """Qwen2-VL's name of the width; its `hidden_size` is that of the text."""
    vt_hidden_size: Positive | None = None
    """Kimi's name of the width."""
    intermediate_size: Positive | None = None
    vt_intermediate_size: Positive | None = None
    num_hidden_layers: Positive | None = None
    depth: Positive | None = None
    """Qwen's name of `num_hidden_layers`."""
    vt_num_hidden_layers: Positive | None = None
    patch_size: Natural | None = None
    temporal_patch_size: Positive = 1
    image_size: Natural | None = None
    num_position_embeddings: Natural | None = None
    position_embedding_size: Natural | None = None
    """Gemma's; there are two such tables."""
    deepstack_visual_indexes: list[Natural] = []
    """Layers after which there is a projector, too."""


class _Tower(NamedTuple):
    """A published tower: what its files may leave out."""

    layers: int
    intermediate_size: int
    gated_mlp: bool = False
    projector: Literal["one", "two", "merge", "wide"] = "two"
    """One matrix; two; two after one that merges 2 x 2 patches; or two that are as wide as four
    patches."""


_TOWERS = {
    # SigLIP SO400M, arXiv 2303.15343; Gemma 3 projects with one matrix.
    "siglip_vision_model": _Tower(27, 4304, projector="one"),
    "gemma4_vision": _Tower(27, 4304, gated_mlp=True, projector="one"),
    # Pixtral 12B, arXiv 2410.07073, table 1.
    "pixtral": _Tower(24, 4096, gated_mlp=True, projector="merge"),
    "clip_vision_model": _Tower(24, 4096),
    "qwen2_5_vl": _Tower(32, 3420, gated_mlp=True, projector="wide"),
    "qwen2_vl": _Tower(32, 5120, projector="wide"),
    "llama4_vision_model": _Tower(34, 5632),
}
_WIDE = _Tower(27, 4304, projector="wide")
"""Towers of Qwen from 3 on, and of Kimi."""

STEP_TOWER = 1_980_000_000
"""Parameters of Step-3.7's tower, which files may leave out (transformers 5.24,
models/step3p7/configuration_step3p7.py, defaults)."""


class AudioConfig(Struct, frozen=True, kw_only=True):
    """The keys of an `audio_config` that matter here."""

    hidden_size: Positive | None = None
    num_hidden_layers: Positive | None = None


def audio_parameters(config: AudioConfig) -> tuple[int, str]:
    """Estimated parameters of a tower of Conformers: two MLPs, attention and a convolution."""
    if config.hidden_size is None or config.num_hidden_layers is None:
        return 0, "audio_config does not give the size of its tower: its weights are not counted"
    found = config.num_hidden_layers * 49 * config.hidden_size**2 // 2
    return found, f"{found / 1e6:,.0f} M parameters of its audio tower are an estimate"


def vision_parameters(config: VisionConfig, text_hidden_size: int) -> tuple[int, str]:
    """Estimated parameters of a tower and its projector, and a sentence that says so.

    The sentence of a tower that cannot be estimated says that its weights are not counted.
    """
    known = _TOWERS.get(config.model_type or "")
    if known is None and (config.depth or config.vt_hidden_size):
        known = _WIDE
    hidden = config.embed_dim or config.vt_hidden_size or config.hidden_size
    layers = config.num_hidden_layers or config.depth or config.vt_num_hidden_layers
    layers = layers or (known.layers if known else None)
    columns = config.intermediate_size or config.vt_intermediate_size
    columns = columns or (known.intermediate_size if known else None)
    if hidden is None or layers is None:
        return 0, "vision_config does not give the size of its tower: its weights are not counted"
    gated = known is not None and known.gated_mlp
    layer = 4 * hidden * hidden + (3 if gated else 2) * hidden * (columns or 4 * hidden)
    patch = config.patch_size or 14
    places = config.num_position_embeddings or 2 * (config.position_embedding_size or 0)
    places = places or ((config.image_size or 0) // patch) ** 2
    found = layers * layer + hidden * (3 * patch * patch * config.temporal_patch_size + places)
    projectors = 1 + len(config.deepstack_visual_indexes)
    found += projectors * _projector(known.projector if known else "two", hidden, text_hidden_size)
    return found, f"{found / 1e6:,.0f} M parameters of its vision tower are an estimate"


def _projector(kind: str, hidden: int, text: int) -> int:
    if kind == "one":
        return hidden * text
    if kind == "wide":
        return 4 * hidden * (4 * hidden + text)
    return (4 * hidden * hidden if kind == "merge" else 0) + hidden * text + text * text
