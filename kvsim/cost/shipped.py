"""Chooses the shipped profile for a run that names no cost model."""

from __future__ import annotations

from kvsim.cost.profile import load_profile
from kvsim.cost.scaling import differences
from kvsim.machine.hardware import Hardware
from kvsim.machine.models import Model
from kvsim.settings.config import RunConfig
from kvsim.settings.library import names

_TRUST = ("measured", "estimated", "public-table", "scaled", "roofline")


def profile_for(model: Model, hardware: Hardware, config: RunConfig) -> str | None:
    """The name of the shipped profile of the hardware that fits a run best; None if there is none.

    Profiles that need no scaling come first, then measured ones. There is none for a model that is
    not dense, or has quantised weights: no profile is scaled to it.
    """
    if model.special:
        return None
    ranked = []
    for name in names("profiles"):
        profile = load_profile(name)
        if profile.device.get("name") in (hardware.name, *hardware.device_names):
            changed = bool(differences(profile, model, config))
            ranked.append((changed, _TRUST.index(profile.source), name))
    return min(ranked)[-1] if ranked else None
