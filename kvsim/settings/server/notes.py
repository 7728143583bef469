"""What people are told about the settings that were read: one line for each source and reason."""

from __future__ import annotations

from kvsim.settings.config import RunConfig, to_table
from kvsim.settings.server.arguments import Meaning


def notes(meaning: Meaning, where: str, pool: str = "") -> list[str]:
    """What was taken from `where`, and what was left out; `pool`: the blocks, in words."""
    said = dict(meaning.settings)
    head = []
    if "model" in said:
        head.append(f"model {said.pop('model')}")
    if "vllm_version" in said:
        head.append(f"vLLM {said.pop('vllm_version')}")
    if pool:
        del said["num_gpu_blocks_override"], said["block_size"]
        head.append(pool)
    usual = to_table(RunConfig())
    words = {True: "on", False: "off"}
    rest = (
        f"{key} {words[value] if isinstance(value, bool) else value}"
        for key, value in said.items()
        if value != usual[key]
    )
    groups = dict(meaning.ignored)
    if meaning.unknown:
        groups["not known here"] = meaning.unknown
    return [
        f"from {where}: {', '.join([*head, *rest])}",
        *(f"from {where}, {why}: {', '.join(names)}" for why, names in groups.items()),
    ]
