"""The tables of `kvsim policies`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from kvsim.blocks import BLOCK_MANAGERS
from kvsim.config import RunConfig
from kvsim.cost import COSTS
from kvsim.engines import ENGINES

SHARED = frozenset(("self", "model", "hardware", "config", "num_gpu_blocks", "num_cpu_blocks"))
"""Constructor arguments that the run provides."""


def catalogue() -> Iterator[Table]:
    """One table for each kind of policy: name, what it does, parameters."""
    engines = {name: (engine.about, engine.scheduler) for name, engine in ENGINES.items()}
    yield _table("--engine NAME", "scheduler_args", engines)
    yield _table("--block-manager NAME", "block_manager_args", _described(BLOCK_MANAGERS))
    yield _table("--cost-model NAME", "cost", _described(COSTS))


def _described(classes: Mapping[str, type]) -> dict[str, tuple[str, type]]:
    return {name: (_first_line(each), each) for name, each in classes.items()}


def _table(title: str, table_key: str, rows: Mapping[str, tuple[str, Callable[..., Any]]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True, style="bold")
    table.add_column("what it is")
    table.add_column("parameters")
    for name, (about, constructor) in rows.items():
        table.add_row(name, about, _parameters(constructor, table_key))
    table.add_row("package.module:Class", "your own", "", style="dim")
    return table


def _parameters(constructor: Callable[..., Any], table_key: str) -> str:
    """Flags for what is a setting, `table.key` for the rest."""
    words = []
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in SHARED:
            continue
        word = f"--{name.replace('_', '-')}"
        if name not in RunConfig.__struct_fields__:
            word = f"{table_key}.{name}"
            if parameter.default not in (parameter.empty, None):
                word += f"={parameter.default}"
        words.append(word)
    return ", ".join(words)


def _first_line(described: type) -> str:
    return (inspect.getdoc(described) or "").splitlines()[0].rstrip(".")
