"""A profile for publication from the tables of LLMServingSim: surfaces in place of rows.

A smooth surface (`kvsim.cost.calibrate.smoothing`) is fitted to each table and evaluated at counts
of our own. The errors are those of the finished tables, interpolated as in a run, on rows that no
fit has seen: attention off the grid, and every second row of the others. The host's time was not
measured and is the estimate of the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from kvsim.cost.calibrate.counts import BEFORE, CHUNKS, CONTEXTS, MIXED, SEQS, TOKENS
from kvsim.cost.calibrate.heldout import table_error
from kvsim.cost.calibrate.llmservingsim import attention_errors, read_bundle
from kvsim.cost.calibrate.smoothing import Smooth
from kvsim.cost.profile import Curve, DecodeGrid, Fit, MixedGrid, PrefillGrid, Profile
from kvsim.machine.hardware import Hardware, load_hardware

C = TypeVar("C", bound=Curve)


def import_surface(
    folder: Path,
    model_name: str | None = None,
    tp: int = 1,
    hardware: Hardware | None = None,
) -> Profile:
    """The profile of a folder of LLMServingSim that holds none of its rows.

    Arguments and errors as in `kvsim.cost.calibrate.llmservingsim.read_bundle`; the GPU that
    `meta.yaml` names must be known.
    """
    measured, beside = read_bundle(folder, model_name, tp, hardware)
    hardware = hardware or load_hardware(str(measured.device["name"]))
    rows = measured.fit
    assert isinstance(rows.decode_v2, DecodeGrid)
    assert isinstance(rows.mixed, MixedGrid)
    dense, dense_error = _curve(rows.dense)
    head, head_error = _curve(rows.head)
    fit = Fit(
        dense=dense,
        head=head,
        prefill=_prefill(rows.prefill),
        decode_v2=_decode(rows.decode_v2),
        mixed=_mixed(rows.mixed),
        step=(hardware.step_overhead_us, 1.0, 0.0),
        all_reduce=rows.all_reduce,
        tail=rows.tail,
    )
    return replace(
        measured,
        source="public-table",
        software={"source": _SOURCE, **measured.software, "changes": _CHANGES},
        fit=fit,
        error={
            "how": "finished tables on rows outside the fits: attention off the grid, every second"
            " row of the others; smoothing and the counts of `mixed` were chosen on attention",
            **attention_errors(fit, beside),
            "dense": dense_error,
            "head": head_error,
            **{key: measured.error[key] for key in ("ragged", "uneven") if key in measured.error},
            "not judged": f"host ({hardware.step_overhead_us:g} us a step), block"
            f" sizes other than {measured.engine.block_size}",
        },
    )


_SOURCE = (
    "kernel tables of github.com/casys-kaist/LLMServingSim, MIT, copyright 2024 CASYS Lab at KAIST"
)
_CHANGES = "surfaces fitted to the rows and evaluated at other counts; no row is reproduced"


def _curve(rows: C) -> tuple[C, dict[str, float]]:
    """A curve through every second row and the last, and its error on the others."""
    points = list(zip(rows.x, rows.us, strict=True))
    x, us = zip(*points[:-1:2], points[-1], strict=True)
    counts = _within(TOKENS, x)
    curve = type(rows)(counts, _rounded(Smooth([x], us).at([counts])))
    return curve, table_error(curve, {(x,): us for x, us in points[1:-1:2]})


def _decode(rows: DecodeGrid) -> DecodeGrid:
    n, ctx = _within(SEQS, rows.x), _within(CONTEXTS, rows.ctx)
    return DecodeGrid(n, ctx, _rounded(Smooth([rows.x, rows.ctx], rows.us).at([n, ctx])))


def _prefill(rows: PrefillGrid) -> PrefillGrid:
    q, ctx = _within(CHUNKS, rows.x), _within(BEFORE, rows.ctx)
    return PrefillGrid(q, ctx, _rounded(Smooth([rows.x, rows.ctx], rows.us).at([q, ctx])))


def _mixed(rows: MixedGrid) -> MixedGrid:
    own = [rows.q, rows.ctx, rows.n, rows.kv]
    q, ctx, n, kv = (_within(MIXED[key], getattr(rows, key)) for key in MIXED)
    return MixedGrid(q, ctx, n, kv, _rounded(Smooth(own, rows.us).at([q, ctx, n, kv])))


def _within(counts: Sequence[float], axis: Sequence[float]) -> list[float]:
    """The counts between the ends of a measured axis, and these ends."""
    inner = {float(count) for count in counts if axis[0] < count < axis[-1]}
    return sorted(inner | {axis[0], axis[-1]})


def _rounded(us: Any) -> Any:
    return us.round(2).tolist()
