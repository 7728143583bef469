"""What steps are priced by: `profile` and `calibrate` make a profile from kernel times or a run,
look at it, compare two; `crossover` says where swapping a request's KV cache takes less time than
recomputing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import asdict
from typer import Argument, Option

from kvsim.cli.commands import group_of, progress_bar, run_module
from kvsim.cli.options import (
    AsJson,
    Bundle,
    ConfigFile,
    MeasuredFile,
    ProfileOut,
    TraceForm,
    takes_bundles,
)
from kvsim.cli.settings import Settings
from kvsim.errors import ConfigError, check_choice
from kvsim.report import make_console, make_table
from kvsim.settings.versions import DEFAULT_HARDWARE, DEFAULT_MODEL

if TYPE_CHECKING:
    from kvsim.cost.crossover import ModelCrossings
    from kvsim.settings.config import RunConfig
    from kvsim.workload.trace import Trace

FIRST = 100
"""Requests that constants are fitted to, unless another number is given."""
KERNELS = "kvsim_kernels.calibrate"
"""What times kernels, in a process of its own, which has torch and nothing of kvsim: what a process
is started with decides its times, above all the allocator's settings."""

app = group_of("profile")

Source = Annotated[str, Argument(metavar="PROFILE", help="A file, or a shipped name.")]

TOKENS = [512, 2048, 8192, 32768]
"""Lengths in the table."""
SHORTEST, STEPS_PER_DOUBLING = 16, 4
"""Lengths of the curves: the shortest, and the number per doubling."""


@app.command("import")
def import_(
    *,
    folder: str = Argument(
        metavar="DIR",
        help="LLMServingSim: meta.yaml, tp1/attention.csv, ...;"
        " AIConfigurator: decode.csv, prefill.csv, gemm.csv, moe_perf.parquet, ...",
    ),
    out: ProfileOut,
    model: str | None = Option(
        None, metavar="NAME", help="Model to price; LLMServingSim's tables name theirs."
    ),
    hardware: str | None = Option(
        None,
        metavar="NAME",
        help="GPU that was measured; LLMServingSim's tables name it, but not its links.",
    ),
    tensor_parallel_size: int = Option(1, min=1, metavar="N", help="GPUs that share each layer."),
    created: str = Option("", metavar="DATE", help="When AIConfigurator's tables were made."),
    note: str = Option("", metavar="TEXT", help="With what AIConfigurator's tables were made."),
    surface: bool = Option(
        False,
        help="LLMServingSim: fit surfaces, so that the profile holds none of the rows;"
        " AIConfigurator's tables always become surfaces.",
    ),
) -> None:
    """Turn a folder of kernel times into a profile for --cost-model table."""
    from kvsim.cost.calibrate import aiconfigurator, llmservingsim
    from kvsim.cost.profile import to_json
    from kvsim.machine.hardware import load_hardware
    from kvsim.writing import write_text

    path = Path(folder)
    if (path / "meta.yaml").exists():
        if created or note:
            raise ConfigError(
                f"{folder}/meta.yaml has date and software; leave out --created and --note"
            )
        gpu = None if hardware is None else load_hardware(hardware)
        read = llmservingsim.import_surface if surface else llmservingsim.import_profile
        profile = read(path, model, tensor_parallel_size, gpu)
    elif (path / "gemm.csv").exists():
        if model is None or hardware is None:
            raise ConfigError(
                f"{folder}: the tables name neither model nor GPU; give --model and --hardware"
            )
        profile = aiconfigurator.import_profile(
            path, model, hardware, tensor_parallel_size, created, note
        )
    else:
        raise ConfigError(
            f"{folder}: has neither meta.yaml (LLMServingSim) nor gemm.csv (AIConfigurator)"
        )
    write_text(out, to_json(profile))
    print(f"written to {out}: use it with --cost-model table --set cost.profile={out}")


@app.command()
def fit(
    *,
    rows: list[str] = Argument(metavar="ROWS...", help="PROFILE.16.rows.jsonl of a calibration."),
    out: ProfileOut,
) -> None:
    """Fit the rows of `kvsim calibrate` again; equal rows make an equal file."""
    run_module(KERNELS, ["--fit", *rows, "--out", out])


@app.command("fit-run")
@takes_bundles
def fit_run(
    *,
    name: Source,
    run: str = Option(metavar="RESULT", help="Of vllm bench serve --save-detailed."),
    out: ProfileOut,
    first: int = Option(FIRST, min=1, metavar="N", help="Requests to fit; the others judge."),
    measured: MeasuredFile = None,
    config: ConfigFile = None,
    form: TraceForm,
    settings: Settings,
) -> None:
    """Fit constants of the machine to the first part of a real run; the rest judges them."""
    from kvsim.workload.formats.table import join_measured

    loaded = settings.load(config)
    trace = form.open(run)
    if measured is not None:
        trace = join_measured(trace, measured)
    show_fit(fit_profile(name, trace, loaded, first, out))
    print(f"written to {out}: use it with --cost-model table --set cost.profile={out}")


