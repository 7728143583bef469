"""A hardware profile: measured step times of one model on one device, in one JSON document.

```
{"schema": "kvsim.profile/1", "source": "measured", "created": ...,
 "device": {...}, "software": {...}, "model": {...}, "engine": {...},
 "ceilings": {...}, "rows": [...],         what was measured
 "fit": {...},                             what a table cost model reads
 "others": {"32": {...}},                  fits for further block sizes
 "error": {...}}                           errors on held-out rows
```
Times are microseconds. `fit` holds curves and grids over *raw* counts; between grid points they are
interpolated linearly (`kvsim.cost.table`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from kvsim.errors import ConfigError, shortened
from kvsim.machine.hardware import AllReduce
from kvsim.machine.models import Experts
from kvsim.settings.library import convert, find, read_by, read_json

if TYPE_CHECKING:
    from kvsim.machine.models import Model


class Interpolation:
    """Looks values up; a look-up outside its table sets `outside`, and no look-up resets it."""

    def __init__(self) -> None:
        self.outside = False

    def along(self, xs: Sequence[float], us: Sequence[float], x: float) -> float:
        """The line through the points `(xs[i], us[i])` at `x`; `us` may end before `xs`."""
        if x <= xs[0]:
            if x < xs[0]:
                self.outside = True
            return us[0]
        # From 1 on, so that a point lies before it; up to the last time, where `us` ends before
        # `xs`.
        i = bisect_left(xs, x, 1, len(us) - 1)
        value = us[i - 1] + (us[i] - us[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        if x > xs[i]:
            self.outside = True
            return max(value, us[i])
        return value

    def between(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        rows: Sequence[Sequence[float]],
        x: float,
        y: float,
    ) -> float:
        """The grid `rows[i][j]` at `(xs[i], ys[j])` in `(x, y)`: along `y` in two rows, then `x`.

        Rows may end before `ys`.
        """
        last = len(xs) - 1
        if x <= xs[0]:
            if x < xs[0]:
                self.outside = True
            return self.along(ys, rows[0], y)
        i = bisect_left(xs, x, 1, last)
        low, high = self.along(ys, rows[i - 1], y), self.along(ys, rows[i], y)
        value = low + (high - low) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
        if x > xs[last]:
            self.outside = True
            return max(value, high)
        return value


Positive = Annotated[int, Meta(ge=1)]
Us = Annotated[float, Meta(ge=0)]
AboveZero = Annotated[float, Meta(gt=0)]
BlockSize = Annotated[str, Meta(pattern="^[1-9][0-9]*$")]


class Curve(Struct, frozen=True, forbid_unknown_fields=True):
    """Times `us[i]` at points `x[i]`; in the file, `x` has the name of its unit."""

    x: list[float]
    us: list[Us]


class DenseCurve(Curve, frozen=True, forbid_unknown_fields=True):
    """All kernels except attention and logits, all layers together, by tokens in the step.

    Padding to captured sizes is included: the curve has a point per size, or per token count.
    """

    x: list[float] = field(name="tokens")


class HeadCurve(Curve, frozen=True, forbid_unknown_fields=True):
    """Output projection and sampler by rows of logits."""

    x: list[float] = field(name="samples")


class Grid(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Times `us[i][j]` of one layer at `(x[i], ctx[j])`; rows may end early, but have 2 entries."""

    x: list[float]
    ctx: list[float]
    us: list[list[Us]]

    @cached_property
    def columns(self) -> list[list[float]]:
        """The times by context, for every `x`: rows that end early go on as `Interpolation` does.

        The grid keeps them, because many runs of one process price their steps with it.
        """
        along = Interpolation().along
        return [[along(self.ctx, row, context) for row in self.us] for context in self.ctx]


class DecodeGrid(Grid, frozen=True, forbid_unknown_fields=True):
    """Decode attention by sequences and the mean of their lengths."""

    x: list[float] = field(name="n")


class PrefillGrid(Grid, frozen=True, forbid_unknown_fields=True):
    """Attention of one prompt chunk by its tokens and the tokens of context before them."""

    x: list[float] = field(name="q")
    tile: Positive = 1
    """Queries per tile of the kernel; a chunk is priced as the next multiple of it."""


class MixedGrid(Struct, frozen=True, forbid_unknown_fields=True):
    """Attention of one launch that serves a prompt chunk and decodes together, one layer.

    `us[i][j][k][l]` at `(q[i], ctx[j], n[k], kv[l])`: tokens of the chunk and of its context,
    decoding sequences and the mean of their lengths.
    """

    q: list[float]
    ctx: list[float]
    n: list[float]
    kv: list[float]
    us: list[list[list[list[Us]]]]


class ExpertGrid(Grid, frozen=True, forbid_unknown_fields=True):
    """One layer's router and experts on one GPU, by tokens and by the experts that any of these
    tokens go to."""

    x: list[float] = field(name="tokens")
    ctx: list[float] = field(name="active")
    tp: Positive = 1
    """GPUs that the columns of each expert were divided among."""
    routing: str = ""
    """How tokens chose their experts; empty: `active` says how many were read."""


