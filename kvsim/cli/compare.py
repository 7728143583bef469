"""`compare`: several configurations on the same requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from kvsim.cli.commands import command_line, progress_bar, simulate_shown, tell_written
from kvsim.cli.folders import Kind, Named, of_engines, of_fleets
from kvsim.cli.options import (
    AsJson,
    Bundle,
    Jobs,
    OutDir,
    TraceForm,
    TracePath,
    note_arrivals,
    takes_bundles,
)
from kvsim.cli.settings import Fleet, FleetOptions
from kvsim.errors import ConfigError
from kvsim.explain import MARGIN
from kvsim.report import make_console
from kvsim.settings.config import RunConfig

if TYPE_CHECKING:
    from rich.console import Console

    from kvsim.explain.certainty import Comparison
    from kvsim.search.compare import Load, Upgrade
    from kvsim.workload.trace import Trace

PAGE = "comparison.html"
Configs = list[tuple[str, RunConfig]]
Results = list[Named]


@dataclass(frozen=True)
class Certainty(Bundle):
    """How sure differences have to be; without seeds, each configuration is run once."""

    seeds: Annotated[
        int | None,
        Option(
            min=2,
            metavar="N",
            help="Up to N seeds, the same for all; stops when every verdict is settled.",
        ),
    ] = None
    confidence: Annotated[
        float,
        Option(min=0.5, max=0.9999, help="Confidence of all verdicts together, with --seeds."),
    ] = 0.95
    margin: Annotated[
        float,
        Option(min=0, help="Share of a value below which differences are none, with --seeds."),
    ] = MARGIN
    cost_uncertainty: Annotated[
        bool,
        Option(
            "--cost-uncertainty",
            help="Draw kernel times for each seed, within the errors of the profile.",
        ),
    ] = False
    jobs: Jobs = None

    def check(self) -> None:
        """Raises `ConfigError` if an option needs seeds, and there are none."""
        of_seeds = {
            "--cost-uncertainty": self.cost_uncertainty,
            "--margin": self.margin != MARGIN,
        }
        if self.seeds is None and any(of_seeds.values()):
            flag = next(flag for flag, given in of_seeds.items() if given)
            raise ConfigError(f"{flag}: needs --seeds N")


@takes_bundles
def compare(
    *,
    configs: Annotated[
        list[str] | None,
        Argument(metavar="CONFIG...", help="TOML files or names in configs/runs; or the trace."),
    ] = None,
    trace: TracePath = None,
    form: TraceForm,
    out: OutDir = None,
    certainty: Certainty,
    as_json: AsJson = False,
    fleet: FleetOptions,
) -> None:
    """Run each configuration on the same requests and show what differs.

    Flags apply to every configuration. With --replicas N --router A,B,C, routers are compared, with
    --vllm-version A,B,C releases of vLLM V1, and which change of theirs makes a difference. With
    --seeds, requests, arrivals and random policies are drawn anew for each seed, and every
    difference has an interval and a verdict.
    """
    if trace is None:
        configs, trace = _trace_among(configs or [])
    loaded, kind = _contenders(configs or [], fleet)
    certainty.check()
    if certainty.cost_uncertainty:
        from kvsim.cost.table import uncertain

        loaded = [(name, uncertain(config)) for name, config in loaded]
    from kvsim.search.compare import load_of, upgrades

    found = upgrades(loaded)
    load = load_of(None if trace is None else form.open(trace), loaded)
    opened, comparison = load.of(loaded[0][1].seed), None
    note_arrivals(opened, (config for _, config in loaded))
    if certainty.seeds is None:
        results = [
            (name, simulate_shown(kind.simulate, opened, config, name)) for name, config in loaded
        ]
    else:
        comparison, results = _compare_seeds(load, loaded, kind, certainty, certainty.seeds)
    _show(results, kind, out, comparison, as_json=as_json)
    for upgrade in () if as_json else found:
        _show_upgrade(upgrade, dict(results), opened, certainty.jobs)


def _trace_among(given: list[str]) -> tuple[list[str], str | None]:
    """Configurations, and what among them is a shipped trace or a file that is no TOML."""
    from kvsim.settings.library import names

    traces, runs = names("traces"), names("runs")
    found = [
        each
        for each in given
        if each in traces or (Path(each).is_file() and Path(each).suffix != ".toml")
    ]
    if len(found) != 1 or found[0] in runs:
        return given, None
    return [each for each in given if each != found[0]], found[0]


def _contenders(configs: list[str], fleet: FleetOptions) -> tuple[Configs, Kind]:
    """What is compared, by name, and how. Raises `ConfigError` where there is but one."""
    from kvsim.search.compare import of_releases

    paths = list[str | None](configs) or [None]
    stems = [Path(config).name.removesuffix(".toml") for config in configs]
    same = [stems[:place].count(stem) for place, stem in enumerate(stems)]
    names = [f"{s}-{n + 1}" if n else s for s, n in zip(stems, same, strict=True)] or [""]
    loaded = [(name, *fleet.load(path)) for name, path in zip(names, paths, strict=True)]
    several = any(fleets for _, fleets, _ in loaded)
    alone = (
        []
        if several
        else [each for name, _, configs in loaded for each in of_releases(name, configs[0])]
    )
    if max(len(alone), sum(len(fleets) or 1 for _, fleets, _ in loaded)) < 2:
        raise ConfigError(
            "compare: give two configurations or more, several releases, as in --vllm-version"
            " 0.11,0.18,0.33, or several routers, as in --replicas 4 --router"
            " round-robin,least-loaded"
        )
    if not several:
        return alone, of_engines()
    from kvsim.fleet import contender

    found: Configs = [
        (
            " ".join(filter(None, (name, each.router))) if fleets[1:] or not name else name,
            contender(configs, each.router, each.args),
        )
        for name, fleets, configs in loaded
        for each in fleets or [Fleet("round-robin", {})]
    ]
    return found, of_fleets()


def _compare_seeds(
    load: Load, configs: Configs, kind: Kind, certainty: Certainty, seeds: int
) -> tuple[Comparison, Results]:
    """Replicates if something is random; otherwise one replay, whose requests are resampled."""
    from kvsim.explain.differences import compare_replay
    from kvsim.search.compare import How, compare_seeds, redrawn, replicate

    names = [name for name, _ in configs]
    random = bool(redrawn(load, configs))
    sure: dict[str, Any] = {"level": 1 - certainty.confidence, "margin": certainty.margin}
    total = len(configs) * (seeds if random else 1)
    with progress_bar("comparing", total) as progress:
        how = How(kind.simulate, certainty.jobs, progress, command_line())
        if random:
            comparison, results = compare_seeds(load, configs, seeds, how=how, **sure)
            return comparison, list(zip(names, results, strict=True))
        runs = [config for _, config in configs]
        [results] = replicate(load, runs, [runs[0].seed], _whole, how)
    named = list(zip(names, results, strict=True))
    tables = [(name, result.summary, result.requests) for name, result in named]
    return compare_replay(tables, **sure), named


def _show(
    results: Results, kind: Kind, out: str | None, comparison: Comparison | None, *, as_json: bool
) -> None:
    """Print figures and reasons; write the results of every run, then the page."""
    from kvsim.report import render_comparison
    from kvsim.report.compare import comparison_record, session_words, table_record
    from kvsim.writing import json_text, write_together

    summaries = [(name, each.summary) for name, each in results]
    record = json_text(comparison_record(comparison) if comparison else table_record(summaries))
    if as_json:
        print(record, end="")
    else:
        console, first = make_console(), results[0][1].summary
        render_comparison(summaries, console, comparison)
        title = f"Why, on seed {first['meta']['seed']}" if comparison else "Why"
        _render_why(results, kind, title, console)
        for place, sentence in enumerate(session_words(summaries, comparison)):
            console.print(f"{'' if place else chr(10)}{sentence}")
    if out is not None:
        page = kind.comparison_page(results, comparison)
        for name, result in results:
            kind.write(result, Path(out) / name)
        write_together(out, {"comparison.json": record, PAGE: page})
        tell_written(out, PAGE)


def _show_upgrade(
    upgrade: Upgrade, results: dict[str, Any], trace: Trace, jobs: int | None
) -> None:
    """Say what each change does, from runs in which it is undone."""
    from kvsim.search.compare import How, Load, effect_words, replicate, simulate_undone

    before, after = upgrade.names
    runs = [change.undone for change in upgrade.changes]
    seed = results[after].summary["meta"]["seed"]
    with progress_bar(f"undoing changes of {after}", len(runs)) as progress:
        how = How(simulate_undone, jobs, progress)
        [without] = [*replicate(Load(trace), runs, [seed], _summary, how)] or [[]]
    console = make_console()
    console.print(f"\nWhat {after} changes against {before}, one change at a time", style="bold")
    for sentence in effect_words(upgrade.changes, without, results[after].summary):
        console.print(f"  {sentence}")


def _summary(result: Any) -> Any:
    return result.summary


def _render_why(results: Results, kind: Kind, title: str, console: Console) -> None:
    first, *others = results
    for i, other in enumerate(others):
        subject = f"{title}: {other[0]} against {first[0]}" if others[1:] else title
        console.print(f"\n{subject}" if i else subject, style="bold")
        for sentence in kind.explain(first, other).headline:
            console.print(f"  {sentence}")


def _whole(result: Any) -> Any:
    return result
