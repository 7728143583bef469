"""Profiles from the per-layer tables of LLMServingSim (github.com/casys-kaist/LLMServingSim).

```
DIR/meta.yaml                 GPU, model, engine, grid, degrees of tensor parallelism
DIR/tp1/attention.csv         prefill_chunk, kv_prefill, n_decode, kv_decode -> time_us, one layer;
                              of newer profilers prefill_key, and layer and decode_q_len besides
DIR/tp1/dense.csv             layer, tokens -> time_us, one call of each operator
DIR/tp1/per_sequence.csv      layer, sequences -> time_us: lm_head and sampler
DIR/tp1/moe.csv               tokens, activated_experts -> time_us, one layer's router and experts;
                              of newer profilers by degree of expert parallelism, ep
DIR/tp1/skew.csv              uneven decode batches, where they were measured
```

Layout and meaning: `profiler/` and `docs/` of that repository. Nothing is fitted: times are taken
as they are, operators are added up over a step. Host time was not measured and is left at 0.
Attention is read on the grid that `meta.yaml` states. Some tables have rows off this grid: they
judge the others. All-reduces of several GPUs were not measured: they are the hardware's, and the
profile is called estimated.

What uneven decode batches take longer is derived from the tables of even ones. Both rates of
`kvsim.cost.tail` are slopes of attention tables over lengths: that of a single decode beside the
smallest chunk, which no kernel splits, and that of the largest decode batch. Rows of uneven batches
are not used for them. They say how well the term meets them, and whether it is priced by default.

For publication, `import_surface` puts surfaces in place of rows: one is fitted to each table
(`kvsim.cost.calibrate.surface.Smooth`) and evaluated at counts of our own. The errors are those of
the finished tables, interpolated as in a run, on rows that no fit has seen: attention off the grid,
and every second row of the others. The host's time is the estimate of the hardware.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import ceil
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvsim.core.vectors import added
from kvsim.cost.calibrate.compare import reader
from kvsim.cost.calibrate.rows import columns, numbers, read_yaml
from kvsim.cost.calibrate.surface import (
    BEFORE,
    CHANGES,
    CHUNKS,
    CONTEXTS,
    MIXED,
    SEQS,
    TOKENS,
    Smooth,
    error,
    table_error,
)
from kvsim.cost.profile import (
    Curve,
    DecodeGrid,
    DenseCurve,
    ExpertGrid,
    Fit,
    HeadCurve,
    MixedGrid,
    PrefillGrid,
    Profile,
    ProfiledEngine,
    ProfiledModel,
    Tail,
    refuse_special,
)
from kvsim.cost.tail import Uneven
from kvsim.errors import ConfigError
from kvsim.machine.hardware import Hardware, load_hardware
from kvsim.machine.models import Model, load_model

SPLIT_SHARE, SPLITTING_BLOCKS, TILE = 0.8, 2, 64
"""FlashAttention-2: KV is not split from this share of so many thread blocks per multiprocessor
on; queries of a thread block (sources: `kvsim.cost.tail`)."""
LENGTHS = (512, 8192)
"""Lengths between which slopes are taken, where a table has them: shorter ones take little but a
launch."""
COLUMNS = ("n", "nb", "pc", "kp", "kvs", "kv_big", "kv_mean", "t_mean_us", "t_skew_us")

ONCE = ("embedding", "final_layernorm")
PER_LAYER = {"layernorm": 2, "qkv_proj": 1, "rotary_emb": 1, "o_proj": 1}
"""How often each operator is called in a decoder layer of a Llama, outside the MLP."""
DENSE_MLP = ("gate_up_proj", "act_fn", "down_proj")
"""Operators that are called once in a layer without experts."""
FURTHER = {"qk_norm": 1}
"""How often each operator that only some models have is called in a decoder layer."""
PER_SEQUENCE = ("lm_head", "sampler")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_PER_GPU = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""Sizes of a model that its GPUs may share."""
AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_GRID = re.compile(r"(\d{1,12})(?:-(\d{1,12}) x([1-9](?:\.\d{1,2})?))?")

