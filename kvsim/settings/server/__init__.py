"""What a user's real server says about itself: its log when it starts, and its command line.

```
--vllm-file ─ script ┐
--vllm ──────────────┴─ command ── arguments, looked up in a table ─┬─ server_settings
--startup-log ─ log ────────────────────────────────────────────────┘
```
Nothing is simulated here: `server_settings` returns settings, and where each comes from. Each
engine has a table of its own, `vllm.toml` and `sglang.toml`; `sglang` reads SGLang's log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvsim.errors import ConfigError
from kvsim.settings.config import RunConfig, make_config, to_table
from kvsim.settings.parsing import FILES, named_code, refuse_code
from kvsim.settings.server.arguments import Meaning, leave_unused

if TYPE_CHECKING:
    from kvsim.settings.server.log import Start

_POOL_DEPENDS_ON = (
    "block_size",
    "dtype",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_num_batched_tokens",
    "max_num_seqs",
    "model",
    "pipeline_parallel_size",
    "quantization",
    "tensor_parallel_size",
)

_TEXT = "--vllm: "
"""How sources on the user's own command line begin."""


class ServerWord(Struct, frozen=True):
    """What a server says about itself."""

    settings: Mapping[str, Any] = {}
    """Keys and values of `RunConfig`."""
    notes: list[str] = []
    """One line each, for people: where settings come from, and what is left out."""
    sources: Mapping[str, str] = {}
    """Setting → where it comes from, as `vllm.log:42`."""
    counted_with: Mapping[str, Any] = {}
    """What the log says, with the `num_gpu_blocks_override` that was counted under these settings;
    empty without a log."""
    start: Start | None = None
    """What the log says that is no setting: how large pool and weights are."""
    origin: str = ""
    """Where the word comes from, for messages: `vllm.log and --vllm`; empty if nobody gave any."""

    def doubts(self, config: RunConfig) -> list[str]:
        """What speaks against the log's block count in a run with these settings."""
        counted = self.counted_with.get("num_gpu_blocks_override")
        if counted is None or config.num_gpu_blocks_override != counted:
            return []
        table = to_table(config)
        changed = [
            f"{key} {self.counted_with[key]}, not {table[key]}"
            for key in _POOL_DEPENDS_ON
            if key in self.counted_with and table[key] != self.counted_with[key]
        ]
        if not changed:
            return []
        return [
            f"the log's {counted:,} blocks were counted with {'; '.join(changed)}:"
            " --num-gpu-blocks-override says how many there are now"
        ]

    def refuse_code(self, config: RunConfig, given: Sequence[Any]) -> None:
        """Raise `ConfigError` for code in these settings of a run that a log or a file of the
        server names, and nobody in what was `given` here: a file from elsewhere must not run what
        it likes."""
        trusted = set(named_code(given))
        for key, value in to_table(config).items():
            source = self.sources.get(key, _TEXT)
            if key in FILES or source.startswith(_TEXT):
                continue
            # The model of a drafter is a file's name, not code.
            used = {**value, "model": None} if isinstance(value, dict) else value
            remedy = f"give {key} on the command line, too"
            refuse_code(named_code(used), trusted, f"{source}: runs", remedy)


def server_settings(
    startup_log: str | None = None, vllm: str | None = None, vllm_file: str | None = None
) -> ServerWord:
    """The settings that a server's log and its command line say.

    `startup_log`: path of a log, gzipped or not; `vllm`: a command line; `vllm_file`: path of a
    shell script with one, or of a record's `meta.json`. Where both say something, the command line
    counts; the number of blocks is the log's, unless the command line has one.

    Raises `ConfigError` for what cannot be read, is unknown, or cannot be simulated.
    """
    if vllm is not None and vllm_file is not None:
        raise ConfigError("--vllm-file: --vllm is given too; leave one out")
    given = (startup_log, vllm and "--vllm", vllm_file)
    if all(each is None for each in given):
        return ServerWord()
    log, line, start = Meaning(), Meaning(), None
    notes: list[str] = []
    if startup_log is not None:
        from kvsim.settings.server.log import settings_of_log
        from kvsim.settings.server.sglang import is_sglang, settings_of_sglang

        read = settings_of_sglang if is_sglang(startup_log) else settings_of_log
        log, notes, start = read(startup_log)
    if vllm is not None or vllm_file is not None:
        from kvsim.settings.server.command import settings_of_command

        line, of_line = settings_of_command(vllm, vllm_file)
        notes = [*notes, *of_line]
    joined = _join(log, line)
    for key, value in joined.settings.items():
        make_config({key: value}, joined.sources[key])
    origin = " and ".join(filter(None, given))
    return ServerWord(joined.settings, notes, joined.sources, log.settings, start, origin)


def _join(log: Meaning, line: Meaning) -> Meaning:
    """The command line over the log, except where it only assumes what the log knows."""
    joined = Meaning(dict(log.settings), dict(log.sources))
    for key, value in line.settings.items():
        assumed = key in ("engine", "vllm_version") or value == "auto"
        if not (assumed and key in log.settings):
            joined.set(key, value, line.sources[key])
    leave_unused(joined)
    return joined
