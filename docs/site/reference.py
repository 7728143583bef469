"""Writes the pages of docs/reference that are made from the code.

python docs/site/reference.py
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
from rich.table import Table  # noqa: E402

from kvsim.cli.commands import COMMANDS, load  # noqa: E402
from kvsim.cli.policies import catalogue  # noqa: E402
from kvsim.core.schema import TABLES  # noqa: E402
from kvsim.core.schema import Table as Columns  # noqa: E402
from kvsim.cost.profile import Profile  # noqa: E402
from kvsim.engines import ENGINES  # noqa: E402
from kvsim.engines.vllm_v1.releases import NEWEST, OLDEST, RULES  # noqa: E402
from kvsim.machine.hardware import Hardware  # noqa: E402
from kvsim.machine.models import Model  # noqa: E402
from kvsim.settings.config import SIZES, RunConfig, about  # noqa: E402
from kvsim.settings.server.arguments import VLLM, Used  # noqa: E402
from kvsim.settings.versions import GIB, OLDEST_V1, batch_limits, release  # noqa: E402
from kvsim.workload.spec import Workload  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
MADE = "Written from the code by `python docs/site/reference.py`."
SETTINGS = frozenset(RunConfig.__struct_fields__)

UNITS = {
    "time_scale": "factor",
    "request_rate": "requests/s",
    "burstiness": "shape",
    "max_concurrency": "requests",
    "cuda_graph_max_bs": "sequences",
    "think_time_scale": "factor",
    "max_think_time_s": "s",
    "num_prompts": "requests",
    "n": "samples",
    "seed": "",
    "max_loras": "adapters",
    "max_lora_rank": "rank",
    "block_size": "tokens",
    "max_num_seqs": "sequences",
    "max_num_batched_tokens": "tokens",
    "max_model_len": "tokens",
    "watermark": "share of blocks",
    "long_prefill_token_threshold": "tokens",
    "max_num_active_seqs": "sequences",
    "max_num_scheduled_tokens": "tokens",
    "prefill_schedule_interval": "steps",
    "prefix_cache_retention_interval": "tokens",
    "tensor_parallel_size": "GPUs",
    "pipeline_parallel_size": "stages",
    "data_parallel_size": "replicas",
    "gpu_memory_utilization": "share of memory",
    "kv_cache_memory_bytes": "bytes",
    "cpu_offload_gb": "GiB",
    "kv_offloading_size": "GiB",
    "swap_space": "GiB",
    "num_gpu_blocks_override": "blocks",
    "num_cpu_blocks_override": "blocks",
    "goodput": "ms",
}
"""Units of the settings that are numbers."""


def row(*cells: str) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(" ".join(each.replace("|", "\\|").split()) for each in cells) + " |"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    return "\n".join([row(*head), "|" + "---|" * len(head), *(row(*each) for each in rows)])


def settings() -> str:
    """The page of settings: one table for each panel of `kvsim run --help`."""
    hints = get_type_hints(RunConfig, include_extras=True)
    panels: dict[str, list[list[str]]] = {}
    for key, default in zip(
        RunConfig.__struct_fields__, RunConfig.__struct_defaults__, strict=True
    ):
        kind = plain(hints[key])
        numbers = any(each in (int, float) for each in (kind, *get_args(kind)))
        unit = UNITS[key] if numbers else UNITS.get(key, "")
        panel, text = about()[key]
        rows = panels.setdefault(panel, [])
        stated = default is not None and get_origin(kind) is not dict
        shown = f"`{written(default)}`" if stated else ""
        rows.append([f"`{key}`", words(kind), shown, unit, vllm_names(key), text])
    head = ("key", "type", "default", "unit", "vLLM", "meaning")
    parts = [
        f"# Settings\n\n{MADE}",
        "Each key is a line of a TOML file (`--config`) and a flag: `max_num_seqs = 64` is"
        " `--max-num-seqs 64`. A switch that is on by default is turned off with `--no-` before its"
        " name. The tables at the end are reached with `--set TABLE.KEY=VALUE`.",
        "No default means that the engine, its release or the model chooses; `kvsim run` prints"
        " what was chosen, and `summary.json` keeps it under `meta.assumed`. [Engines](engines.md)"
        " has the values. The column *vLLM* names the argument of `vllm serve` that becomes this"
        " setting, where there is one.",
        "[`settings.schema.json`](settings.schema.json) is the JSON schema of such a file, for"
        " editors that check and complete.",
        *(f"## {panel}\n\n{table(head, rows)}" for panel, rows in panels.items()),
    ]
    return "\n\n".join(parts) + "\n"


def plain(hint: Any) -> Any:
    """A type without annotations and without `None`."""
    if get_origin(hint) is Annotated:
        return plain(get_args(hint)[0])
    rest = [plain(each) for each in get_args(hint) if each is not type(None)]
    if get_origin(hint) in (Literal, dict) or not rest:
        return hint
    found = rest[0]
    for each in rest[1:]:
        found = found | each
    return found


def words(kind: Any) -> str:
    """A type as people say it."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(kind))
    if get_origin(kind) is dict:
        return "table"
    named = {int: "whole number", float: "number", str: "text", bool: "switch"}
    return named[kind] if kind in named else " or ".join(map(words, get_args(kind)))