Attention = dict[tuple[float, ...], float]


Judged = tuple[Tail, dict[str, Any]]
"""A term, and how it meets measured uneven batches: errors with it and, below `even`, without it;
empty: there are no such rows."""


def derived(decode: DecodeGrid, mixed: MixedGrid, kv_heads: int, multiprocessors: int) -> Tail:
    """The term of a GPU with so many multiprocessors and KV heads."""
    # Of the smallest chunk without context, beside the fewest decodes.
    alone = _slope(mixed.kv, mixed.us[0][0][0])
    share = _slope(decode.ctx, decode.us[-1]) / decode.x[-1]
    items = SPLIT_SHARE * SPLITTING_BLOCKS * multiprocessors
    return Tail(
        alone_ns=round(alone, 3),
        share_ns=round(share, 3),
        unsplit_seqs=ceil(items / kv_heads),
        tile=TILE,
        used=False,
    )


def judged(tail: Tail, decode: DecodeGrid, mixed: MixedGrid, path: Path, iterations: int) -> Judged:
    """`tail` with the verdict of the rows of `path`, of launches that do not split.

    The profiler of vLLM 0.19 wrote sums over its iterations: the times that it gives for even
    batches, over those of the tables, tell whether a file has them.
    """
    uneven, decodes, mixes = Uneven(tail), reader(decode), reader(mixed)
    rows: list[tuple[bool, float, float, float]] = []
    ratios: list[float] = []
    for _, (*counts, mean, mean_us, us) in numbers(path, COLUMNS) if path.exists() else ():
        n, longer, new, context, short, long = map(int, counts)
        even_us = mixes((new, context, n, mean)) if new else decodes((n, mean))
        if not even_us:  # outside the tables
            continue
        ratios.append(mean_us / even_us)
        total = long * longer + short * (n - longer)
        lengths = ([long] * longer + [short] * (n - longer))[: uneven.longest]
        if new:
            further_us = uneven.mixed_us([(new, context)], n, total, lengths)
        elif n >= tail.unsplit_seqs:
            further_us = uneven.decode_us(n, total, lengths)
        else:
            # A launch that splits keys and values is not what the term is of.
            continue
        rows.append((new > 0, even_us, even_us + further_us, us))
    if not rows:
        return tail, {}
    prompts, even, priced, real = map(np.array, zip(*rows, strict=True))
    # Times of one launch have ratios near 1, sums of all near `iterations`: the root lies between.
    real = real / (iterations if median(ratios) > iterations**0.5 else 1)
    parts = {"decodes": ~prompts.astype(bool), "with prompts": prompts.astype(bool)}
    errors: dict[str, Any] = {**error(priced, real), "even": error(even, real)}
    for name, here in parts.items():
        if here.any():
            errors[name] = error(priced[here], real[here])
            errors[f"{name}, even"] = error(even[here], real[here])
    better = all(errors[key] < errors["even"][key] for key in ("median_percent", "p95_percent"))
    return replace(tail, used=better), errors


def _slope(lengths: Sequence[float], us: Sequence[float]) -> float:
    """Nanoseconds per token within `LENGTHS`, or over all of a shorter table."""
    points = [(x, y) for x, y in zip(lengths, us, strict=False) if LENGTHS[0] <= x <= LENGTHS[1]]
    if len(points) < 2:
        points = list(zip(lengths, us, strict=False))
    return max(linear_regression(*zip(*points, strict=True)).slope, 0.0) * 1000


def import_profile(
    folder: Path,
    model_name: str | None = None,
    tp: int = 1,
    hardware: Hardware | None = None,
) -> Profile:
    """The profile that a folder with `meta.yaml` and `tp<N>` holds; see `read_bundle`."""
    return read_bundle(folder, model_name, tp, hardware)[0]


