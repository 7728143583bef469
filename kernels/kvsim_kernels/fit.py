"""Rows of a sweep -> a profile: tables, their corrections, and the fit of whole steps.

Grids come from kernels alone on cold caches. A line fitted to the same kernels in situ maps them
to what they take inside a forward pass, and a factor makes decode batches of equal lengths into
such as engines have. Batches of few long sequences give the rates of the tail law; it is used where
uneven batches that it was not made from are met better with it. The same rows make the same bytes,
in whatever order they were measured. No torch here.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvsim_kernels import judge
from kvsim_kernels.prices import Map, Prices, Setting
from kvsim_kernels.rows import Row, RowsError, RowSet
from kvsim_kernels.summary import achieved
from kvsim_kernels.tables import Table, between, grid, robust_fit
from kvsim_kernels.uneven import Law

DECODE = ("decode_v1", "decode_v2")


def make_profile(header: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The profile (`kvsim.profile/1`) that the rows of a sweep make, in plain values.

    `error` says how far it is off on rows that it has not seen, and whether that is good enough:
    `trusted`, or else `why` not. Raises `RowsError` where rows are missing.
    """
    measured = RowSet(rows)
    try:
        prices, found = _fit(Setting.of(header), measured)
    except (ValueError, IndexError, np.linalg.LinAlgError) as error:
        raise RowsError(
            f"the rows do not make a profile: {error}; run the calibration again to complete them"
        ) from None
    ceilings = judge.ceilings(measured)
    return {
        "schema": "kvsim.profile/1",
        "source": "measured",
        "created": header["created"],
        "device": header["device"],
        "software": header["software"] | {"git": header["git"]},
        "model": header["model"],
        "engine": header["engine"],
        "ceilings": ceilings | {"achieved": achieved(header["model"], measured.all, ceilings)},
        "error": judge.error(prices, measured) | found,
        "fit": prices.fit,
        **_terms(prices),
        "rows": measured.all,
    }


