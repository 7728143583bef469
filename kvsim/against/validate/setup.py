"""Describes what to serve, with which scheduler, over which blocks; and what was recorded of it.

```
{"schema": "kvsim.validation-setup/1",
 "trace": {"path", "sha256", "requests"},
 "model": {"layers", "hidden", ..., "dtype", "kv_dtype", "block_size"},
 "policies": [{"name", "config",                       all settings of `kvsim run`
               "scheduler": {"class", "arguments"},    the same objects, ready to be built
               "block_manager": {"class", "arguments"}}]}
```
Settings are checked and completed here, where all of kvsim is available. Building the objects needs
only their classes.

A recording of a real engine keeps the time of every step, and a digest of the schedule: settings
and step times decide a run. The simulator reproduces everything else: it runs again with these
times and gets the same schedule, which `digest` proves.
```
{"schema": "kvsim.recording/1", "kvsim_version", "device", "software", "model", "engine", "setup",
 "policies": [{"name", "real": Run, "repeat": Run, "replay": Run}]}
Run: {"end_ns", "digest", "step_ns": [...], "swap_ns": [...]}
```
`swap_ns` has an entry per copy between the pools; in a step, out comes before in. `repeat` is an
independent run; `replay` runs the same plans as `real`.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.core.blocks import BlockManager
from kvsim.core.scheduler import Scheduler
from kvsim.engines.vllm_v1.manager import KVCacheManager, full_attention
from kvsim.errors import ConfigError, check_choice
from kvsim.settings import library
from kvsim.settings.parsing import FILES, named_code, refuse_code
from kvsim.version import __version__
from kvsim.writing import write_text

if TYPE_CHECKING:
    from kvsim.run.assembly import Parts
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace


SCHEMA = "kvsim.validation-setup/1"

POLICIES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap"},
    "prefix-caching": {"enable_prefix_caching": True},
    "chunked-prefill": {"enable_chunked_prefill": True},
}
"""Name → the settings that it adds."""

THREE = ("recompute", "swap", "prefix-caching")

ENGINES = ("vllm-0.6.3", "vllm-v1")
"""Engines whose plans list all that is computed. Other engines pad prompts to rectangles, or count
a full hit as no work."""

Table = dict[str, Any]


def prepare(trace: Trace, config: RunConfig, policies: Sequence[str] = THREE) -> Table:
    """The setup of these policies over one configuration and one trace.

    Raises `ConfigError` for an unknown policy, and for a plan that no executor can run.
    """
    for name in policies:
        check_choice("--policies", name, POLICIES)
    if config.engine not in ENGINES and ":" not in config.engine:
        raise ConfigError(
            f"engine: validate runs {', '.join(ENGINES)}, and your own; {config.engine} has steps"
            " that it cannot run"
        )
    return {
        "schema": SCHEMA,
        "kvsim_version": __version__,
        "trace": {
            "path": trace.path,
            "sha256": trace.sha256,
            "requests": len(trace.rows[: config.num_prompts]),
        },
        "model": _geometry(config),
        "policies": [_policy(name, config) for name in policies],
    }


def refuse_other_model(setup: Mapping[str, Any], profile: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a profile with another model, dtype or block size than the setup."""
    measured = {**profile["model"], "block_size": profile["engine"]["block_size"]}
    for key, wanted in setup["model"].items():
        if measured[key] != wanted:
            raise ConfigError(
                f"profile: it was measured with {key} {measured[key]}, the setup has {wanted};"
                " calibrate for this model"
            )


def foreign(setup: Mapping[str, Any]) -> list[str]:
    """The code that a setup names, other than kvsim's schedulers and block managers."""
    found: dict[str, None] = {}
    for policy in setup["policies"]:
        config = {key: value for key, value in policy["config"].items() if key not in FILES}
        found |= dict.fromkeys(named_code({**policy, "config": config}))
    return [name for name in found if not _is_ours(name)]


def refuse_foreign(setup: Mapping[str, Any], trusted: Collection[str], path: str | Path) -> None:
    """Raise `ConfigError` for code that the setup in a file names, unless it is `trusted`."""
    try:
        names = foreign(setup)
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(f"{path}: the setup is damaged; make it again") from None
    refuse_code(names, trusted, f"{path}: runs")


def _is_ours(name: str) -> bool:
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] != __name__.partition(".")[0]:
        return False
    try:
        kind = getattr(import_module(module), attribute, None)
    except ImportError:
        return False
    return kind is full_attention or (
        isinstance(kind, type) and issubclass(kind, Scheduler | BlockManager)
    )


def settings_of(policy: Mapping[str, Any]) -> Table:
    """The settings of a policy of a setup."""
    from kvsim.results.plain import numeric

    settings: Table = numeric(policy["config"])
    return settings


def build(recipe: Mapping[str, Any], **further: Any) -> Any:
    """The object of a recipe, a table of `class` and `arguments`; `further` arguments go first."""
    module, _, name = recipe["class"].partition(":")
    return getattr(import_module(module), name)(**{**recipe["arguments"], **further})