def read_bundle(
    folder: Path,
    model_name: str | None = None,
    tp: int = 1,
    hardware: Hardware | None = None,
) -> tuple[Profile, Attention]:
    """What a folder with `meta.yaml` and `tp<N>` holds: the profile, as measured, and attention of
    one layer off the grid, by the counts of `AXES`.

    `model_name`: a model of `configs/models` or a `config.json`; None: the last part of the name
    in `meta.yaml`, in lower case. `hardware` has the figures that no table has: those of
    all-reduces, and the multiprocessors; None: the GPU that `meta.yaml` names, if it is known.
    Raises `ConfigError` that names file, line and field.
    """
    meta = _Meta(folder / "meta.yaml")
    model = load_model(model_name or meta.text("model").split("/")[-1].lower())
    refuse_special(model, ("experts",))
    meta.refuse_other_than(model)
    tables = folder / f"tp{tp}"
    attention_path = tables / "attention.csv"
    attention, beside = meta.on_grid(_attention(attention_path))
    gpu, all_reduce = meta.text("gpu"), None
    if hardware is None:
        with suppress(ConfigError):  # of a GPU that has no such name here
            hardware = load_hardware(gpu)
    if tp > 1:
        if hardware is None:
            raise ConfigError(
                f"{meta.path}: gpu: all-reduces were not measured, and no GPU is named {gpu!r};"
                " give the figures of its links (--hardware)"
            )
        all_reduce = hardware.all_reduce
    decodes, prefills, both = _parts(attention)
    decode = DecodeGrid(*_grid(attention_path, decodes, (2, 3)))
    mixed = MixedGrid(*_grid(attention_path, both, (0, 1, 2, 3)))
    uneven = None
    if hardware is not None and hardware.multiprocessors:
        tail = derived(decode, mixed, model.shard(tp).kv_heads, hardware.multiprocessors)
        uneven = judged(tail, decode, mixed, tables / "skew.csv", meta.iterations)
    fit = Fit(
        dense=_dense(tables / "dense.csv", model),
        head=_head(tables / "per_sequence.csv"),
        prefill=PrefillGrid(*_grid(attention_path, prefills, (0, 1))),
        decode_v2=decode,
        mixed=mixed,
        all_reduce=all_reduce or UNSET,
        tail=UNSET if uneven is None else uneven[0],
        experts=_experts(folder) if model.experts is not None else UNSET,
    )
    profile = Profile(
        version="kvsim.profile/1",
        source="measured" if tp == 1 else "estimated",
        created=meta.said("profiled_at")[:10],
        device={"name": gpu},
        software={
            "vllm": meta.text("vllm_version"),
            "cuda": meta.said("cuda_version"),
            "profiler": f"LLMServingSim {meta.said('profiler_version')}".strip(),
        },
        model=ProfiledModel.of(model, meta.dtype, meta.dtype, tp),
        engine=ProfiledEngine(block_size=meta.block_size(tp)),
        fit=fit,
        error={
            "held_out": "rows off the grid" if beside else "none: imported as measured",
            **attention_errors(fit, beside),
            "step": "host time not measured: taken as 0",
            **_said_of_uneven(uneven),
        },
        terms=_terms(fit, hardware),
    )
    return profile, beside


def _terms(fit: Fit, hardware: Hardware | None) -> dict[str, str]:
    """Where terms come from that were not measured."""
    terms = {}
    if fit.tail is not UNSET:
        terms["uneven batches"] = "derived from the tables of even ones"
    if hardware is not None and fit.all_reduce is not UNSET:
        terms["all-reduce"] = f"figures of {hardware.name}, not measured with the kernels"
    return terms


def _said_of_uneven(uneven: Judged | None) -> dict[str, Any]:
    """How uneven decode batches are priced, and the errors on measured ones."""
    if uneven is None:
        return {"ragged": "priced at the mean length: the GPU's multiprocessors are not known"}
    tail, errors = uneven
    if not errors:
        return {"ragged": "priced at the mean length: there are no uneven batches (skew.csv)"}
    priced = "by their longest lengths" if tail.used else "at the mean length"
    return {"ragged": f"priced {priced}, as measured uneven batches say", "uneven": errors}