def joined(profiles: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One profile of several that differ in their block size; the first gives everything else."""
    first, *rest = profiles
    document = dict(first)
    if rest:
        size = {id(each): str(each["engine"]["block_size"]) for each in rest}
        document["others"] = {size[id(each)]: each["fit"] for each in rest}
        document["rows"] = [
            *first["rows"],
            *(row | {"block_size": int(size[id(each)])} for each in rest for row in each["rows"]),
        ]
        why = [
            f"block_size {each['engine']['block_size']}: {reason}"
            for each in profiles
            for reason in each["error"]["why"]
        ]
        document["error"] = first["error"] | {
            "others": {size[id(each)]: each["error"] for each in rest},
            "trusted": not why,
            "why": why,
        }
    return document


def to_json(document: dict[str, Any]) -> str:
    """The file of a profile: a line per key of `fit` and per row, so that diffs read well."""
    parts = []
    for key, value in document.items():
        if key == "rows":
            listed = ",\n  ".join(_line(row) for row in value)
            parts.append(f'"rows": [\n  {listed}\n ]')
        elif key == "others":
            fits = ",\n ".join(_block(size, fit) for size, fit in value.items())
            parts.append(f'"others": {{\n {fits}\n }}')
        else:
            parts.append(
                _block(key, value) if key == "fit" else f"{json.dumps(key)}: {_line(value)}"
            )
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _block(name: str, table: Table) -> str:
    inner = ",\n  ".join(f"{json.dumps(key)}: {_line(value)}" for key, value in table.items())
    return f"{json.dumps(name)}: {{\n  {inner}\n }}"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _fit(setting: Setting, rows: RowSet) -> tuple[Prices, Table]:
    """Prices by the rows; and how uneven batches are met, and how attention alone relates to
    attention in situ."""
    prices, insitu = Prices({}, setting), {}
    fit = prices.fit
    fit["dense"] = _curve(rows.of("dense"), "tokens", setting.capture_sizes)
    fit["head"] = _curve(rows.of("head"), "samples", setting.capture_sizes)
    fit["prefill"], insitu["prefill"] = _attention(prices, rows, "prefill", "q")
    fit["prefill"]["tile"] = setting.tile
    engines, law, used = setting.decode_kernel, None, False
    further: Table = {}
    if rows.uneven(engines, "fit"):
        law, further["uneven"] = _law(rows, engines, setting.longest)
        used = judge.better(further["uneven"])
    for kernel in DECODE:
        if rows.of(kernel):
            own = law if used and kernel == engines else None
            fit[kernel], insitu[kernel] = _attention(prices, rows, kernel, "n", own)
    if law is not None:
        fit["tail"] = _tail(prices, law, used)
    if rows.of("experts"):
        table = grid(rows.of("experts"), "tokens", "active")
        fit["experts"] = {"tokens": table["tokens"], "active": table["ctx"], "us": table["us"]}
    if rows.of("all_reduce"):
        fit["all_reduce"] = _all_reduce(rows.of("all_reduce"))
    floors = [row["us"] for split in ("fit", "repeat") for row in rows.of("launch_floor", split)]
    copies = max(rows.of("copy"), key=lambda row: row["shape"]["blocks"], default=None)
    fit["launch_floor_us"] = min(floors, default=0.0)  # A busy host only adds.
    fit["copied_block_us"] = round(copies["us"] / copies["shape"]["blocks"], 3) if copies else 0.0
    fit["swap"] = _swap(rows)
    fit["step"] = _step(prices, rows.steps("fit"))
    return prices, further | {"insitu": insitu}


def _curve(rows: Sequence[Row], axis: str, capture_sizes: Sequence[int]) -> Table:
    """Times by counts; counts between two captured sizes cost what the larger one does."""
    points = {row["shape"][axis]: row["us"] for row in rows}
    for low, high in pairwise(sorted(capture_sizes)):
        if high > low + 1 and high in points:
            points[low + 1] = points[high]
    if len(points) < 2:
        raise ValueError(f"{len(points)} points of {axis}")
    return {axis: sorted(points), "us": [points[x] for x in sorted(points)]}


def _attention(
    prices: Prices, rows: RowSet, kernel: str, axis: str, law: Law | None = None
) -> tuple[Table, Table]:
    """(the grid of a kernel as it is in an engine's steps, how it was mapped there); `law` prices
    what uneven batches take longer."""
    table = grid(rows.of(kernel, method="alone"), axis)
    line = _map(table, axis, rows.of(kernel, method="insitu"))
    base, slope = line["map"]
    factor = _unequal(
        law or Law(table, 0.0, 0.0, prices.setting.longest), rows.unequal(kernel, "fit")
    )
    prices.maps[kernel] = Map(base, slope, factor)
    inside = prices.maps[kernel].batch
    us = [[round(inside(alone), 3) for alone in times] for times in table["us"]]
    return table | {"us": us}, line | {"unequal_over_equal": factor}


def _map(table: Table, axis: str, inside: Sequence[Row]) -> Table:
    """The line from times alone to times in situ; none with fewer than 4 rows in situ."""
    pairs = []
    for row in inside:
        shape = row["shape"]
        alone = between(table[axis], table["ctx"], table["us"], shape[axis], shape["ctx"])
        if row["us"] > 0:
            pairs.append((alone, row["us"]))
    base, slope, ratio = 0.0, 1.0, 1.0
    if len(pairs) >= 4:
        measured = [us for _, us in pairs]
        base, slope = map(float, robust_fit([[1.0, alone] for alone, _ in pairs], measured))
        ratio = float(np.median([us / alone for alone, us in pairs]))
    return {
        "points": len(pairs),
        "over_alone": round(ratio, 4),
        "map": [round(base, 3), round(slope, 5)],
    }


def _unequal(law: Law, rows: Sequence[Row]) -> float:
    """Time of decode batches of unequal lengths over that by the law, in the median."""
    ratios = [row["us"] / law.us(row["shape"]) for row in rows if row["shape"]["n"] > 1]
    return round(float(np.median(ratios)), 4) if ratios else 1.0


def _law(rows: RowSet, kernel: str, longest: int) -> tuple[Law, Table]:
    """The law of uneven batches, and how it meets those that it was not made from."""
    table = grid(rows.of(kernel, method="alone"), "n")
    law = Law.measured(table, rows.uneven(kernel, "fit"), longest)
    even = Law(table, 0.0, 0.0, longest)
    held = [*rows.uneven(kernel, "held_out"), *rows.unequal(kernel, "held_out")]
    return law, judge.uneven(law, held, _unequal(even, rows.unequal(kernel, "fit")))


def _tail(prices: Prices, law: Law, used: bool) -> Table:
    """The rates of uneven batches, in situ."""
    found = prices.maps[prices.setting.decode_kernel]
    scale = found.slope * found.unequal
    return {
        "alone_ns": round(max(law.alone_ns * scale, 0.001), 3),
        "share_ns": round(max(law.share_ns * scale, 0.0), 3),
        "unsplit_seqs": 1,
        "tile": prices.setting.tile,
        "used": used,
    }


def _all_reduce(rows: Sequence[Row]) -> Table:
    """Latency and bandwidth, of small and of large messages where that is better by a fifth."""
    gpus = rows[0]["shape"]["gpus"]
    points = sorted((row["shape"]["bytes"], row["us"]) for row in rows)
    moved = 2 * (gpus - 1) / gpus

    def figures(part: Sequence[tuple[int, float]]) -> tuple[Table, float]:
        # 1 GB/s is 1,000 bytes per microsecond.
        terms = [[1.0, moved * size / 1e3] for size, _ in part]
        latency_us, per_kb = robust_fit(terms, [us for _, us in part])
        found = (max(float(latency_us), 0.0), max(float(per_kb), 1e-6))
        left = sum(
            abs(np.dot(term, found) / us - 1) for term, (_, us) in zip(terms, part, strict=True)
        )
        return {"latency_us": round(found[0], 3), "bandwidth_gb_s": round(1 / found[1], 4)}, left

    whole, left = figures(points)
    splits = [
        (small[1] + large[1], points[at][0], small[0], large[0])
        for at in range(3, len(points) - 2)
        for small, large in [(figures(points[:at]), figures(points[at:]))]
    ]
    if splits and (best := min(splits, key=lambda split: split[:2]))[0] < 0.8 * left:
        whole = best[2] | {"large": {"from_bytes": best[1], **best[3]}}
    return whole | {"gpus": gpus}


def _terms(prices: Prices) -> Table:
    """Where the terms come from that other profiles estimate, if any was measured."""
    fit, terms = prices.fit, {}
    if "tail" in fit:
        terms["uneven batches"] = f"measured with {prices.setting.decode_kernel}"
    if "all_reduce" in fit:
        terms["all-reduce"] = f"measured between {fit['all_reduce']['gpus']} GPUs"
    return {"terms": terms} if terms else {}


def _swap(rows: RowSet) -> Table:
    """`{layout: {direction: [s0, s1]}}`: microseconds of a call = s0 + s1 x blocks."""
    found: Table = {}
    for row in rows.of("swap"):
        shape = row["shape"]
        found.setdefault(shape["layout"], {}).setdefault(shape["direction"], []).append(
            (shape["blocks"], row["us"])
        )
    for directions in found.values():
        for direction, points in directions.items():
            line = robust_fit([[1.0, blocks] for blocks, _ in points], [us for _, us in points])
            directions[direction] = [round(float(each), 3) for each in line]
    return found


def _step(prices: Prices, rows: Sequence[Row]) -> list[float]:
    """(a0, a1, a2) of the steps that the launch floor does not decide: graphs have none."""
    floor_us = 1.1 * prices.fit["launch_floor_us"]
    above = [row for row in rows if row["us"] > floor_us or not prices.eager(row["shape"])]
    if len(above) < 6:
        raise ValueError(f"{len(above)} whole steps")
    terms = [
        [1.0, prices.kernels(row["shape"]), row["shape"]["n"] + len(row["shape"]["chunks"])]
        for row in above
    ]
    a0, a1, a2 = robust_fit(terms, [row["us"] for row in above])
    return [round(float(a0), 3), round(float(a1), 6), round(float(a2), 4)]
