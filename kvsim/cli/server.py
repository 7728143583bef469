"""Settings from a real server, beneath those of the configuration file and the flags."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvsim.cli.options import config_path
from kvsim.config import RunConfig, load_config

if TYPE_CHECKING:
    from kvsim.server import ServerWord


def server_word(startup_log: str | None, vllm: str | None, vllm_file: str | None) -> ServerWord:
    """What the server says; where its settings come from goes to standard error."""
    from kvsim.server import server_settings

    word = server_settings(startup_log, vllm, vllm_file)
    _tell(word.notes)
    return word


def load_over(
    word: ServerWord, config: str | None, flags: Mapping[str, Any], assignments: Iterable[str]
) -> RunConfig:
    """The settings of a run; what the file or a flag says counts more than the server's word."""
    loaded = load_config(config_path(config), flags, assignments, word.settings)
    _tell(word.doubts(loaded))
    return loaded


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"note: {line}", file=sys.stderr)
