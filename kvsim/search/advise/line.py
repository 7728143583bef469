"""Writes advice as a command line to paste."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from msgspec.structs import replace

from kvsim.engines import ENGINES
from kvsim.run.assembly import assemble
from kvsim.run.told import settled
from kvsim.search.advise.search import Advice
from kvsim.settings.server import ServerWord
from kvsim.settings.server.arguments import Argument
from kvsim.settings.server.command import flags, given_settings, serve_line


def serve_command(advice: Advice, word: ServerWord, given: Sequence[Argument]) -> str:
    """The server's command line with the advice; for other engines, that of `kvsim run`.

    `given`: the arguments of the line that the server has now; empty if nobody gave one.
    """
    best = advice.best.config
    engine = ENGINES.get(best.engine)
    if engine is None or engine.vllm_version is None:
        changes = {"engine": best.engine, **advice.best.settings}
        return shlex.join(["kvsim", "run", *flags(changes)])
    settings = given_settings(best, assemble(best).model.source)
    pool, base = "num_gpu_blocks_override", advice.base.config
    if counted := word.counted_with.get(pool):
        logged, _ = settled(replace(base, num_gpu_blocks_override=counted), word)
        if logged.num_gpu_blocks_override == base.num_gpu_blocks_override:
            settings.pop(pool, None)  # no argument of the server
    if given:
        said = word.settings
        settings = {key: value for key, value in settings.items() if said.get(key) != value}
    return serve_line(given, {**settings, **advice.best.settings})