def written(value: Any) -> str:
    """A value as TOML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def vllm_names(key: str) -> str:
    """Arguments of `vllm serve` that stand for a setting."""
    names = [
        name
        for name, flag in VLLM.flags.items()
        if isinstance(flag.effect, Used) and flag.effect.key == key
    ]
    others = [f"`--{name.replace('_', '-')}`" for name in names if name != key]
    return ", ".join(["same"] * (key in names) + others)


def engines() -> str:
    """The page of engines, their defaults, and all rules that have names."""
    head = (
        "engine",
        "block size",
        "prefix cache",
        "manager without",
        "manager with",
        "also takes",
        "asynchronous",
    )
    rows = [
        (
            f"`{name}`",
            str(each.block_size),
            "on" if each.enable_prefix_caching else "off" if each.prefix_manager else "none",
            named(each.block_manager),
            named(each.prefix_manager),
            named(*each.others),
            "by default" if each.asynchronous is not None else "never",
        )
        for name, each in ENGINES.items()
    ]
    parts = [
        f"# Engines and rules\n\n{MADE} `kvsim policies` prints the tables of rules.",
        "## Engines",
        table(head, rows),
        "*Manager without* and *with*: the block manager without and with a prefix cache.",
        "## Limits of a step that vLLM V1 chooses",
        "`max_num_seqs` and `max_num_batched_tokens` of an API server (`vllm serve`), by release"
        " and GPU. `--vllm-version` chooses the release.",
        table(("release", "GPU", "max_num_seqs", "max_num_batched_tokens"), limits()),
        "## What vLLM V1 decides, by release",
        "Rules of scheduling in which releases differ; `--vllm-version` chooses the release."
        " Sources are files of its wheel, below `vllm/v1/`.",
        table(("from", "before", "rule", "source"), decisions()),
        *map(rules, catalogue()),
    ]
    return "\n\n".join(parts) + "\n"


def named(*names: str) -> str:
    """Names set as code; nothing for those that are empty."""
    return ", ".join(f"`{name}`" for name in names if name)


def limits() -> Iterator[tuple[str, str, str, str]]:
    """Release, GPU and the limits, for a GPU of each tier."""
    oldest = dotted(OLDEST_V1)
    gpus = (
        ("NVIDIA GeForce RTX 4090", 24),
        ("NVIDIA A100-SXM4-80GB", 79),
        ("NVIDIA H100 80GB HBM3", 79),
        ("NVIDIA B200", 178),
    )
    for version in (oldest, "0.9.0", "0.28.0", "0.33.0"):
        for name, gib in gpus:
            seqs, tokens, _ = batch_limits(release(version), name, gib * GIB)
            yield version, f"{name} ({gib} GiB)", f"{seqs:,}", f"{tokens:,}"


def decisions() -> Iterator[tuple[str, str, str, str]]:
    """The releases that have a rule of vLLM V1, the rule, and where it is written."""
    for rule in RULES.values():
        since = dotted(rule.since) if rule.since > OLDEST else ""
        until = dotted(rule.until) if rule.until <= NEWEST else ""
        yield since, until, code(rule.about), rule.source


def dotted(version: tuple[int, ...]) -> str:
    """A version as people write it."""
    return ".".join(map(str, version))


def rules(found: Table) -> str:
    """A table of `kvsim policies` in Markdown."""
    head = [str(column.header) for column in found.columns]
    columns = [list(map(str, column.cells)) for column in found.columns]
    rows = [(f"`{name}`", *map(code, rest)) for name, *rest in zip(*columns, strict=True)]
    return f"## `{found.title}`\n\n{table(head, rows)}"


def code(cell: str) -> str:
    """A cell with the parameters in it set as code."""
    return re.sub(r"(?<![\w`])(--[a-z][a-z-]+|[a-z_]+\.[a-z_]+=?[\w./-]*)(?![\w`])", r"`\1`", cell)


def commands() -> str:
    """The page of commands: what each does, its arguments and options."""
    parts = [
        f"# Commands\n\n{MADE} `kvsim COMMAND -h` prints the options without the settings,"
        " `--help-all` with them.",
        "A command of one trace takes it by itself or by its option: `kvsim run mine.jsonl` is"
        " `kvsim run --trace mine.jsonl`. (`kvsim compare` and `kvsim sweep` have other arguments,"
        " and need the option.) `--quiet` goes with every command: no notes, no progress.",
    ]
    for name in COMMANDS:
        command = load(name)
        parts += [f"## `kvsim {name}`", *described(f"kvsim {name}", command)]
    return "\n\n".join(parts) + "\n"


def described(name: str, command: Any) -> Iterator[str]:
    """A command in Markdown, and the commands inside it."""
    yield str(command.help).strip()
    inside = getattr(command, "commands", {})
    if not inside:
        words = [name, *(f"{each.metavar or each.name.upper()}" for each in arguments(command))]
        yield f"```text\n{' '.join(words)} [OPTIONS]\n```"
    own = [each for each in options(command) if each.name not in SETTINGS | {"cost_model"}]
    if own:
        yield table(("option", "default", "meaning"), map(option, own))
    if len(own) < len(options(command)):
        yield "Takes all [settings](settings.md) as flags, too."
    for each, its in inside.items():
        yield f"### `{name} {each}`"
        yield from described(f"{name} {each}", its)


def arguments(command: Any) -> list[Any]:
    """Positional arguments of a command."""
    return [each for each in command.params if each.param_type_name == "argument"]


def options(command: Any) -> list[Any]:
    """Options of a command, except `--help`."""
    return [
        each for each in command.params if each.param_type_name == "option" and each.name != "help"
    ]


def option(each: Any) -> tuple[str, str, str]:
    """Spelling, default and meaning of an option."""
    value = f" {each.metavar}" if each.metavar and not each.is_flag else ""
    spelt = ", ".join(f"`{flag}{value}`" for flag in (*each.opts, *each.secondary_opts))
    default = each.default
    shown = "" if default in (None, False, (), []) or callable(default) else f"`{written(default)}`"
    if default is True:
        shown = "on"
    return spelt, "required" if each.required else shown, each.help or ""


def columns() -> str:
    """The page of the columns of result tables."""
    parts = [
        f"# Columns of the result tables\n\n{MADE}",
        "`kvsim run --out DIR` writes these tables as Parquet, `--csv` the first two as CSV, too."
        " `Result.requests` and `Result.steps` hold the same columns, but those from `nanoseconds`"
        " and from a `difference of instants`; there, -1 stands for null. Instants are counted from"
        " the start of the run. Columns of `ledger: prompt tokens` are there where a run had"
        " prefix caching, those of SGLang and of speculative decoding where a run had them.",
    ]
    for each in TABLES:
        parts += [f"## `{each.name}.parquet`", each.about.strip(), table(COLUMN, cells(each))]
        for column in each.columns:
            if column.codes:
                parts += [f"Values of `{column.name}`:", "\n".join(codes(column.codes))]
    return "\n\n".join(parts) + "\n"


COLUMN = ("column", "type", "unit", "meaning", "from")


def cells(of: Columns) -> Iterator[tuple[str, ...]]:
    """What the page says of each column of a table."""
    for each in of.columns:
        label = f"**{each.label}**: " if each.label else ""
        kind = f"{each.type}, null" if each.null else each.type
        yield f"`{each.name}`", kind, each.unit, label + each.meaning, each.source.value


def codes(named: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A line for each value of a column whose values are indexes."""
    for number, (name, meaning) in enumerate(named):
        yield f"- {number}: `{name}`: {meaning}" if name else f"- {number}: {meaning}"


