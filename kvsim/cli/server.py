"""Settings from a real server, beneath those of the configuration file and the flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvsim.cli.console import note
from kvsim.cli.flags import Flags
from kvsim.cli.options import Bundle
from kvsim.settings.config import RunConfig, layered, read_toml

if TYPE_CHECKING:
    from kvsim.settings.server import ServerWord


@dataclass(frozen=True)
class ServerOptions(Bundle):
    """Where a real server says its settings."""

    startup_log: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Settings and block count from the log of a vLLM or SGLang server; .gz too.",
        ),
    ] = None
    vllm: Annotated[
        str | None,
        Option(
            metavar="COMMAND",
            help="Settings from `vllm serve ...` or `python -m sglang.launch_server ...`.",
        ),
    ] = None
    vllm_file: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Settings from the command in a shell script, or from the meta.json of a recorded"
            " run.",
        ),
    ] = None

    def word(self) -> ServerWord:
        """What the server says; where its settings come from goes to standard error."""
        from kvsim.settings.server import server_settings

        word = server_settings(self.startup_log, self.vllm, self.vllm_file)
        note(*word.notes)
        return word


@dataclass(frozen=True, kw_only=True)
class SettingOptions(Bundle):
    """Every setting of a run."""

    assignments: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Any setting, as in --set cost.step_us=5000."),
    ] = None
    flags: Flags

    def load(self, config: str | None, word: ServerWord | None = None) -> RunConfig:
        """The settings of a run: what the file `config` or a flag says counts more than `word`.

        What the server's block count means goes to standard error. Raises `ConfigError`.
        """
        path = config_path(config)
        return self.over({} if path is None else read_toml(path), path or "configuration", word)

    def over(
        self, table: Mapping[str, Any], where: str, word: ServerWord | None = None
    ) -> RunConfig:
        """`load` of a table that was read at `where`."""
        beneath = {} if word is None else word.settings
        assigned = self.assignments or ()
        loaded = layered(table, where, self.flags.settings, assigned, beneath)
        if word is None or not word.origin:
            return loaded
        from kvsim.run.told import settled

        values = [assignment.partition("=")[2] for assignment in assigned]
        word.refuse_code(loaded, [table, self.flags.settings, *values])
        note(*word.doubts(loaded))
        loaded, notes = settled(loaded, word)
        note(*notes)
        return loaded


def config_path(config: str | None) -> str | None:
    """The file that a name in configs/runs, or a path, stands for."""
    if config is None:
        return None
    from kvsim.settings.library import find

    return str(find("runs", config))