class Tail(Struct, frozen=True, forbid_unknown_fields=True):
    """What uneven decode batches take longer, of one layer; see `kvsim.cost.tail`."""

    alone_ns: AboveZero
    """Per token of a sequence that is left alone on the GPU."""
    share_ns: Annotated[float, Meta(ge=0)]
    """Per token of each sequence on a GPU that is full."""
    unsplit_seqs: Positive
    """Number of sequences from which decode launches do not split keys and values."""
    tile: Positive
    """Queries of a prompt that one thread block serves."""
    used: bool
    """Whether it is priced unless a run asks otherwise: where measured uneven batches, which it was
    not made from, are met better with it."""


class Fit(Struct, frozen=True, forbid_unknown_fields=True):
    """The tables from which a step is priced."""

    dense: DenseCurve
    head: HeadCurve
    prefill: PrefillGrid
    decode_v1: DecodeGrid | UnsetType = UNSET
    """Decode attention by the kernel that reads a sequence in one pass."""
    decode_v2: DecodeGrid | UnsetType = UNSET
    """Decode attention by the kernel that splits sequences into partitions."""
    mixed: MixedGrid | UnsetType = UNSET
    """Attention of an engine that serves chunks and decodes in one launch; without it, they take
    one launch each."""
    step: tuple[float, float, float] = (0.0, 1.0, 0.0)
    """(a0, a1, a2): step = a0 + a1 x kernels + a2 x sequences."""
    prompt_step_us: Us = 0.0
    """Further host time of a step with prompts."""
    all_reduce: AllReduce | UnsetType = UNSET
    """All-reduces of the hidden states, two per layer, where `dense` does not hold them."""
    experts: ExpertGrid | UnsetType = UNSET
    """Layers with experts; `dense` does not hold these (`kvsim.cost.experts`)."""
    tail: Tail | UnsetType = UNSET
    """What uneven decode batches take longer."""
    l2_mib: AboveZero | UnsetType = UNSET
    """Level-2 cache of a GPU on which launches with prompts do not group heads, where `mixed` is
    not measured (`kvsim.cost.ungrouped`)."""
    launch_floor_us: Us = 0.0
    """Least time of a step whose kernels are launched one by one."""
    copied_block_us: Us = 0.0
    """Time to copy one block on the GPU."""
    swap: dict[str, Any] = {}
    """Times of the host link, by layout and direction; for readers only, steps do not use it."""


SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
}
"""Name of a dimension in a model → its name in a profile."""


class ProfiledModel(Struct, frozen=True, forbid_unknown_fields=True):
    """Geometry of the model that the profile was measured with."""

    name: str
    layers: Positive
    hidden: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    ffn: Positive
    vocab: Positive
    dtype: str
    kv_dtype: str
    tp: Positive = 1
    experts: Experts | UnsetType = UNSET
    special: str = ""
    """What else sets the model apart from a dense 16-bit decoder (`Model.special`); such a profile
    prices this geometry alone."""

    @classmethod
    def of(cls, model: Model, dtype: str, kv_dtype: str, tp: int) -> ProfiledModel:
        """The geometry of a model on `tp` GPUs."""
        return cls(
            name=model.name,
            **{key: getattr(model, name) for name, key in SIZES.items()},
            dtype=dtype,
            kv_dtype=kv_dtype,
            tp=tp,
            experts=model.experts or UNSET,
            special=", ".join(each for each in model.special if each != "experts"),
        )


class ProfiledEngine(Struct, frozen=True):
    """Settings of the measured engine; the file may hold further keys."""

    block_size: Positive
    graph: bool = True
    """Whether decode-only steps replay a captured graph."""


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """The document; its key `schema` is called `version` here."""

    version: Literal["kvsim.profile/1"] = field(name="schema")
    source: Literal["measured", "scaled", "roofline", "public-table", "estimated"]
    """`estimated`: measured kernels, and terms that are estimates (`terms` names them)."""
    created: str
    device: dict[str, Any]
    model: ProfiledModel
    engine: ProfiledEngine
    fit: Fit
    """The fit at the engine's block size."""
    others: dict[BlockSize, Fit] = {}
    """Fits at further block sizes, by tokens per block."""
    software: dict[str, Any] = {}
    ceilings: dict[str, Any] = {}
    rows: list[Any] = []
    error: dict[str, Any] = {}
    terms: dict[str, str] = {}
    """Where terms come from that no table holds, by name; they label every result."""
    fitted: dict[str, Any] = {}
    """Constants that were fitted to a real run, the run, and the error on the rest of it."""

    def fit_at(self, block_size: int) -> Fit | None:
        """The fit for a block size; None if there is none."""
        if block_size == self.engine.block_size:
            return self.fit
        return self.others.get(str(block_size))