@app.command()
def show(
    name: Source,
    out: str | None = Option(None, metavar="FILE", help="Also a page with its curves, HTML."),
) -> None:
    """What was measured, where, how well it fits, and the ranges that it covers."""
    from kvsim.cost.calibrate.compare import parts
    from kvsim.cost.profile import load_profile
    from kvsim.report.pages.cost import build_profile, error_rows, other_statements

    profile = load_profile(name)
    made, console = profile.model, make_console()
    facts = [
        ("source", f"{profile.source}, {profile.created}"),
        ("device", _words(profile.device)),
        ("software", _words(profile.software)),
        (
            "model",
            f"{made.name}, {made.layers} layers, {made.dtype}, KV {made.kv_dtype}, tp {made.tp}",
        ),
        ("engine", f"block_size {profile.engine.block_size}"),
        *((f"term: {name}", text) for name, text in profile.terms.items()),
        *((f"error: {k}", _words(v)) for k, v in other_statements(profile.error).items()),
        *((f"ceiling: {k}", _words(v)) for k, v in profile.ceilings.items() if k != "achieved"),
    ]
    console.print(make_table("", "", rows=facts, texts=2, box=None, show_header=False))
    head = ("error, rows held out", "rows", "median %", "p95 %", "max %", "bias %")
    errors = (
        [label, f"{number:,}", *("-" if value is None else f"{value:.1f}" for value in values)]
        for label, number, values in error_rows(profile.error)
    )
    console.print(make_table(*head, rows=errors))
    table = make_table("table", "axes", "points", "least us", "greatest us", texts=2)
    for part in parts(profile):
        axes = ", ".join(f"{axis} {a:g}..{b:g} ({n})" for axis, (a, b, n) in part.axes.items())
        table.add_row(part.name, axes, f"{part.points:,}", *(f"{us:,.1f}" for us in part.us))
    console.print(table)
    if out is not None:
        from kvsim.writing import write_text

        write_text(out, build_profile(profile))
        print(f"written to {out}")


@app.command()
def diff(one: Source, other: Source) -> None:
    """Where two profiles differ: settings, and times of the second over the first."""
    from kvsim.cost.calibrate.compare import ratios, settings_that_differ
    from kvsim.cost.profile import load_profile

    first, second, console = load_profile(one), load_profile(other), make_console()
    settings = make_table("key", one, other, rows=settings_that_differ(first, second))
    if settings.row_count:
        console.print(settings)
    rows = (
        [each.name, f"{each.points:,}", *(f"{x:.3f}" if each.points else "-" for x in each[2:])]
        for each in ratios(first, second)
    )
    head = ("table", "points in both", "median", "least", "greatest")
    console.print(make_table(*head, rows=rows))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(each)}" for key, each in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def fit_profile(name: str, trace: Trace, config: RunConfig, first: int, out: str) -> dict[str, Any]:
    """Fits the profile of that name and writes it to `out`. Returns its constants and errors."""
    from kvsim.against.fit import fit_run
    from kvsim.cost.profile import load_profile, to_json
    from kvsim.writing import write_text

    with progress_bar("fitting") as done:
        profile = fit_run(load_profile(name), trace, config, first, done)
    write_text(out, to_json(profile))
    return profile.fitted


def show_fit(found: Mapping[str, Any]) -> None:
    """Prints what `fit_profile` returns."""
    spread, before = found["standard_errors"], found["error_percent_before"]
    taken = [[k, f"{x:g}", f"{spread[k]:g}", ""] for k, x in found["constants"].items()]
    if late_s := found["start_s"]:
        taken.append(["start of this run, s", f"{late_s:g}", "-", "the profile does not keep it"])
    refused = [[key, "-", "-", reason] for key, reason in found["refused"].items()]
    errors = [[k, f"{before[k]:+.2f}", f"{x:+.2f}"] for k, x in found["error_percent"].items()]
    head, console = ("constant", "value", "standard error", "refused"), make_console()
    console.print(make_table(*head, rows=taken + refused))
    console.print(make_table("error on the other requests, %", "before", "after", rows=errors))


def with_fitted(
    trace: Trace, config: RunConfig, first: int, out: str
) -> tuple[RunConfig, dict[str, Any]]:
    """(`config` with a profile fitted to `trace` and written to `out`, what `fit_profile` returns).

    The profile is the run's own, or the shipped one that would price it.
    """
    from kvsim.against.fit import priced_by
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
    fitted = fit_profile(name, trace, config, first, out)
    return priced_by(out, config), fitted


Count = Annotated[int | None, Option(min=1, metavar="N")]


