"""Options that several commands share, and what their values stand for.

A command takes a `Bundle` as one parameter, and Typer sees an option for each of its fields:

```
@takes_bundles
def run(*, trace: TracePath = None, form: TraceForm) -> None: ...
```
An option of one command is the default of its parameter; one of several is a type, as `TracePath`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial, wraps
from math import isnan
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from msgspec import Struct
from typer import Argument, Option

from kvsim.cli.commands import note
from kvsim.errors import ConfigError, check_choice

if TYPE_CHECKING:
    from kvsim.search.runner import Backend
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace


class Options:
    """Several options: the parameters of a subclass."""


class Bundle(Options, Struct):
    """Several options: the fields of a subclass, which may be bundles themselves."""


def takes_bundles(command: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer, in which each bundle has given way to its options."""

    @wraps(command)
    def unbundled(**given: Any) -> None:
        for option in options:
            value = given[option.name]
            # No bound of an option refuses it.
            if isinstance(value, float) and isnan(value):
                raise ConfigError(f"{_flag(option)}: {value} is not a number")
        _made(command, given)

    options = list(_options(command))
    # Typer takes defaults from the signature, and types from the annotations.
    unbundled.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    unbundled.__annotations__ = {each.name: each.annotation for each in options}
    return unbundled


def _options(made: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter, hint in _parameters(made):
        if _is_bundle(hint):
            yield from _options(hint)
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            yield parameter.replace(annotation=hint, kind=kind)


def _flag(option: inspect.Parameter) -> str:
    """As it is written on the command line."""
    declared: Iterable[str] = getattr(option.default, "param_decls", None) or ()
    written = (each for each in declared if each.startswith("--"))
    return next(written, f"--{option.name.replace('_', '-')}")


def _made(made: Callable[..., Any], given: dict[str, Any]) -> Any:
    """What `made` returns for the values of the options."""
    values = {
        parameter.name: _made(hint, given) if _is_bundle(hint) else given[parameter.name]
        for parameter, hint in _parameters(made)
    }
    return made(**values)


@cache  # They are asked for twice: to declare the options, and to use them.
def _parameters(made: Callable[..., Any]) -> list[tuple[inspect.Parameter, Any]]:
    """The parameters of a command or of a bundle, each with its type."""
    hints = get_type_hints(made, include_extras=True) if inspect.isfunction(made) else {}
    parameters = inspect.signature(made).parameters.values()
    return [(each, hints.get(each.name, each.annotation)) for each in parameters]


def _is_bundle(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Options)


BACKENDS = ("local", "ray")

TracePath = Annotated[
    str | None,
    Option(
        "--trace",
        metavar="FILE",
        help="Trace, benchmark result or table of any known format (.gz too), a folder of WEKA"
        " coding sessions, or a shipped trace: chat, api, agents, burst.",
    ),
]
ConfigFile = Annotated[
    str | None,
    Option(
        "--config",
        "--base",
        metavar="FILE",
        help="Settings: a TOML file or a name in configs/runs.",
    ),
]
Objectives = Annotated[
    str, Option("--slo", metavar="BOUNDS", help="Objectives, as in p99_ttft<2s,p99_tpot<60ms.")
]
Jobs = Annotated[
    int | None, Option("--jobs", min=1, metavar="N", help="Runs at a time. Default: one per core.")
]
OutDir = Annotated[
    str | None,
    Option("--out", metavar="DIR", help="Write the results and a page into this folder."),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of tables.")]
RunDir = Annotated[str, Argument(metavar="RUN", help="Folder written by `kvsim run --out`.")]
ProfileOut = Annotated[
    str, Option("--out", metavar="FILE", help="Write the profile, JSON, to this file.")
]
MeasuredFile = Annotated[
    str | None,
    Option(
        "--measured",
        metavar="FILE",
        help="Measured times by id: JSON Lines, CSV or Parquet with id, ttft_s, e2e_s, queue_s.",
    ),
]


class TraceForm(Bundle):
    """How a trace is read, where its content does not say."""

    trace_format: str | None = Option(
        None, metavar="NAME", help="Format of the trace, if its content is ambiguous."
    )
    columns: str | None = Option(
        None,
        metavar="ROLE=COLUMN,...",
        help="Columns of a CSV or Parquet trace, as in"
        " arrival_ms=ts,input=prompt,output=completion.",
    )

    def open(self, path: str) -> Trace:
        """The trace at `path`; the notes of its reader go to standard error."""
        from kvsim.workload import open_trace

        opened = open_trace(path, self.trace_format, self.columns)
        note(*opened.notes)
        return opened

    def requests(self, path: str | None, config: RunConfig) -> Trace:
        """The trace at `path`, or what the `workload` setting makes. Raises `ConfigError`."""
        if path is not None:
            return self.open(path)
        from kvsim.workload.spec import trace_of

        return trace_of(config)


class Workers(Bundle):
    """Where the runs of a search take place."""

    jobs: Jobs = None
    backend: str = Option("local", metavar="NAME", help="local, or ray: on a Ray cluster.")
    ray_address: str | None = Option(
        None, metavar="ADDRESS", help="Ray cluster to use. Default: start Ray here."
    )

    def chosen(self) -> Backend:
        """The backend with this name. Raises `ConfigError`."""
        from kvsim.search.runner import run_local, run_on_ray

        check_choice("--backend", self.backend, BACKENDS)
        if self.backend == "ray":
            return partial(run_on_ray, self.ray_address)
        if self.ray_address is not None:
            raise ConfigError("--ray-address: needs --backend ray")
        return run_local


def note_arrivals(trace: Trace, configs: Iterable[RunConfig]) -> None:
    """Say on standard error, once, if some of these settings have to send all requests at once."""
    from kvsim.workload.clients import missing_arrivals

    for config in configs:
        if notes := missing_arrivals(trace.rows, config):
            note(notes[0])
            return
