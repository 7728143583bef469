"""How good a profile is: distance from rows that it has not seen, drift, noise. No torch here."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvsim_kernels.prices import Prices
from kvsim_kernels.rows import Row, RowSet, identity
from kvsim_kernels.tables import Table, odd_cells
from kvsim_kernels.uneven import Law

STEP_MEDIAN_PERCENT, STEP_P95_PERCENT = 5.0, 20.0
"""Bounds on held-out steps: good calibrations on a CPU had 2-3.5 and 5-14, bad ones 8 and 40."""

DRIFT_PERCENT = 5.0
"""Bound on how far the anchors may move between the start and the end, in the median."""

GATHER_OVER_V2 = 2.0
"""Least ratio of decode by gathering, which moves three times the bytes, to decode v2."""

Figures = dict[str, Any]


def error(prices: Prices, rows: RowSet) -> Figures:
    """The key `error` of a profile; every figure in percent of what was measured."""
    found: Figures = {
        "how": "rows and whole steps left out of the fit, in percent of what was measured;"
        " bias: median of predicted over measured, - 1",
        "step": _steps(prices, rows),
    }
    for kernel in ("decode_v1", "decode_v2"):
        if kernel in prices.fit:
            found[kernel] = _decode(prices, rows, kernel)
    found["prefill"] = _prefill(prices, rows)
    for kernel, axis in (("dense", "tokens"), ("head", "samples")):
        price = getattr(prices, kernel)
        held = rows.of(kernel, "held_out")
        found[kernel] = figures([(price(row["shape"][axis]), row["us"]) for row in held])
    found |= _further(prices, rows)
    found["repeat_noise"] = _noise(rows)
    found["anchor_drift_percent"] = _drift(rows)
    axes = {"prefill": "q", "decode_v1": "n", "decode_v2": "n"}
    found["odd_cells"] = [
        f"{kernel}: {cell}"
        for kernel, axis in axes.items()
        if kernel in prices.fit
        for cell in odd_cells(prices.fit[kernel], axis)
    ]
    ratio = _gather_over_v2(rows)
    if ratio is not None:
        found["gather_over_decode_v2"] = ratio
    why = _objections(found)
    return found | {"trusted": not why, "why": why}


def figures(pairs: Sequence[tuple[float, float]]) -> Figures:
    """Distances of (predicted, measured) pairs in percent of what was measured."""
    if not pairs:
        return {"points": 0}
    signed = np.array([predicted / measured - 1 for predicted, measured in pairs]) * 100
    far = np.abs(signed)
    values = (np.median(far), np.percentile(far, 95), far.max(), np.median(signed))
    names = ("median_percent", "p95_percent", "max_percent", "bias_percent")
    rounded = [round(float(value), 2) for value in values]
    return {"points": len(pairs)} | dict(zip(names, rounded, strict=True))


def uneven(law: Law, rows: Sequence[Row], factor: float) -> Figures:
    """Distances of decode batches of any lengths, priced by the law; below `even`, at `factor`
    times even ones."""
    shapes = [(row["shape"], row["us"]) for row in rows]
    even = figures([(factor * law.even_us(shape), us) for shape, us in shapes])
    return figures([(law.us(shape), us) for shape, us in shapes]) | {"even": even}


def better(found: Figures) -> bool:
    """Whether `uneven` is better by the law, in the median and at p95."""
    keys = ("median_percent", "p95_percent")
    return bool(found["points"]) and all(found[key] < found["even"][key] for key in keys)


def ceilings(rows: RowSet) -> Figures:
    """Bandwidths in GB/s and arithmetic in TFLOP/s; a copy counts what is read and written."""
    found: Figures = {}
    for row in rows.of("ceiling"):
        shape, us = row["shape"], row["us"]
        if shape["what"] == "gemm":
            flops = 2 * shape["m"] * shape["n"] * shape["k"]
            found["gemm_tflop_s"] = round(flops / us / 1e6, 3)
        else:
            moved = shape["bytes"] * (2 if shape["what"] in ("copy", "both") else 1)
            found[f"{shape['what']}_gb_s"] = round(moved / us / 1e3, 3)
    return found


def _steps(prices: Prices, rows: RowSet) -> Figures:
    """Returns the errors of whole steps. `kernel_sum` leaves out a0, a1 and a2, to show how near
    the kernels alone come."""
    held = rows.steps("held_out")
    pairs = [(prices.step(row["shape"]), row["us"], row["shape"]["chunks"]) for row in held]
    return figures([pair[:2] for pair in pairs]) | {
        "decode only": figures([pair[:2] for pair in pairs if not pair[2]]),
        "with chunks": figures([pair[:2] for pair in pairs if pair[2]]),
        "kernel_sum": figures([(prices.kernels(row["shape"]), row["us"]) for row in held]),
    }


def _further(prices: Prices, rows: RowSet) -> Figures:
    """Errors of what only some calibrations measure."""
    found = {}
    for kernel, price, keys in (
        ("experts", prices.experts, ("tokens", "active")),
        ("all_reduce", prices.all_reduce, ("bytes",)),
    ):
        if kernel in prices.fit:
            held = [(row["shape"], row["us"]) for row in rows.of(kernel, "held_out")]
            found[kernel] = figures([(price(*map(shape.get, keys)), us) for shape, us in held])
    return found


def _decode(prices: Prices, rows: RowSet, kernel: str) -> Figures:
    """Batches of equal lengths off the grid; those of unequal lengths are a region of their own."""
    found = _attention(prices, rows, kernel, "n", prices.decode)
    inside = prices.maps[kernel].inside
    pairs = [
        (prices.decode(kernel, row["shape"]["n"], row["shape"]["ctx"]), inside(row["us"]))
        for row in rows.unequal(kernel, "held_out")
    ]
    return found | {"unequal lengths": figures(pairs)}


def _prefill(prices: Prices, rows: RowSet) -> Figures:
    return _attention(prices, rows, "prefill", "q", lambda _, q, ctx: prices.prefill(q, ctx))


def _attention(
    prices: Prices,
    rows: RowSet,
    kernel: str,
    axis: str,
    price: Callable[[str, int, int], float],
) -> Figures:
    """A kernel on the rows held out, as a whole and by region of its grid."""
    pairs = {}
    for row in rows.of(kernel, "held_out"):
        point = (row["shape"][axis], row["shape"]["ctx"])
        pairs[point] = (price(kernel, *point), prices.maps[kernel].batch(row["us"]))
    found = figures(list(pairs.values()))
    for name, holds in _regions(prices.fit[kernel], axis).items():
        found[name] = figures([pair for point, pair in pairs.items() if holds(*point)])
    return found


def _regions(table: Table, axis: str) -> dict[str, Callable[[float, float], bool]]:
    """Halves of both axes, split at their geometric middle, and the outermost cells."""
    xs, contexts = table[axis], table["ctx"]
    middle = round((xs[0] * xs[-1]) ** 0.5)
    half = round((max(contexts[0], contexts[1] / 2) * contexts[-1]) ** 0.5)

    def edge(x: float, ctx: float) -> bool:
        return not (xs[1] <= x <= xs[-2] and contexts[1] <= ctx <= contexts[-2])

    return {
        f"{axis} <= {middle}": lambda x, ctx: x <= middle,
        f"{axis} > {middle}": lambda x, ctx: x > middle,
        f"ctx <= {half}": lambda x, ctx: ctx <= half,
        f"ctx > {half}": lambda x, ctx: ctx > half,
        "inside": lambda x, ctx: not edge(x, ctx),
        "edge": edge,
    }


def _noise(rows: RowSet) -> Figures:
    """Returns the differences between two measurements of the same shape in one session."""
    first = {_shape(row): row["us"] for row in rows.all if row["split"] == "fit"}
    again = [row for row in rows.all if row["split"] == "repeat"]
    return figures([(row["us"], first[_shape(row)]) for row in again if _shape(row) in first])


def _drift(rows: RowSet) -> float:
    """The farthest that the anchors of a session's start or end lie, in the median, from others."""
    sets: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows.all:
        if row["split"] in ("start", "end") and row["kernel"] != "session":
            sets.setdefault((row["session"], row["split"]), {})[_shape(row)] = row["us"]
    if not sets:
        return 0.0
    # The start of the first session, to which all others are compared.
    first = sets[min(sets, key=lambda key: (key[0], key[1] == "end"))]
    ratios = [
        float(np.median([us / first[shape] for shape, us in anchors.items() if shape in first]))
        for anchors in sets.values()
    ]
    return round(max(abs(ratio - 1) for ratio in ratios) * 100, 2)