def distrust(error: Mapping[str, Any]) -> str:
    """Why a profile's own checks do not bear it out, by its `error`; empty if they do."""
    if error.get("trusted", True) is True:
        return ""
    why = error.get("why")
    return "; ".join(map(str, why)) if isinstance(why, list) and why else "no reason is given"


def load_profile(name_or_path: str) -> Profile:
    """The profile with a shipped name, or that of a JSON file at this path.

    Raises `ConfigError` that names the file and the key.
    """
    return read_by(_read, "profiles", find("profiles", name_or_path))


def _read(path: Path) -> Profile:
    profile = convert(read_json(path), Profile, str(path))
    fits = {"fit": profile.fit} | {f"others.{size}": fit for size, fit in profile.others.items()}
    for name, fit in fits.items():
        for key in Fit.__struct_fields__:
            problem = _problem(getattr(fit, key))
            if problem:
                raise ConfigError(f"{path}: {name}.{key}: {problem}")
    if problem := _problem_of_errors(profile.error, "error"):
        raise ConfigError(f"{path}: {problem}")
    return profile


def refuse_special(model: Model, priced: Collection[str] = ()) -> None:
    """Raise `ConfigError` for what a profile cannot hold of a model (`Model.special`).

    `priced` names what the caller has times of beside a dense 16-bit decoder.
    """
    if unlike := [feature for feature in model.special if feature not in priced]:
        raise ConfigError(
            f"profile: {model.name} has {', '.join(unlike)}, which the tables do not hold;"
            " use --cost-model roofline"
        )


def _problem(part: object) -> str:
    """The fault of a part of `fit`, in words; empty if there is none."""
    if isinstance(part, MixedGrid):
        return _problem_of_mixed(part)
    if not isinstance(part, Curve | Grid):
        return ""
    if len(part.us) != len(part.x):
        times = "times" if isinstance(part, Curve) else "rows of times"
        return f"{len(part.us)} {times} for {len(part.x)} points; give one each"
    if isinstance(part, Curve):
        return _problem_of_axis(part.x)
    for row in part.us:
        if not 2 <= len(row) <= len(part.ctx):
            return f"a row of {len(row)} times for {len(part.ctx)} contexts; give 2 up to all"
    return _problem_of_axis(part.x) or _problem_of_axis(part.ctx)


def _problem_of_mixed(grid: MixedGrid) -> str:
    axes = {"q": grid.q, "ctx": grid.ctx, "n": grid.n, "kv": grid.kv}
    tables: list[Any] = [grid.us]
    for name, axis in axes.items():
        for table in tables:
            if len(table) != len(axis):
                return f"{len(table)} entries for {len(axis)} points of {name}; give one each"
        tables = [inner for table in tables for inner in table]
    return next((f"{k}: {p}" for k, axis in axes.items() if (p := _problem_of_axis(axis))), "")


def _problem_of_errors(error: Mapping[str, Any], where: str) -> str:
    """The first figure of a table of errors that is none, in words; empty if all are.

    Figures are `points` and what ends in `_percent`; `others` holds tables by block size.
    """
    for key, value in error.items():
        place = f"{where}.{key}"
        is_figure = key == "points" or key.endswith("_percent")
        if is_figure and type(value) not in (int, float):
            return f"{place}: {shortened(repr(value))} is not a number; give one"
        if where == "error" and key == "others":
            tables = value.values() if isinstance(value, Mapping) else [None]
            if not all(isinstance(each, Mapping) for each in tables):
                return f"{place}: expected a table of errors for each block size"
        if isinstance(value, Mapping) and (problem := _problem_of_errors(value, place)):
            return problem
    return ""


def _problem_of_axis(points: list[float]) -> str:
    if len(points) < 2:
        return "a line needs at least 2 points"
    if any(b <= a for a, b in pairwise(points)):
        return "points must increase"
    return ""


def to_json(profile: Profile) -> str:
    """The document; one line per key of `fit`, so that two files can be compared by eye."""
    table: dict[str, Any] = msgspec.to_builtins(profile)
    fit, others = table.pop("fit"), table.pop("others")
    parts = [f"{json.dumps(key)}: {_json_line(value)}" for key, value in table.items()]
    parts.append(_json_fit("fit", fit))
    if others:
        inner = ",\n ".join(_json_fit(size, fit) for size, fit in others.items())
        parts.append(f'"others": {{\n {inner}\n }}')
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _json_fit(name: str, fit: dict[str, Any]) -> str:
    inner = ",\n  ".join(f"{json.dumps(key)}: {_json_line(value)}" for key, value in fit.items())
    return f"{json.dumps(name)}: {{\n  {inner}\n }}"


def _json_line(value: Any) -> str:
    return json.dumps(_shortened(value), ensure_ascii=False)


def _shortened(value: Any) -> Any:
    """The value with whole numbers as integers."""
    if isinstance(value, list | tuple):
        return [_shortened(each) for each in value]
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
