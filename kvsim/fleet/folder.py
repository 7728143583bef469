"""The folder of a run of several replicas.

```
DIR/fleet.json        figures of all requests, and a table for each replica
DIR/routing.parquet   one row per request: where it was sent, and what that decision chose from
DIR/handovers.parquet one row per request of a prefill/decode split: the legs of its way
DIR/report.html       the page, if given
DIR/replica-0/ ...    what a run of one engine writes (`kvsim.report.files`)
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import ValidationError

from kvsim.core.request import DECODE, PREFILL
from kvsim.core.schema import HANDOVERS, ROUTING
from kvsim.errors import OutputError
from kvsim.explain.story import find_request
from kvsim.fleet.figures import fleet_figures
from kvsim.fleet.result import FleetResult, Replica, sides_of, together
from kvsim.report import PAGE, read_results, read_transitions
from kvsim.report.files import (
    FLEET,
    FleetMeta,
    problem_of_summary,
    read_summary,
    read_table,
    refuse,
    write_table,
)
from kvsim.settings.parsing import typed
from kvsim.writing import encoded, json_text, move_all, temporary_folder


class FleetRun(NamedTuple):
    """A run of several replicas, just made or read from a folder."""

    summary: Mapping[str, Any]
    """As `kvsim.fleet.figures.summarise_fleet` returns it."""
    requests: Mapping[str, Any]
    """Of all replicas, in the order of the trace, with the column `replica`."""
    decisions: Mapping[str, Any]
    """Columns of `kvsim.core.schema.ROUTING`."""
    replicas: Sequence[Replica]
    handovers: Mapping[str, Any] | None = None
    """Columns of `kvsim.core.schema.HANDOVERS` in a prefill/decode split."""


def fleet_run(result: FleetResult, summary: Mapping[str, Any]) -> FleetRun:
    """Returns a result that was explained, as its folder would give it."""
    assert result.decisions is not None, "the decisions were not noted"
    each = [
        Replica(one.summary, one.requests, one.steps, one.transitions) for one in result.replicas
    ]
    return FleetRun(summary, result.requests, result.decisions, each, result.handovers)


def write_fleet(
    out: str | Path, run: FleetRun, write: Callable[[int, str], None], page: str | None = None
) -> None:
    """Lets `write` write the folder of each replica, by its number, and writes what they have in
    common, all or none.

    Raises `OutputError` naming the folder.
    """
    folder = Path(out)
    for number in range(len(run.replicas)):
        write(number, str(_replica(folder, number)))
    with temporary_folder(folder, folder) as partial:
        write_table(partial, ROUTING, run.decisions)
        if run.handovers is not None:
            write_table(partial, HANDOVERS, run.handovers)
        if page is not None:
            (partial / PAGE).write_bytes(encoded(page))
        (partial / FLEET).write_bytes(encoded(json_text(run.summary)))
        # The summary last: a folder that has one is whole.
        move_all(sorted(partial.iterdir(), key=lambda path: (path.name == FLEET, path)), folder)


def read_fleet(directory: str | Path) -> FleetRun:
    """Reads what `write_fleet` wrote. Raises `OutputError` naming the file and the remedy."""
    folder = Path(directory)
    keys = "num_requests", "replicas", "routing"
    summary = read_summary(folder / FLEET, *keys, types=FleetMeta)
    meta = summary["meta"]
    decisions = read_table(folder, ROUTING, meta)
    replicas = []
    for number in range(meta["replicas"]):
        own, requests, steps = read_results(_replica(folder, number))
        transitions = read_transitions(_replica(folder, number), own)
        replicas.append(Replica(own, requests, steps, transitions))
    each, chosen = [one.requests for one in replicas], decisions["replica"]
    roles = meta.get("roles")
    handovers = None if roles is None else read_table(folder, HANDOVERS, meta)
    whose = _whose(chosen, roles, handovers, len(replicas))
    indexes = [np.flatnonzero(mine) for mine in whose]
    # Files of different runs agree neither in numbers nor, below, in times.
    if not indexes or [len(one["id"]) for one in each] != list(map(len, indexes)):
        raise OutputError(f"{folder}: {_MIXED}")
    if handovers is None:
        requests = together(each, indexes, chosen)
    else:
        decoders = handovers["decode_replica"]
        requests = sides_of(each, indexes, roles, chosen, decoders).whole()
    sent = decisions["replica"] >= 0
    if not np.array_equal(requests["arrival_ns"][sent], decisions["time_ns"][sent]):
        raise OutputError(f"{folder}: {_MIXED}")
    bounds = _bounds(summary["routing"])
    figures = fleet_figures(replicas, requests, decisions, {}, meta, bounds, handovers)
    refuse(folder / FLEET, problem_of_summary(summary, figures), meta)
    return FleetRun(summary, requests, decisions, replicas, handovers)


def _whose(
    chosen: Any, roles: Sequence[str] | None, handovers: Mapping[str, Any] | None, number: int
) -> list[Any]:
    """Which requests each replica's folder has. One that was sent to nobody is listed with those of
    the first replica, or of the first one for prompts."""
    if roles is None or handovers is None:
        return [np.maximum(chosen, 0) == replica for replica in range(number)]
    prompts = np.where(chosen < 0, list(roles).index(PREFILL), chosen)
    where = {PREFILL: prompts, DECODE: handovers["decode_replica"]}
    return [where[role] == replica for replica, role in enumerate(roles)]


def _bounds(routing: Any) -> dict[str, int] | None:
    """The bounds among figures, which no table gives; None if they are no numbers by name."""
    try:
        bounds: dict[str, int] | None = typed(routing["bounds"], dict[str, int] | None)
    except (KeyError, TypeError, ValidationError):
        return None
    return bounds


_MIXED = (
    f"{ROUTING.name}.parquet and the folders of the replicas hold different requests: files of"
    " different runs; run it again"
)


def _replica(folder: Path, number: int) -> Path:
    return folder / f"replica-{number}"


def replica_of(directory: str, run: FleetRun, request: str) -> str:
    """Returns the folder of the replica that a request was sent to. Raises `OutputError` with the
    nearest id."""
    place = find_request(run.requests, request)
    return str(_replica(Path(directory), max(int(run.requests["replica"][place]), 0)))
