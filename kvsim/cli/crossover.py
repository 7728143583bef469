"""`crossover`: where swapping a request's KV cache takes less time than recomputing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvsim.cli.options import AsJson
from kvsim.errors import check_choice
from kvsim.report.screen import make_console, make_table
from kvsim.settings.versions import DEFAULT_HARDWARE, DEFAULT_MODEL

if TYPE_CHECKING:
    from kvsim.cost.crossover import ModelCrossings

TOKENS = [512, 2048, 8192, 32768]
"""Lengths in the table."""
SHORTEST, STEPS_PER_DOUBLING = 16, 4
"""Lengths of the curves: the shortest, and the number per doubling."""


Models = Annotated[
    list[str] | None, Option(metavar="NAME", help=f"May be repeated; default: {DEFAULT_MODEL}.")
]
Gpu = Annotated[str, Option(metavar="NAME", help="GPU and its link.")]
Lengths = Annotated[
    list[int] | None, Option(min=1, metavar="N", help="Length to list; may be repeated.")
]
Layout = Annotated[
    str | None,
    Option(
        metavar="layer|cross",
        help="How a block is copied: layer by layer, keys and values apart (2 x layers copies), or"
        " all layers in one; default: both.",
    ),
]
Bandwidth = Annotated[
    float | None, Option(metavar="X", help="Link, one direction; default: hardware's.")
]
Overhead = Annotated[
    float | None, Option(metavar="X", help="Least time of a copy; default: hardware's.")
]
BlockSize = Annotated[int, Option(min=1, metavar="N", help="Tokens per block.")]
Gpus = Annotated[int, Option(min=1, metavar="N", help="GPUs that share each layer.")]
CostModel = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="table, roofline or constant; default: a shipped profile, else the roofline.",
    ),
]
PricedBy = Annotated[str | None, Option(metavar="PROFILE", help="Profile that prices recompute.")]
Out = Annotated[str | None, Option("--out", metavar="FILE", help="Also a page, HTML.")]


def crossover(
    model: Models = None,
    hardware: Gpu = DEFAULT_HARDWARE,
    tokens: Lengths = None,
    layout: Layout = None,
    bandwidth_gb_s: Bandwidth = None,
    copy_overhead_us: Overhead = None,
    block_size: BlockSize = 16,
    tensor_parallel_size: Gpus = 1,
    cost_model: CostModel = None,
    profile: PricedBy = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare swapping a request out and in with computing it again, by length and link."""
    from kvsim.cost.crossover import LAYOUTS
    from kvsim.writing import json_text, write_text

    if layout is not None:
        check_choice("--layout", layout, LAYOUTS)
    link = _given(bandwidth_gb_s=bandwidth_gb_s, copy_overhead_us=copy_overhead_us)
    settings = {
        "hardware": hardware,
        "block_size": block_size,
        "tensor_parallel_size": tensor_parallel_size,
        "cost": {**_given(model=cost_model, profile=profile), "link": link},
    }
    lengths = sorted(set(tokens or TOKENS))
    names, layouts = model or [DEFAULT_MODEL], [layout] if layout else list(LAYOUTS)
    found = _crossings(names, settings, lengths, layouts)
    if as_json:
        record = [{**m._asdict(), "crossings": [c._asdict() for c in m.crossings]} for m in found]
        print(json_text(record), end="")
    else:
        _print(found)
    if out is not None:
        from kvsim.report.pages.crossover import build_crossover

        drawn = _crossings(names, settings, sorted({*_curve(lengths[-1]), *lengths}), layouts)
        write_text(out, build_crossover(drawn, hardware, lengths))
        if not as_json:
            print(f"written to {out}")


def _given(**settings: Any) -> dict[str, Any]:
    """The settings that have a value."""
    return {key: value for key, value in settings.items() if value is not None}


def _crossings(
    names: list[str], settings: dict[str, Any], lengths: list[int], layouts: list[str]
) -> list[ModelCrossings]:
    from kvsim.cost.crossover import crossings
    from kvsim.machine.hardware import load_hardware
    from kvsim.machine.models import load_model
    from kvsim.settings.config import make_config

    config = make_config(settings)
    hardware = load_hardware(config.hardware_name)
    return [crossings(load_model(name), hardware, config, lengths, layouts) for name in names]


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
