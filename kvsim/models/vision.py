"""Estimates how many parameters a vision tower and its projector have.

They take memory on the GPU and, in a text-only run, nothing else. A tower is a stack of encoder
layers of four square projections and an MLP; its projector maps `hidden_size` to that of the text.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from kvsim.models.parts import Natural, Positive


class VisionConfig(Struct, frozen=True, kw_only=True):
    """The keys of a `vision_config` that matter here."""

    model_type: str | None = None
    hidden_size: Positive | None = None
    embed_dim: Positive | None = None
    """Qwen2-VL's name of the width; its `hidden_size` is that of the text."""
    intermediate_size: Positive | None = None
    num_hidden_layers: Positive | None = None
    depth: Positive | None = None
    """Qwen's name of `num_hidden_layers`."""
    patch_size: Natural | None = None
    image_size: Natural | None = None


class _Tower(NamedTuple):
    """A published tower: what its files may leave out."""

    layers: int
    intermediate_size: int
    gated_mlp: bool = False
    merges: bool = False
    """Whether 2 x 2 patches are merged before the projector."""
    deep_projector: bool = True
    """Whether the projector has a second layer."""


_TOWERS = {
    # SigLIP SO400M, arXiv 2303.15343; Gemma 3 projects with one matrix.
    "siglip_vision_model": _Tower(27, 4304, deep_projector=False),
    # Pixtral 12B, arXiv 2410.07073, table 1.
    "pixtral": _Tower(24, 4096, gated_mlp=True, merges=True),
    "clip_vision_model": _Tower(24, 4096),
    "qwen2_5_vl": _Tower(32, 3420, gated_mlp=True, merges=True),
    "qwen2_vl": _Tower(32, 5120, merges=True),
    "qwen3_vl": _Tower(27, 4304, merges=True),
    "llama4_vision_model": _Tower(34, 5632),
}


def vision_parameters(config: VisionConfig, text_hidden_size: int) -> tuple[int, str]:
    """Estimated parameters of a tower and its projector, and a sentence that says so.

    The sentence of a tower that cannot be estimated says that its weights are not counted.
    """
    known = _TOWERS.get(config.model_type or "")
    hidden = config.embed_dim or config.hidden_size
    layers = config.num_hidden_layers or config.depth or (known.layers if known else None)
    columns = config.intermediate_size or (known.intermediate_size if known else None)
    if hidden is None or layers is None:
        return 0, "vision_config does not give the size of its tower: its weights are not counted"
    gated = known is not None and known.gated_mlp
    layer = 4 * hidden * hidden + (3 if gated else 2) * hidden * (columns or 4 * hidden)
    patch = config.patch_size or 14
    tokens = ((config.image_size or 0) // patch) ** 2 if patch else 0
    found = layers * layer + hidden * (3 * patch * patch + tokens)
    found += _projector(known, hidden, text_hidden_size)
    return found, f"{found / 1e6:,.0f} M parameters of its vision tower are an estimate"


def _projector(known: _Tower | None, hidden: int, text: int) -> int:
    if known is not None and not known.deep_projector:
        return hidden * text
    merged = 4 * hidden * hidden if known is not None and known.merges else 0
    return merged + hidden * text + text * text
