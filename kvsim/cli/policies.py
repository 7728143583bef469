"""`policies`: every engine, block manager, cost model and rule, with its parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rich.table import Table

from kvsim.cli.options import AsJson
from kvsim.cost import COSTS
from kvsim.engines import BLOCK_MANAGERS, ENGINES
from kvsim.policies.eviction import EVICTIONS
from kvsim.policies.order import IDLE_ORDERS
from kvsim.policies.requeue import REQUEUE
from kvsim.policies.tables import FULL_HITS, GROWTH, HITS_SAVE, PUBLISH_AT
from kvsim.policies.victims import VICTIMS
from kvsim.report import make_console, make_table
from kvsim.settings.config import RunConfig
from kvsim.settings.library import docstring, signature

SHARED = frozenset(("self", "model", "hardware", "config", "candidates", "blocks")) | {
    "num_gpu_blocks",
    "num_cpu_blocks",
    "prices",
    "groups",
    "in_flight",
    "keyed",
    "eagle_drop",
    "lookahead_keys",
    "num_spec_tokens",
    "release",
    "connector",
    "worker",
    "speculation",
    "draft_log",
}
"""Arguments that the run provides."""


CHOICES = {
    "--preemption-mode": {
        "recompute": "the victim's blocks are freed; its tokens are computed again",
        "swap": "the victim's blocks are copied to the CPU, and back when there is room",
        "auto": "whichever takes less time by the run's own prices, the queue of the link included",
        "(default)": "the engine's rule: vLLM 0.x swaps requests with several samples only",
    },
    "--scheduling-policy": {
        "fcfs": "first come, first served",
        "priority": "lower priority numbers first, then arrival; may preempt worse ones",
    },
    "--sessions": {
        "recorded": "every turn at its recorded time",
        "closed": "a turn waits for the one before and its think time",
        "auto": "closed where the trace says what a turn waits for",
    },
    "--memory-formula": {
        "vllm": "total x utilization - weights - activation peak",
        "nano-vllm": "total x utilization - used - (peak - current)",
    },
    "--on-engine-error": {
        "stop": "the run ends where the real engine would die or get stuck",
        "reject": "the run starts again with the request refused at arrival",
    },
}
"""Policies that are settings with a few values."""


RULES: dict[str, Mapping[str, Any]] = {
    "block_manager_args.growth": GROWTH,
    "block_manager_args.idle_order": IDLE_ORDERS,
    "block_manager_args.eviction": EVICTIONS,
    "block_manager_args.publish_at": PUBLISH_AT,
    "block_manager_args.hits_save": HITS_SAVE,
    "block_manager_args.full_hit": FULL_HITS,
    "scheduler_args.requeue": REQUEUE,
}
"""Rules in which engines differ; each engine has its own default, shown in the parameters above."""


def policies(as_json: AsJson = False) -> None:
    """List every engine, block manager and cost model, with its parameters."""
    if as_json:
        found = {}
        for table in catalogue():
            names = [each.header for each in table.columns]
            rows = zip(*(each.cells for each in table.columns), strict=True)
            found[str(table.title)] = [dict(zip(names, row, strict=True)) for row in rows]
        print(json.dumps(found, indent=1))
        return
    console = make_console()
    for table in catalogue():
        console.print(table)


def catalogue() -> Iterator[Table]:
    """One table for each kind of policy: name, what it does, parameters."""
    engines = {name: (engine.about, engine.scheduler) for name, engine in ENGINES.items()}
    managers, costs, victims = (
        {name: (_about(each), each) for name, each in policies.items()}
        for policies in (BLOCK_MANAGERS, COSTS, VICTIMS)
    )
    for title, key, classes in (
        ("--engine NAME", "scheduler_args", engines),
        ("--block-manager NAME", "block_manager_args", managers),
        ("--cost-model NAME", "cost", costs),
        ("--victim NAME", "victim", victims),
    ):
        rows = [[name, about, _parameters(made, key)] for name, (about, made) in classes.items()]
        table = _table(title, rows, "name", "what it is", "parameters")
        table.add_row("package.module:Class", "your own", "", style="dim")
        yield table
    for key, rules in RULES.items():
        named = ([name, _about(rule)] for name, rule in rules.items())
        yield _table(f"--set {key}=NAME", named, "name", "what it is")
    for flag, choices in CHOICES.items():
        yield _table(f"{flag} NAME", choices.items(), "name", "what it is")


def _table(title: str, rows: Iterable[Iterable[str]], *columns: str) -> Table:
    table = make_table(*columns, rows=rows, title=title, texts=len(columns))
    table.columns[0].style, table.columns[0].no_wrap = "bold", True
    return table


def _parameters(constructor: Callable[..., Any], table_key: str) -> str:
    """Flags for settings, `table.key` for other parameters."""
    words = []
    for name, parameter in signature(constructor).parameters.items():
        if name in SHARED:
            continue
        word = f"--{name.replace('_', '-')}"
        if name not in RunConfig.__struct_fields__:
            word = f"{table_key}.{name}"
            if parameter.default not in (parameter.empty, None):
                word += f"={parameter.default}"
        words.append(word)
    return ", ".join(words)


def _about(policy: Any) -> str:
    """What a policy is, from its `about` or the first line of its docstring."""
    if hasattr(policy, "about"):
        return str(policy.about)
    return docstring(policy).partition("\n")[0].rstrip(".")
