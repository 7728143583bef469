"""`profile`: make a hardware profile from published kernel times, look at it, compare two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from kvsim.cli.console import run_module
from kvsim.cli.deferred import group_of
from kvsim.cli.fitting import FIRST, fit_profile, show_fit
from kvsim.cli.options import ConfigFile, MeasuredFile, ProfileOut, TraceForm, takes_bundles
from kvsim.cli.server import ServerOptions, SettingOptions
from kvsim.errors import ConfigError
from kvsim.report.screen import make_console, make_table

Measured = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="GPU that was measured; LLMServingSim's tables name it, but not its links.",
    ),
]
Surface = Annotated[
    bool,
    Option(
        help="LLMServingSim: fit surfaces, so that the profile holds none of the rows;"
        " AIConfigurator's tables always become surfaces."
    ),
]

app = group_of("profile")

Source = Annotated[str, Argument(metavar="PROFILE", help="A file, or a shipped name.")]


@app.command("import")
def import_(
    folder: Annotated[
        str,
        Argument(
            metavar="DIR",
            help="LLMServingSim: meta.yaml, tp1/attention.csv, ...;"
            " AIConfigurator: decode.csv, prefill.csv, gemm.csv, moe_perf.parquet, ...",
        ),
    ],
    out: ProfileOut,
    model: Annotated[
        str | None,
        Option(metavar="NAME", help="Model to price; LLMServingSim's tables name theirs."),
    ] = None,
    hardware: Measured = None,
    tensor_parallel_size: Annotated[
        int, Option(min=1, metavar="N", help="GPUs that share each layer.")
    ] = 1,
    created: Annotated[
        str, Option(metavar="DATE", help="When AIConfigurator's tables were made.")
    ] = "",
    note: Annotated[
        str, Option(metavar="TEXT", help="With what AIConfigurator's tables were made.")
    ] = "",
    surface: Surface = False,
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
    rows: Annotated[
        list[str], Argument(metavar="ROWS...", help="PROFILE.16.rows.jsonl of a calibration.")
    ],
    out: ProfileOut,
) -> None:
    """Fit the rows of `kvsim calibrate` again; equal rows make an equal file."""
    from kvsim.cli.calibrate import KERNELS

    run_module(KERNELS, ["--fit", *rows, "--out", out])


@app.command("fit-run")
@takes_bundles
def fit_run(
    *,
    name: Source,
    run: Annotated[str, Option(metavar="RESULT", help="Of vllm bench serve --save-detailed.")],
    out: ProfileOut,
    first: Annotated[
        int, Option(min=1, metavar="N", help="Requests to fit; the others judge.")
    ] = FIRST,
    measured: MeasuredFile = None,
    config: ConfigFile = None,
    form: TraceForm,
    server: ServerOptions,
    settings: SettingOptions,
) -> None:
    """Fit constants of the machine to the first part of a real run; the rest judges them."""
    from kvsim.workload.formats.table import join_measured

    loaded = settings.load(config, server.word())
    trace = form.open(run)
    if measured is not None:
        trace = join_measured(trace, measured)
    show_fit(fit_profile(name, trace, loaded, first, out))
    print(f"written to {out}: use it with --cost-model table --set cost.profile={out}")


@app.command()
def show(
    name: Source,
    out: Annotated[
        str | None, Option(metavar="FILE", help="Also a page with its curves, HTML.")
    ] = None,
) -> None:
    """What was measured, where, how well it fits, and the ranges that it covers."""
    from kvsim.cost.calibrate.compare import parts
    from kvsim.cost.profile import load_profile
    from kvsim.report.pages.profile import build_profile, error_rows, other_statements

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
