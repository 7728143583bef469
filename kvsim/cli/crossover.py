"""`crossover`: where swapping a request's KV cache takes less time than recomputing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvsim.cli.options import AsJson, Bundle, takes_bundles
from kvsim.errors import check_choice
from kvsim.report import make_console, make_table
from kvsim.settings.versions import DEFAULT_HARDWARE, DEFAULT_MODEL

if TYPE_CHECKING:
    from kvsim.cost.crossover import ModelCrossings

TOKENS = [512, 2048, 8192, 32768]
"""Lengths in the table."""
SHORTEST, STEPS_PER_DOUBLING = 16, 4
"""Lengths of the curves: the shortest, and the number per doubling."""


@dataclass(frozen=True)
class Priced(Bundle):
    """What is compared, and what prices it."""

    model: Annotated[
        list[str] | None,
        Option(metavar="NAME", help=f"May be repeated; default: {DEFAULT_MODEL}."),
    ] = None
    hardware: Annotated[str, Option(metavar="NAME", help="GPU and its link.")] = DEFAULT_HARDWARE
    tokens: Annotated[
        list[int] | None, Option(min=1, metavar="N", help="Length to list; may be repeated.")
    ] = None
    layout: Annotated[
        str | None,
        Option(
            metavar="layer|cross",
            help="How a block is copied: layer by layer, keys and values apart (2 x layers"
            " copies), or all layers in one; default: both.",
        ),
    ] = None
    bandwidth_gb_s: Annotated[
        float | None, Option(metavar="X", help="Link, one direction; default: hardware's.")
    ] = None
    copy_overhead_us: Annotated[
        float | None, Option(metavar="X", help="Least time of a copy; default: hardware's.")
    ] = None
    block_size: Annotated[int, Option(min=1, metavar="N", help="Tokens per block.")] = 16
    tensor_parallel_size: Annotated[
        int, Option(min=1, metavar="N", help="GPUs that share each layer.")
    ] = 1
    cost_model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="table, roofline or constant; default: a shipped profile, else the roofline.",
        ),
    ] = None
    profile: Annotated[
        str | None, Option(metavar="PROFILE", help="Profile that prices recompute.")
    ] = None

    def crossings(self, lengths: list[int]) -> list[ModelCrossings]:
        """The prices of requests of these lengths, for each model. Raises `ConfigError`."""
        from kvsim.cost.crossover import LAYOUTS, crossings
        from kvsim.machine.hardware import load_hardware
        from kvsim.machine.models import load_model
        from kvsim.settings.config import make_config

        link = _given(bandwidth_gb_s=self.bandwidth_gb_s, copy_overhead_us=self.copy_overhead_us)
        settings = {
            "hardware": self.hardware,
            "block_size": self.block_size,
            "tensor_parallel_size": self.tensor_parallel_size,
            "cost": {**_given(model=self.cost_model, profile=self.profile), "link": link},
        }
        config = make_config(settings)
        hardware = load_hardware(config.hardware_name)
        layouts = [self.layout] if self.layout else list(LAYOUTS)
        return [
            crossings(load_model(name), hardware, config, lengths, layouts)
            for name in self.model or [DEFAULT_MODEL]
        ]


@takes_bundles
def crossover(
    *,
    priced: Priced,
    out: Annotated[str | None, Option(metavar="FILE", help="Also a page, HTML.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare swapping a request out and in with computing it again, by length and link."""
    from kvsim.cost.crossover import LAYOUTS
    from kvsim.writing import json_text, write_text

    if priced.layout is not None:
        check_choice("--layout", priced.layout, LAYOUTS)
    lengths = sorted(set(priced.tokens or TOKENS))
    found = priced.crossings(lengths)
    if as_json:
        record = [{**m._asdict(), "crossings": [c._asdict() for c in m.crossings]} for m in found]
        print(json_text(record), end="")
    else:
        _print(found)
    if out is not None:
        from kvsim.report.pages.crossover import build_crossover

        drawn = priced.crossings(sorted({*_curve(lengths[-1]), *lengths}))
        write_text(out, build_crossover(drawn, priced.hardware, lengths))
        if not as_json:
            print(f"written to {out}")


def _given(**settings: Any) -> dict[str, Any]:
    """The settings that have a value."""
    return {key: value for key, value in settings.items() if value is not None}


def _curve(longest: int) -> list[int]:
    """Lengths from `SHORTEST` on, evenly spaced over the logarithm."""
    found, i = [], 0
    while (length := round(SHORTEST * 2 ** (i / STEPS_PER_DOUBLING))) <= longest:
        found.append(length)
        i += 1
    return found


def _print(models: list[ModelCrossings]) -> None:
    from kvsim.report.pages.crossover import UNITS, caption, head, priced, rows

    console = make_console()
    for each in models:
        console.print(make_table(*head(each), rows=rows(each), title=caption(each), texts=0))
        console.print(f"{priced(each)}\n", style="dim")
    link = next(iter(models[0].link.values()))
    console.print(
        f"{UNITS} Link: {link['bandwidth_gb_s']:g} GB/s, at least {link['copy_overhead_us']:g} µs a"
        " copy.",
        style="dim",
    )
