"""Repeats measurements, each in a fresh process, without shared memory or warm caches."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from kvsim.bench.measure import Measurement, measure
from kvsim.errors import ConfigError
from kvsim.version import __version__

T = TypeVar("T")


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements on one machine with one engine and cost model."""

    kvsim_version: str
    python: str
    machine: str
    load_average: float | None
    """Load average of the last minute at the start."""
    engine: str
    cost: str
    workloads: dict[str, list[Measurement]]
    """Name → its repeats."""


def run(
    names: Iterable[str],
    engine: str,
    cost: str,
    repeats: int,
    trace: str | None,
    done: Callable[[str, list[Measurement]], None],
) -> Bench:
    """Measure each workload `repeats` times; `done` is called after each workload."""
    found: dict[str, list[Measurement]] = {}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for name in names:
        found[name] = [in_fresh_process(measure, name, engine, cost, trace) for _ in range(repeats)]
        done(name, found[name])
    return Bench(
        kvsim_version=__version__,
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        load_average=load,
        engine=engine,
        cost=cost,
        workloads=found,
    )


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """The result of a function in a fresh process; its exceptions are raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def least(measurements: list[Measurement], figure: Callable[[Measurement], float]) -> float:
    """The least of a figure, because disturbances only ever increase it."""
    return min(map(figure, measurements))


def middle(measurements: list[Measurement], figure: Callable[[Measurement], float]) -> float:
    """The median of a figure."""
    return median(map(figure, measurements))


def to_json(bench: Bench) -> str:
    """The text that `load` reads."""
    return msgspec.json.format(msgspec.json.encode(bench), indent=1).decode() + "\n"


def load(path: str) -> Bench:
    """The bench that `kvsim bench --json` printed. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Bench)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        text = str(error)
        raise ConfigError(
            f"{path}: {text[:1].lower()}{text[1:]}; give what `kvsim bench --json` printed"
        ) from None


def ratios(now: Bench, then: Bench) -> Mapping[str, tuple[float, float]]:
    """CPU time and pings of each workload in both benches: the least of now over the least of then.

    Raises `ConfigError` if engine or cost model differ.
    """
    for key in ("engine", "cost"):
        if getattr(now, key) != getattr(then, key):
            raise ConfigError(
                f"bench: the stored run has --{key} {getattr(then, key)}, this one"
                f" {getattr(now, key)}; compare like with like"
            )
    return {
        name: (
            least(mine, lambda m: m.cpu_s) / least(then.workloads[name], lambda m: m.cpu_s),
            least(mine, lambda m: m.pings) / least(then.workloads[name], lambda m: m.pings),
        )
        for name, mine in now.workloads.items()
        if then.workloads.get(name)
    }