def _parts(rows: Attention) -> tuple[Attention, Attention, Attention]:
    """The rows of decodes alone, of prompts alone, and of both in one launch."""
    return (
        {point: us for point, us in rows.items() if point[0] == 0},
        {point: us for point, us in rows.items() if point[2] == 0},
        {point: us for point, us in rows.items() if point[0] and point[2]},
    )


def attention_errors(fit: Fit, rows: Attention) -> dict[str, Any]:
    """Errors of `decode`, `prefill` and `mixed` on rows that the tables were not made from."""
    decodes, prefills, both = _parts(rows)
    parts = {
        "decode": (fit.decode_v2, {point[2:]: us for point, us in decodes.items()}),
        "prefill": (fit.prefill, {point[:2]: us for point, us in prefills.items()}),
        "mixed": (fit.mixed, both),
    }
    return {name: table_error(table, part) for name, (table, part) in parts.items() if part}


class _Meta:
    """What `meta.yaml` says of a measurement. Raises `ConfigError` for what it does not say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table = read_yaml(path)

    def said(self, key: str) -> str:
        """A value as text; empty if there is none."""
        return str(self._table.get(key, ""))

    def text(self, key: str) -> str:
        """A value as text."""
        if not isinstance(self._table.get(key), str | float | int):
            raise ConfigError(f"{self.path}: {key}: missing")
        return self.said(key)

    @property
    def dtype(self) -> str:
        """Type of weights and activations."""
        variant, known = self.text("variant"), ", ".join(DTYPES)
        if variant not in DTYPES:
            raise ConfigError(f"{self.path}: variant: {variant!r} is not one of {known}")
        return DTYPES[variant]

    @property
    def iterations(self) -> int:
        """Launches whose times may have been added up."""
        timed = self._table.get("measurement_iterations")
        return timed if isinstance(timed, int) and timed > 0 else 1

    @property
    def _engine(self) -> dict[str, Any]:
        """Arguments of the engine."""
        engine = self._table.get("engine_effective")
        if not isinstance(engine, dict):
            raise ConfigError(f"{self.path}: engine_effective: expected a table of keys")
        return engine

    def refuse_other_than(self, model: Model) -> None:
        """`ConfigError` if the tables were measured with another geometry than `model` has.

        The overrides are one GPU's share at one of the degrees of `tp_degrees`.
        """
        overrides = self._engine.get("hf_overrides") or {}
        degrees = self._table.get("tp_degrees") or [1]
        for key in _PER_GPU:
            found, wanted = overrides.get(key), getattr(model, key)
            if found is not None and wanted not in (found * degree for degree in degrees):
                raise ConfigError(
                    f"{self.path}: engine_effective.hf_overrides.{key}: measured with {found}, but"
                    f" {model.name} has {wanted}; give the model that was measured (--model)"
                )

    def on_grid(self, table: Attention) -> tuple[Attention, Attention]:
        """The rows on the grid of `attention_grid`, and those beside it; without a grid, all are
        on."""
        stated = self._table.get("attention_grid")
        if not stated:
            return table, {}
        chunks, n, kv = (
            _grid_values(stated, key, self.path) for key in ("chunks", "n_decode", "kv")
        )
        axes = (chunks, kv, n, kv)
        on = {p: us for p, us in table.items() if all(map(set.__contains__, axes, p))}
        return on, {p: us for p, us in table.items() if p not in on}

    def block_size(self, tp: int) -> int:
        """Tokens per block: those asked for, or of newer profilers those that the engine chose."""
        size: Any = self._table.get("engine_resolved")
        for key in ("per_tp", str(tp), "block_size"):
            known = size if isinstance(size, dict) else {}
            size = {str(name): value for name, value in known.items()}.get(key)
        size = self._engine.get("block_size", size)
        if not isinstance(size, int) or size < 1:
            what = f"engine_effective.block_size: expected a number of tokens, got {size!r}"
            raise ConfigError(f"{self.path}: {what}")
        return size


def _attention(path: Path) -> Attention:
    """All rows; of newer profilers, those of the plain kernel, with one query a decode.

    These measure the past of a chunk from its middle: `prefill_key` is the mean number of keys of
    its queries (`docs/profiler/output-bundle.md` of that repository).
    """
    from_middle = "prefill_key" in columns(path)
    axes = [name.replace("kv_prefill", "prefill_key") if from_middle else name for name in AXES]
    usual = {"layer": "attention", "decode_q_len": "1"}
    named = (*axes, "decode_q_len", "time_us")
    table: Attention = {}
    for line, (kernel, *point, queries, us) in numbers(path, named, "layer", usual):
        if kernel != "attention" or queries != 1:
            continue
        if from_middle:
            point[1] -= point[0] / 2
        if tuple(point) in table:
            raise ConfigError(f"{path}:{line}: an earlier line has the same point; remove one")
        table[tuple(point)] = us
    return table


def _grid_values(stated: dict[str, Any], key: str, path: Path) -> set[float]:
    """The numbers of a grid, such as `0, 16-2048 x2`: 0, and 16 doubled until 2,048, which counts
    in any case; each is rounded to a whole number."""
    grid = stated.get(key)
    parts = grid if isinstance(grid, list) else str(grid).split(",")
    values = set()
    for part in parts:
        spec = _GRID.fullmatch(str(part).strip())
        factor = float(spec[3] or 2) if spec else 0.0
        if spec is None or factor <= 1 or (spec[2] and not int(spec[1])):
            raise ConfigError(f"{path}: attention_grid.{key}: expected a grid, got {grid!r}")
        value, last = float(spec[1]), float(spec[2] or spec[1])
        values.add(last)
        while value < last:
            values.add(float(round(value)))
            value *= factor
    return values


def _grid(path: Path, rows: Attention, axes: Sequence[int]) -> list[Any]:
    """The values on some of `AXES`, and the times at all of their combinations; others are 0."""
    values = [sorted({point[axis] for point in rows}) for axis in axes]
    times = []
    for counts in product(*values):
        point = [0.0] * len(AXES)
        for axis, count in zip(axes, counts, strict=True):
            point[axis] = count
        if tuple(point) not in rows:
            named = ", ".join(f"{axis} {value:g}" for axis, value in zip(AXES, point, strict=True))
            raise ConfigError(f"{path}: no row for {named}; the grid must be complete")
        times.append(rows[tuple(point)])
    return [*values, np.reshape(times, [*map(len, values)]).tolist()]


def _dense(path: Path, model: Model) -> DenseCurve:
    """Every operator of a step except attention, experts and logits, by tokens."""
    layers = model.num_hidden_layers
    calls = dict.fromkeys(ONCE, 1) | {name: count * layers for name, count in PER_LAYER.items()}
    further = {name: count * layers for name, count in FURTHER.items()}
    mlps = dict.fromkeys(DENSE_MLP, layers - model.expert_layers)
    # Where all layers have experts, a table may have these rows or not: they count no times.
    if model.expert_layers < layers:
        calls |= mlps
    else:
        further |= mlps
    return DenseCurve(*_summed(path, "tokens", calls, further))


def _experts(folder: Path) -> ExpertGrid | UnsetType:
    """Layers with experts, where they were measured: whole experts of one GPU, whatever the degree.

    Where they were measured as the share of one of several GPUs (`ep`), the least share counts: of
    so many tokens, each GPU has the rows of an `ep`-th. Of few tokens only few experts can be
    active. Beyond the last count that was measured, a row keeps its time.
    """
    path = folder / "tp1" / "moe.csv"
    if not path.is_file():
        return UNSET
    rows = _expert_rows(path)
    x, experts = sorted(rows), sorted({active for row in rows.values() for active in row})
    if len(x) < 2 or len(experts) < 2:
        raise ConfigError(f"{path}: tokens and activated_experts need at least 2 values each")
    curves = (dict(sorted(rows[tokens].items())) for tokens in x)
    lines = (np.interp(experts, list(curve), list(curve.values())) for curve in curves)
    return ExpertGrid(x, experts, [line.round(3).tolist() for line in lines])


def _expert_rows(path: Path) -> dict[float, dict[float, float]]:
    """Tokens → active experts → time of a layer."""
    named = "ep", "tokens", "activated_experts", "time_us"
    measured = list(numbers(path, named, usual={"ep": "1"}))
    least = min((row[0] for _, row in measured), default=1.0)
    if least < 1:
        raise ConfigError(f"{path}: ep: expected at least 1, got {least:g}")
    rows: dict[float, dict[float, float]] = {}
    for line, (ep, tokens, active, us) in measured:
        if ep > least:
            continue
        tokens /= ep
        if active in rows.setdefault(tokens, {}):
            raise ConfigError(f"{path}:{line}: an earlier line has the same point; remove one")
        rows[tokens][active] = us
    return rows


def _head(path: Path) -> HeadCurve:
    return HeadCurve(*_summed(path, "sequences", dict.fromkeys(PER_SEQUENCE, 1)))


def _summed(
    path: Path, axis: str, calls: Mapping[str, int], further: Mapping[str, int] = {}
) -> tuple[list[float], list[float]]:
    """Points of `axis`, and the time of all calls of all operators at each; those of `further` are
    called where the table has them."""
    known = {**calls, **further}
    times: dict[str, dict[float, float]] = {name: {} for name in calls}
    for line, (name, point, us) in numbers(path, (axis, "time_us"), label="layer"):
        if name not in known:
            raise ConfigError(
                f"{path}:{line}: layer: unknown operator {name!r}; known: {', '.join(known)}"
            )
        times.setdefault(name, {})[point] = us
    points = sorted({point for curve in times.values() for point in curve})
    for name, curve in times.items():
        missing = [point for point in points if point not in curve]
        if missing:
            raise ConfigError(f"{path}: no row of {name} for {missing[0]:g} {axis}")
    return points, [
        round(added(known[name] * curve[point] for name, curve in times.items()), 3)
        for point in points
    ]


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
    prefill, decode, mixed = rows.prefill, rows.decode_v2, rows.mixed
    assert isinstance(decode, DecodeGrid)
    assert isinstance(mixed, MixedGrid)
    dense, dense_error = _curve(rows.dense)
    head, head_error = _curve(rows.head)
    fit = Fit(
        dense=dense,
        head=head,
        prefill=PrefillGrid(*_smooth_grid(prefill.us, [prefill.x, prefill.ctx], [CHUNKS, BEFORE])),
        decode_v2=DecodeGrid(*_smooth_grid(decode.us, [decode.x, decode.ctx], [SEQS, CONTEXTS])),
        mixed=MixedGrid(
            *_smooth_grid(mixed.us, [getattr(mixed, key) for key in MIXED], MIXED.values())
        ),
        step=(hardware.step_overhead_us, 1.0, 0.0),
        all_reduce=rows.all_reduce,
        tail=rows.tail,
    )
    return replace(
        measured,
        source="public-table",
        software={"source": _SOURCE, **measured.software, "changes": CHANGES},
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


def _curve(rows: C) -> tuple[C, dict[str, float]]:
    """A curve through every second row and the last, and its error on the others."""
    points = list(zip(rows.x, rows.us, strict=True))
    x, us = zip(*points[:-1:2], points[-1], strict=True)
    curve = type(rows)(*_smooth_grid(us, [x], [TOKENS]))
    return curve, table_error(curve, {(x,): us for x, us in points[1:-1:2]})


def _smooth_grid(
    us: Any, axes: Sequence[Sequence[float]], counts: Iterable[Sequence[float]]
) -> list[Any]:
    """Other axes, with these counts, and the times at them."""
    others = [_within(few, axis) for few, axis in zip(counts, axes, strict=True)]
    return [*others, Smooth(axes, us).at(others).round(2).tolist()]


def _within(counts: Sequence[float], axis: Sequence[float]) -> list[float]:
    """The counts between the ends of a measured axis, and these ends."""
    inner = {float(count) for count in counts if axis[0] < count < axis[-1]}
    return sorted(inner | {axis[0], axis[-1]})