class Measured(Bundle):
    """What `kvsim_kernels.calibrate` is to time; its arguments have these names."""

    device: str = Option("cuda", metavar="cuda|cpu", help="The device to time.")
    block_size: list[int] | None = Option(
        None, min=1, metavar="TOKENS", help="Tokens per block; repeat it for several."
    )
    dtype: str = Option("auto", metavar="TYPE", help="auto, float32, float16 or bfloat16.")
    kv_cache_dtype: str = Option("auto", metavar="TYPE", help="auto or fp8.")
    kv_layout: str = Option("cross", metavar="layer|cross", help="Layout of blocks in the pool.")
    decode_kernel: str = Option("v2", metavar="v1|v2", help="The kernel that whole steps use.")
    all_reduce_gpus: int | None = Option(
        None, min=1, metavar="N", help="GPUs between which all-reduces are timed."
    )
    max_num_seqs: Count = None
    max_num_batched_tokens: Count = None
    max_model_len: Count = None
    limit_s: float | None = Option(
        None, min=1, metavar="S", help="Stop measuring then; the same command continues."
    )

    def words(self) -> list[str]:
        """These options, as they are given on a command line."""
        given = {key: value for key, value in asdict(self).items() if value}
        listed = (
            (f"--{key.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value]))
            for key, value in given.items()
        )
        return [word for words in listed for word in words]


@takes_bundles
def calibrate(
    *,
    out: ProfileOut,
    model: str = Option(
        "llama-3-8b", metavar="NAME", help="A name in configs/models, or a TOML file."
    ),
    measured: Measured,
) -> None:
    """Time the kernels here and write a profile with its own held-out error.

    Rows are kept beside the profile, so the same command continues after an interruption. Exit code
    1: the profile does not pass its own checks, or --limit-s came first.
    """
    from kvsim.cost.profile import refuse_special
    from kvsim.machine.models import load_model
    from kvsim.settings.library import find

    path = find("models", model)
    if path.suffix != ".toml":
        raise ConfigError(f"{model}: calibrate takes a TOML as in configs/models, not a JSON file")
    refuse_special(load_model(str(path)), ("experts",))
    run_module(KERNELS, ["--model", str(path), *measured.words(), "--out", out])


class Priced(Bundle):
    """What is compared, and what prices it."""

    model: list[str] | None = Option(
        None, metavar="NAME", help=f"May be repeated; default: {DEFAULT_MODEL}."
    )
    hardware: str = Option(DEFAULT_HARDWARE, metavar="NAME", help="GPU and its link.")
    tokens: list[int] | None = Option(
        None, min=1, metavar="N", help="Length to list; may be repeated."
    )
    layout: str | None = Option(
        None,
        metavar="layer|cross",
        help="How a block is copied: layer by layer, keys and values apart (2 x layers"
        " copies), or all layers in one; default: both.",
    )
    bandwidth_gb_s: float | None = Option(
        None, metavar="X", help="Link, one direction; default: hardware's."
    )
    copy_overhead_us: float | None = Option(
        None, metavar="X", help="Least time of a copy; default: hardware's."
    )
    block_size: int = Option(16, min=1, metavar="N", help="Tokens per block.")
    tensor_parallel_size: int = Option(1, min=1, metavar="N", help="GPUs that share each layer.")
    cost_model: str | None = Option(
        None,
        metavar="NAME",
        help="table, roofline or constant; default: a shipped profile, else the roofline.",
    )
    profile: str | None = Option(None, metavar="PROFILE", help="Profile that prices recompute.")

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
    out: str | None = Option(None, metavar="FILE", help="Also a page, HTML."),
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
        from kvsim.report.pages.cost import build_crossover

        drawn = priced.crossings(sorted({*_curve(lengths[-1]), *lengths}))
        write_text(out, build_crossover(drawn, priced.hardware, lengths))
        if not as_json:
            print(f"written to {out}")


def _given(**settings: Any) -> dict[str, Any]:
    """The settings that have a value."""
    return {key: value for key, value in settings.items() if value is not None}


def _curve(longest: int) -> Iterable[int]:
    """Lengths from `SHORTEST` on, evenly spaced over the logarithm."""
    lengths = (round(SHORTEST * 2 ** (i / STEPS_PER_DOUBLING)) for i in count())
    return takewhile(lambda length: length <= longest, lengths)


def _print(models: list[ModelCrossings]) -> None:
    from kvsim.report.pages.cost import UNITS, caption, crossing_head, crossing_rows, priced

    console = make_console()
    for each in models:
        head, rows = crossing_head(each), crossing_rows(each)
        console.print(make_table(*head, rows=rows, title=caption(each), texts=0))
        console.print(f"{priced(each)}\n", style="dim")
    link = next(iter(models[0].link.values()))
    console.print(
        f"{UNITS} Link: {link['bandwidth_gb_s']:g} GB/s, at least {link['copy_overhead_us']:g} µs a"
        " copy.",
        style="dim",
    )