def build_scheduler(recipe: Mapping[str, Any], config: Mapping[str, Any], blocks: Any) -> Any:
    """The scheduler of a recipe, its victim policy included, over a block manager."""
    from kvsim.policies.victims import make_victim

    module, _, name = recipe["class"].partition(":")
    named = library.signature(getattr(import_module(module), name)).parameters
    further = {"blocks": blocks} if "blocks" in named else {}
    if "victim" not in recipe["arguments"]:
        return build(recipe, **further)
    victim = make_victim(
        recipe["arguments"]["victim"], seed=config["seed"], max_model_len=config["max_model_len"]
    )
    return build(recipe, victim=victim, **further)


def _geometry(config: RunConfig) -> Table:
    """What a profile must have been measured with, under the profile's own keys."""
    from kvsim.cost.profile import SIZES
    from kvsim.cost.scaling import wanted
    from kvsim.engines import ENGINES as KNOWN
    from kvsim.machine.models import model_of

    made = wanted(model_of(config), config)
    own = KNOWN.get(config.engine, KNOWN[ENGINES[0]]).block_size
    keys = (*SIZES.values(), "dtype", "kv_dtype")
    return {**{key: getattr(made, key) for key in keys}, "block_size": config.block_size or own}


def _policy(name: str, config: RunConfig) -> Table:
    from kvsim.results.plain import plain
    from kvsim.run.assembly import assemble
    from kvsim.settings.config import make_config, to_table

    parts = assemble(make_config({**to_table(config), **POLICIES[name]}, f"policy {name}"))
    _refuse(parts)
    settings = to_table(parts.config)
    return {
        "name": name,
        "config": plain(settings),
        "scheduler": _recipe(parts.scheduler, parts, settings["scheduler_args"]),
        "block_manager": _recipe(parts.blocks, parts, settings["block_manager_args"]),
    }


def _recipe(built: object, parts: Parts, own: Mapping[str, Any]) -> Table:
    """The recipe of an object of the run: the arguments that its constructor names."""
    from kvsim.settings.config import to_table

    kind: Any = type(built)
    given = {key: value for key, value in to_table(parts.config).items() if value is not None}
    given |= {
        **own,
        "num_gpu_blocks": parts.blocks.gpu.size,
        "num_cpu_blocks": parts.blocks.cpu.size,
        "enable_prefix_caching": parts.blocks.needs_keys,
    }
    if isinstance(built, KVCacheManager):
        kind, given["num_gpu_blocks"] = full_attention, built.gpu.size + 1
        if len(built.groups) > 1 or not built.groups[0].full:
            raise ConfigError("model: validate runs models whose layers all keep all tokens")
    named = library.signature(kind).parameters
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "arguments": {key: value for key, value in given.items() if key in named},
    }


def _refuse(parts: Parts) -> None:
    if parts.scheduler.in_flight != 1:
        raise ConfigError(
            "async_scheduling: validate runs one step at a time; add --no-async-scheduling"
        )
    if parts.config.tensor_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size: {parts.config.tensor_parallel_size}; validate runs on one"
            " device, use 1"
        )


RECORDED = "kvsim.recording/1"
RECORDED_KEYS = ("kvsim_version", "device", "software", "model", "engine", "setup", "policies")
RUNS = ("real", "repeat", "replay")

MARKS = ("arrival_ns", "first_scheduled_ns", "first_token_ns", "finish_ns", "num_preemptions")
"""Figures of a request that identify a schedule."""


def digest(marks: Iterable[Iterable[int]]) -> str:
    """A hash over one column of the requests' figures for each of `MARKS`."""
    total = hashlib.sha256()
    for column in marks:
        total.update(array("q", column).tobytes())
    return total.hexdigest()[:16]


def write_json(path: str | Path, table: Mapping[str, Any]) -> Path:
    """Write a table, whole or not at all; long lists of numbers stay on one line.

    Raises `OutputError` naming the file.
    """
    return write_text(path, _text(table) + "\n")


def read_json(path: str | Path, *schemas: str) -> dict[str, Any]:
    """A table of one of these schemas. Raises `ConfigError` that names the file and the remedy."""
    table = library.read_json(Path(path))
    found = table.get("schema")
    if found not in schemas:
        said = f"its schema is {found!r}" if found else "it has no schema"
        raise ConfigError(f"{path}: {said}; expected {' or '.join(schemas)}")
    return table


def require(table: Mapping[str, Any], keys: Iterable[str], path: str | Path) -> None:
    """Raise `ConfigError` for a table that lacks one of these keys."""
    missing = [key for key in keys if key not in table]
    if missing:
        raise ConfigError(f"{path}: {missing[0]}: missing; the file is damaged, make it again")


def _text(value: Any, indent: str = "") -> str:
    """JSON with one key per line, and lists of plain values on one line."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        entries = (f"{inner}{json.dumps(k)}: {_text(v, inner)}" for k, v in value.items())
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        return "[\n" + ",\n".join(inner + _text(v, inner) for v in value) + f"\n{indent}]"
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
