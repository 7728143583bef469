"""`compare`: several configurations on the same requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from kvsim.cli.bundles import takes_bundles
from kvsim.cli.console import command_line, make_console, tell_written
from kvsim.cli.contenders import Way, of_engines, of_fleets
from kvsim.cli.fleet import Fleet, FleetOptions
from kvsim.cli.options import Jobs, OutDir, TraceForm, TracePath, note_arrivals
from kvsim.cli.progress import progress_bar
from kvsim.cli.server import ServerOptions, SettingOptions
from kvsim.config import RunConfig
from kvsim.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from kvsim.certainty.comparison import Comparison
    from kvsim.replicates import Load
    from kvsim.server import ServerWord

PAGE = "comparison.html"
Configs = list[tuple[str, RunConfig]]
Results = list[tuple[str, Any]]

Seeds = Annotated[
    int | None,
    Option(
        min=2,
        metavar="N",
        help="Up to N seeds, the same for all; stops when every verdict is settled.",
    ),
]
Confidence = Annotated[
    float, Option(min=0.5, max=0.9999, help="Confidence of all verdicts together, with --seeds.")
]
Margin = Annotated[
    float, Option(min=0, help="Share of a value below which differences do not matter.")
]
CostUncertainty = Annotated[
    bool,
    Option(
        "--cost-uncertainty",
        help="Draw kernel times for each seed, within the errors of the profile.",
    ),
]


@takes_bundles
def compare(
    *,
    configs: Annotated[
        list[str] | None, Argument(metavar="CONFIG...", help="TOML files or names in configs/runs.")
    ] = None,
    trace: TracePath = None,
    form: TraceForm,
    out: OutDir = None,
    seeds: Seeds = None,
    confidence: Confidence = 0.95,
    margin: Margin = 0.01,
    cost_uncertainty: CostUncertainty = False,
    jobs: Jobs = None,
    as_json: Annotated[
        bool, Option("--json", help="With --seeds: print figures and verdicts as JSON.")
    ] = False,
    fleet: FleetOptions,
    server: ServerOptions,
    settings: SettingOptions,
) -> None:
    """Run each configuration on the same requests and show what differs.

    Flags apply to every configuration. With --replicas N --router A,B,C, routers are compared. With
    --seeds, requests, arrivals and random policies are drawn anew for each seed, and every
    difference has an interval and a verdict.
    """
    loaded, way = _contenders(configs or [], fleet, settings, server.word())
    if seeds is None and (cost_uncertainty or as_json):
        flag = "--cost-uncertainty" if cost_uncertainty else "--json"
        raise ConfigError(f"{flag}: needs --seeds N")
    if cost_uncertainty:
        from kvsim.cost.uncertain import uncertain

        loaded = [(name, uncertain(config)) for name, config in loaded]
    from kvsim.replicates import load_of

    load = load_of(None if trace is None else form.open(trace), loaded)
    note_arrivals(load.of(loaded[0][1].seed), (config for _, config in loaded))
    if seeds is None:
        _compare_once(load, loaded, way, out)
        return
    comparison, results = _compare_seeds(load, loaded, way, seeds, 1 - confidence, margin, jobs)
    _show(comparison, results, way, out, as_json=as_json)


def _contenders(
    configs: list[str], fleet: FleetOptions, settings: SettingOptions, word: ServerWord
) -> tuple[Configs, Way]:
    """What is compared, by name, and how. Raises `ConfigError` where there is but one."""
    paths = list[str | None](configs) or [None]
    names = [_run_name(configs, place) for place in range(len(configs))] or [""]
    loaded = [
        (name, *fleet.load(path, settings, word)) for name, path in zip(names, paths, strict=True)
    ]
    several = any(fleets for _, fleets, _ in loaded)
    if sum(len(fleets) or 1 for _, fleets, _ in loaded) < 2:
        raise ConfigError(
            "compare: give two configurations or more, or several routers, as in --replicas 4"
            " --router round-robin,least-loaded"
        )
    if not several:
        return [(name, configs[0]) for name, _, configs in loaded], of_engines()
    from kvsim.fleet.contender import contender

    found: Configs = [
        (
            " ".join(filter(None, (name, each.router))) if fleets[1:] or not name else name,
            contender(configs, each.router, each.args),
        )
        for name, fleets, configs in loaded
        for each in fleets or [Fleet("round-robin", {})]
    ]
    return found, of_fleets()


def _compare_once(load: Load, configs: Configs, way: Way, out: str | None) -> None:
    from kvsim.report.terminal import render_comparison

    opened = load.of(configs[0][1].seed)
    results = [(name, way.once(opened, config, name)) for name, config in configs]
    console = make_console()
    render_comparison([(name, result.summary) for name, result in results], console)
    _render_why(results, way, "Why", console)
    if out is not None:
        _write(results, way, out)
        tell_written(out, PAGE)


def _compare_seeds(
    load: Load,
    configs: Configs,
    way: Way,
    seeds: int,
    level: float,
    margin: float,
    jobs: int | None,
) -> tuple[Comparison, Results]:
    """Replicates if something is random; otherwise one replay, whose requests are resampled."""
    from kvsim.replicates import compare_seeds, redrawn, replicate
    from kvsim.report.replayed import compare_replay

    names = [name for name, _ in configs]
    random = bool(redrawn(load, configs))
    command = command_line()
    total = len(configs) * (seeds if random else 1)
    with progress_bar(total, "comparing", quiet_below=2) as progress:
        if random:
            comparison, results = compare_seeds(
                load,
                configs,
                seeds,
                level=level,
                margin=margin,
                simulate=way.simulate,
                jobs=jobs,
                progress=progress,
                command=command,
            )
            return comparison, list(zip(names, results, strict=True))
        runs = [config for _, config in configs]
        [results] = replicate(
            load,
            runs,
            [runs[0].seed],
            _whole,
            simulate=way.simulate,
            jobs=jobs,
            progress=progress,
            command=command,
        )
    named = list(zip(names, results, strict=True))
    tables = [(name, result.summary, result.requests) for name, result in named]
    return compare_replay(tables, level=level, margin=margin), named


def _show(
    comparison: Comparison, results: Results, way: Way, out: str | None, *, as_json: bool
) -> None:
    from kvsim.report.certainty import comparison_record
    from kvsim.report.terminal import render_comparison
    from kvsim.writing import json_text

    record = json_text(comparison_record(comparison))
    if as_json:
        print(record, end="")
    else:
        summaries = [(name, result.summary) for name, result in results]
        render_comparison(summaries, make_console(), comparison)
        seed = results[0][1].summary["meta"]["seed"]
        _render_why(results, way, f"Why, on seed {seed}", make_console())
    if out is not None:
        _write(results, way, out, comparison, {"comparison.json": record})
        if not as_json:
            tell_written(out, PAGE)


def _render_why(results: Results, way: Way, title: str, console: Console) -> None:
    from rich.text import Text

    first, *others = results
    for i, other in enumerate(others):
        subject = f"{title}: {other[0]} against {first[0]}" if others[1:] else title
        console.print(Text(f"\n{subject}" if i else subject, style="bold"))
        for sentence in way.explain(first, other).headline:
            console.print(Text(f"  {sentence}"))


def _write(
    results: Results,
    way: Way,
    out: str,
    comparison: Comparison | None = None,
    others: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the results of every run, then the page with the `others`, texts by file name."""
    from kvsim.writing import write_together

    page = way.page(results, comparison)
    for name, result in results:
        way.write(result, Path(out) / name)
    write_together(out, {**others, PAGE: page})


def _whole(result: Any) -> Any:
    return result


def _run_name(configs: list[str], place: int) -> str:
    """A configuration's file name without suffix, with a number if two are equal."""
    names = [Path(config).name.removesuffix(".toml") for config in configs]
    same = names[:place].count(names[place])
    return names[place] if not same else f"{names[place]}-{same + 1}"