def settings_schema() -> str:
    """The JSON schema of a TOML of settings, for editors that check and complete."""
    schema = _schema(RunConfig)
    properties = schema["$defs"]["RunConfig"]["properties"]
    for key, said in about().items():
        form = {"type": SIZE_TYPES} if key in SIZES else properties[key]
        properties[key] = {"description": said.text, **form}
    return json.dumps(schema, indent=1, default=str) + "\n"


def schema_of(kind: type) -> str:
    """The JSON schema of a file that holds one `kind`."""
    return json.dumps(_schema(kind), indent=1, default=str) + "\n"


def _schema(kind: type) -> dict[str, Any]:
    """The JSON schema of a type; docstrings without indentation, as Python 3.13 keeps them."""
    schema = msgspec.json.schema(kind)
    for each in schema["$defs"].values():
        if "description" in each:
            each["description"] = inspect.cleandoc(each["description"])
    return schema


SIZE_TYPES = ["integer", "string", "null"]
"""Numbers that may be written with a suffix, as 32K."""

PAGES = {
    "settings.md": settings,
    "engines.md": engines,
    "commands.md": commands,
    "columns.md": columns,
    "settings.schema.json": settings_schema,
    "hardware.schema.json": partial(schema_of, Hardware),
    "model.schema.json": partial(schema_of, Model),
    "workload.schema.json": partial(schema_of, Workload),
    "profile.schema.json": partial(schema_of, Profile),
}
"""Pages of docs/reference, and what makes their text."""


def main() -> None:
    """Write all pages."""
    for name, text in PAGES.items():
        (FOLDER / name).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
