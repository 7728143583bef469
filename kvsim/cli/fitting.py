"""Fitting constants of a machine to a measured run, as `profile fit-run` and `check --fit` do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvsim.cli.console import progress_bar
from kvsim.errors import ConfigError
from kvsim.report.screen import make_console, make_table

if TYPE_CHECKING:
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace

FIRST = 100
"""Requests that constants are fitted to, unless another number is given."""


class Table(NamedTuple):
    """A table to print."""

    head: tuple[str, ...]
    rows: list[list[str]]


def fit_profile(name: str, trace: Trace, config: RunConfig, first: int, out: str) -> list[Table]:
    """Fits the profile of that name and writes it to `out`. Returns its constants and errors."""
    from kvsim.against.fit import fit_run
    from kvsim.cost.profile import load_profile, to_json
    from kvsim.writing import write_text

    with progress_bar("fitting") as done:
        profile = fit_run(load_profile(name), trace, config, first, done)
    write_text(out, to_json(profile))
    found = profile.fitted
    spread, before = found["standard_errors"], found["error_percent_before"]
    taken = [[k, f"{x:g}", f"{spread[k]:g}", ""] for k, x in found["constants"].items()]
    if late_s := found["start_s"]:
        taken.append(["start of this run, s", f"{late_s:g}", "-", "the profile does not keep it"])
    refused = [[key, "-", "-", reason] for key, reason in found["refused"].items()]
    errors = [[k, f"{before[k]:+.2f}", f"{x:+.2f}"] for k, x in found["error_percent"].items()]
    return [
        Table(("constant", "value", "standard error", "refused"), taken + refused),
        Table(("error on the other requests, %", "before", "after"), errors),
    ]


def show_fit(tables: list[Table]) -> None:
    """Prints what `fit_profile` returns."""
    for head, rows in tables:
        make_console().print(make_table(*head, rows=rows))


def with_fitted(
    trace: Trace, config: RunConfig, first: int, out: str
) -> tuple[RunConfig, list[Table]]:
    """(`config` with a profile fitted to `trace` and written to `out`, tables of the fit).

    The profile is the run's own, or the shipped one that would price it.
    """
    from msgspec.structs import replace

    from kvsim.cost.table import profile_for
    from kvsim.machine.hardware import load_hardware
    from kvsim.machine.models import model_of

    name = config.cost.get("profile")
    if name is None and config.cost.get("model") in (None, "table"):
        hardware = load_hardware(config.hardware_name)
        name = profile_for(model_of(config), hardware, config)
    if name is None:
        raise ConfigError(
            "--fit: constants are fitted to a profile, and none prices this run; give one with"
            " --set cost.profile=FILE"
        )
    tables = fit_profile(name, trace, config, first, out)
    kept = {key: each for key, each in config.cost.items() if key == "link"}
    return replace(config, cost={**kept, "model": "table", "profile": out}), tables