def _gather_over_v2(rows: RowSet) -> float | None:
    """How much longer decoding takes by gathering all pages, at least; None: not measured."""
    paged = {str(row["shape"]): row["us"] for row in rows.of("decode_v2", method="alone")}
    gathered = [(row["us"], str(row["shape"])) for row in rows.of("decode_gather")]
    ratios = [us / paged[shape] for us, shape in gathered if shape in paged]
    return round(min(ratios), 2) if ratios else None


def _shape(row: Row) -> str:
    """What two rows share that measure the same."""
    return identity({key: row[key] for key in ("kernel", "method", "shape")})


def _objections(found: Figures) -> list[str]:
    """Why the profile should not be trusted; nothing if it should."""
    step, why = found["step"], []
    if not step["points"]:
        why.append("no whole steps were held out")
    else:
        for key, bound in (
            ("median_percent", STEP_MEDIAN_PERCENT),
            ("p95_percent", STEP_P95_PERCENT),
        ):
            if step[key] > bound:
                why.append(f"step {key} {step[key]:g} is above {bound:g}")
    if found["anchor_drift_percent"] > DRIFT_PERCENT:
        why.append(f"anchors drifted by {found['anchor_drift_percent']:g} %")
    if found["odd_cells"]:
        why.append(f"cells stand out: {', '.join(found['odd_cells'][:3])}")
    if found.get("gather_over_decode_v2", GATHER_OVER_V2) < GATHER_OVER_V2:
        why.append(f"gathering takes only {found['gather_over_decode_v2']:g} times decode_v2")
    return why
