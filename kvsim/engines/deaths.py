"""How real engines die: outcomes of runs that come to a place where the engine raises.
`deaths.toml` has their texts."""

from __future__ import annotations

import tomllib
from pathlib import Path

from kvsim.core.request import Request
from kvsim.errors import EngineStopped

_UNNAMED = "batch-too-large", "padding-cut", "prefill-out-of-memory"
"""Those whose kind is `engine-error`; the others have their name."""


def died(name: str, request: Request, **values: object) -> EngineStopped:
    """The outcome of this name, at a request. `values`: what its texts mention beside the id."""
    texts = tomllib.loads(Path(__file__).with_name("deaths.toml").read_text("utf-8"))[name]
    what, remedy, rule = (
        text.format(id=request.id, **values) if "{" in text else text
        for text in (texts["what"], texts["remedy"], texts["rule"])
    )
    kind = "engine-error" if name in _UNNAMED else name
    return EngineStopped(kind, request.id, what, remedy, rule)
