"""Many runs: `compare`, `sweep`, `size` and `advise` say what differs, which settings are best, how
much is enough, and what to change."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from kvsim.cli.commands import command_line, note, progress_bar, simulate_shown, tell_written
from kvsim.cli.folders import Kind, of_engines, of_fleets
from kvsim.cli.options import (
    AsJson,
    Bundle,
    ConfigFile,
    Jobs,
    Objectives,
    OutDir,
    TraceForm,
    TracePath,
    Workers,
    note_arrivals,
    takes_bundles,
)
from kvsim.cli.settings import FleetOptions, Settings
from kvsim.errors import ConfigError
from kvsim.explain import MARGIN
from kvsim.report import make_console, make_table, print_remarks
from kvsim.settings.config import RunConfig, to_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvsim.explain.certainty import Comparison
    from kvsim.search.advise import Advice
    from kvsim.search.compare import Change, Load
    from kvsim.search.size import Answer, Laboratory, Search
    from kvsim.search.sweep import Chosen, Plan
    from kvsim.workload.trace import Trace


COMPARISON = "comparison.html"
Configs = list[tuple[str, RunConfig]]
Results = list[tuple[str, Any]]


class Certainty(Bundle):
    """How sure differences have to be; without seeds, each configuration is run once."""

    seeds: int | None = Option(
        None,
        min=2,
        metavar="N",
        help="Up to N seeds, the same for all; stops when every verdict is settled.",
    )
    confidence: float = Option(
        0.95, min=0.5, max=0.9999, help="Confidence of all verdicts together, with --seeds."
    )
    margin: float = Option(
        MARGIN, min=0, help="Share of a value below which differences are none, with --seeds."
    )
    cost_uncertainty: bool = Option(
        False,
        "--cost-uncertainty",
        help="Draw kernel times for each seed, within the errors of the profile.",
    )
    jobs: Jobs = None

    def check(self) -> None:
        """Raises `ConfigError` if an option needs seeds, and there are none, or is no number."""
        if not isfinite(self.margin):
            raise ConfigError(f"--margin {self.margin:g}: give a finite number")
        of_seeds = {
            "--cost-uncertainty": self.cost_uncertainty,
            "--margin": self.margin != MARGIN,
        }
        for flag, given in of_seeds.items():
            if given and self.seeds is None:
                raise ConfigError(f"{flag}: needs --seeds N")


@takes_bundles
def compare(
    *,
    configs: list[str] | None = Argument(
        None, metavar="CONFIG...", help="TOML files or names in configs/runs; or the trace."
    ),
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
    _show_comparison(results, kind, out, comparison, as_json=as_json)
    for names, changes in () if as_json else found:
        _show_upgrade(names, changes, dict(results), opened, certainty.jobs)


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


def _contenders(paths: list[str], fleet: FleetOptions) -> tuple[Configs, Kind]:
    """What is compared, by name, and how. Raises `ConfigError` where there is but one."""
    from kvsim.search.compare import of_releases

    loaded = [(name, *fleet.load(path)) for name, path in _named(paths)]
    if any(routers for _, routers, _ in loaded):
        found, kind = [each for one in loaded for each in _of_routers(*one)], of_fleets()
    else:
        found = [each for name, _, [config] in loaded for each in of_releases(name, config)]
        kind = of_engines()
    if len(found) < 2:
        raise ConfigError(
            "compare: give two configurations or more, several releases, as in --vllm-version"
            " 0.11,0.18,0.33, or several routers, as in --replicas 4 --router"
            " round-robin,least-loaded"
        )
    return found, kind


def _named(paths: list[str]) -> list[tuple[str, str | None]]:
    """Configurations by the names of their files, numbered where several have one; without any, the
    default settings."""
    stems = [Path(path).name.removesuffix(".toml") for path in paths]
    same = [stems[:place].count(stem) for place, stem in enumerate(stems)]
    names = (f"{stem}-{n + 1}" if n else stem for stem, n in zip(stems, same, strict=True))
    return list(zip(names, paths, strict=True)) or [("", None)]


def _of_routers(
    name: str, routers: list[tuple[str, dict[str, Any]]], replicas: list[RunConfig]
) -> Configs:
    """Replicas behind each of their routers, by name; a lone engine behind one that it needs."""
    from kvsim.fleet import contender

    return [
        (
            f"{name} {router}".strip() if routers[1:] or not name else name,
            contender(replicas, router, args),
        )
        for router, args in routers or [("round-robin", {})]
    ]


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


def _show_comparison(
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
        page = kind.pages.build_comparison(results, comparison)
        for name, result in results:
            kind.write(result, Path(out) / name)
        write_together(out, {"comparison.json": record, COMPARISON: page})
        tell_written(out, COMPARISON)


def _show_upgrade(
    names: tuple[str, str],
    changes: list[Change],
    results: dict[str, Any],
    trace: Trace,
    jobs: int | None,
) -> None:
    """Say what each change does, from runs in which it is undone."""
    from kvsim.search.compare import How, Load, effect_words, replicate, simulate_undone

    before, after = names
    runs = [change.undone for change in changes]
    seed = results[after].summary["meta"]["seed"]
    with progress_bar(f"undoing changes of {after}", len(runs)) as progress:
        how = How(simulate_undone, jobs, progress)
        # Without a change there is no run, and no list of the one seed.
        [without] = [*replicate(Load(trace), runs, [seed], attrgetter("summary"), how)] or [[]]
    console = make_console()
    console.print(f"\nWhat {after} changes against {before}, one change at a time", style="bold")
    for sentence in effect_words(changes, without, results[after].summary):
        console.print(f"  {sentence}")


def _render_why(results: Results, kind: Kind, title: str, console: Console) -> None:
    first, *others = results
    for i, other in enumerate(others):
        subject = f"{title}: {other[0]} against {first[0]}" if others[1:] else title
        console.print(f"\n{subject}" if i else subject, style="bold")
        for sentence in kind.explain(first, other).headline:
            console.print(f"  {sentence}")


def _whole(result: Any) -> Any:
    """The result itself, by a function that other processes find by its name."""
    return result


MOST_LISTED, MOST_FIGURES = 5, 3
"""Most configurations and figures on the terminal."""


class Swept(Bundle, kw_only=True):
    """What is swept, and where the results are."""

    out: str = Option(metavar="DIR", help="Results, table and page.")
    folders: list[str] | None = Argument(
        None, metavar="[TRACE|DIR...]", help="As --trace; with --merge, sweeps to join."
    )
    trace: TracePath = None
    config: ConfigFile = None

    @property
    def one_trace(self) -> str | None:
        """The trace. Raises `ConfigError` if there are several."""
        if self.folders and (self.trace is not None or self.folders[1:]):
            raise ConfigError(f"{self.folders[-1]}: one trace, please; folders are for --merge")
        return self.folders[0] if self.folders else self.trace


class Points(Bundle):
    """Which settings are tried, and what judges them."""

    grid: list[str] | None = Option(
        None, metavar="KEY=VALUES", help="1,2,3 or lin(0,1,5) or log(1,64,7); any number."
    )
    rows: list[str] | None = Option(
        None, "--list", metavar="KEY=VALUES|FILE", help="Values taken row by row."
    )
    random: list[str] | None = Option(
        None, metavar="KEY=LAW", help="uniform(A,B), loguniform(A,B) or choice(X,Y)."
    )
    samples: int | None = Option(
        None, min=1, metavar="N", help="Number of points to draw; default: 32."
    )
    sample_seed: int = Option(0, min=0, metavar="N", help="Seed of the drawn points.")
    seeds: int | None = Option(None, min=1, metavar="N", help="Run every point on N seeds.")
    slo: str | None = Option(
        None, metavar="BOUNDS", help="Objectives, as in p99_ttft<2s,p99_tpot<60ms."
    )


class Parts(Bundle):
    """Which part of a sweep is run, and what is noted."""

    ledger: bool = Option(False, "--ledger", help="Also say where time and prompt tokens went.")
    shard: str | None = Option(None, metavar="K/N", help="Run only this part; --merge joins them.")
    merge: bool = Option(False, "--merge", help="Join the runs of DIR...")


@takes_bundles
def sweep(
    *,
    swept: Swept,
    points: Points,
    workers: Workers,
    parts: Parts,
    as_json: AsJson = False,
    form: TraceForm,
    fleet: FleetOptions,
) -> None:
    """Run every combination of settings once, and show which are best.

    A sweep may be stopped at any moment; the same command continues it.
    """
    from kvsim.search.grid import expand, parse_space
    from kvsim.search.runner import run_missing
    from kvsim.search.slo import parse_slo
    from kvsim.search.store import Store
    from kvsim.search.sweep import TABLE, make_plan, read_plan, shard_of, write_plan
    from kvsim.search.sweep_page import PAGE

    out, tried = swept.out, (points.grid or (), points.rows or (), points.random or ())
    if parts.merge:
        from kvsim.search.sweep import merge

        if not swept.folders:
            raise ConfigError("--merge: no folders; give kvsim sweep --merge DIR... --out DIR")
        if any((swept.trace, *tried, points.slo)):
            raise ConfigError(
                "--merge: joins finished runs; leave out --trace, --grid, --list, --random and"
                " --slo"
            )
        _finish(out, merge(swept.folders, out), as_json)
        return
    trace, ledger, shard = swept.one_trace, parts.ledger, parts.shard
    space = parse_space(
        *tried, samples=points.samples, sample_seed=points.sample_seed, seeds=points.seeds
    )
    if points.slo is not None:
        parse_slo(points.slo)
    loaded = fleet.settings.load(swept.config)
    table = to_table(loaded) | fleet.table()
    found = expand(space, table)
    mine = shard_of(len(found), shard)
    backend = workers.chosen()
    opened = form.requests(trace, loaded)
    write_plan(out, make_plan(opened, table, found, points.slo, ledger=ledger), TABLE, PAGE)
    plan = read_plan(out)
    note_arrivals(opened, (found[i].config for i in mine))
    configs = {plan.points[i].key: found[i].config for i in mine}
    how: dict[str, Any] = {"ledger": ledger, "backend": backend, "jobs": workers.jobs}
    with progress_bar("sweeping", len(configs)) as done:
        made = run_missing(Store(out), opened, configs, **how, done=done)
    note(f"{made} runs made, {len(configs) - made} already there")
    if shard is None:
        _finish(out, plan, as_json)
    else:
        print(f"shard {shard}: {len(mine)} of {len(found)} points are in {out}; join with --merge")


def _finish(out: str, plan: Plan, as_json: bool) -> None:
    """Table, page and the verdict on the terminal."""
    from kvsim.search import sweep as swept
    from kvsim.search.store import Store
    from kvsim.search.sweep_page import PAGE, build_page
    from kvsim.writing import json_text, write_together

    records = swept.gather(Store(out), plan, out)
    chosen = swept.choose(plan, records)
    table, page = swept.table_bytes(plan, records), build_page(plan, chosen)
    write_together(out, {swept.MANIFEST: swept.manifest(plan), swept.TABLE: table, PAGE: page})
    if as_json:
        print(json_text(swept.chosen_record(chosen)), end="")
        return
    console = make_console()
    for text, _ in chosen.verdict:
        console.print(text)
    if chosen.best:
        console.print(chosen.rule, _best(chosen), sep="\n\n")
    tell_written(out, PAGE)


def _best(chosen: Chosen) -> Table:
    """The first few of the best configurations."""
    from kvsim.results.numerals import show

    listed, metrics = chosen.best[:MOST_LISTED], chosen.metrics[:MOST_FIGURES]
    keys, labels = list(listed[0].first.settings), (metric.label for metric in metrics)
    table = make_table(*keys, *labels, texts=len(keys))
    for place in listed:
        figures = (show(place.first.figures.get(metric.key), metric.unit) for metric in metrics)
        table.add_row(*place.settings.values(), *figures)
    return table


class Question(Bundle, kw_only=True):
    """What is looked for, and among which values."""

    slo: Objectives
    find: str = Option(
        metavar="KNOB",
        help="num_gpu_blocks, gpu_memory_utilization, kv_offloading_size,"
        " replicas, request_rate, watermark, max_num_batched_tokens or max_num_seqs.",
    )
    trace: TracePath = None
    config: ConfigFile = None
    low: float | None = Option(None, "--from", metavar="X", help="Try nothing below.")
    high: float | None = Option(None, "--to", metavar="X", help="Try nothing above.")
    seeds: int = Option(5, min=1, metavar="N", help="Seeds, the same for every value.")
    hit_rate: float | None = Option(
        None,
        metavar="SHARE",
        help="Assume shared prefixes: this share of the prompt tokens hits an unlimited"
        " cache. For traces without content.",
    )
    prefixes: int = Option(
        16, min=1, metavar="N", help="With --hit-rate: number of different prefixes."
    )
    price_per_gpu_hour: float | None = Option(
        None, min=0, metavar="X", help="Also say what a million tokens cost, in dollars."
    )


@takes_bundles
def size(
    *,
    question: Question,
    out: OutDir = None,
    as_json: AsJson = False,
    workers: Workers,
    form: TraceForm,
    fleet: FleetOptions,
) -> None:
    """Find the least memory, the fewest replicas, the highest rate or the best limit that keeps the
    objectives.

    Every value meets the same seeds. With --out no run is ever repeated.
    """
    from kvsim.search import size as sizing
    from kvsim.search.size_verdict import NAME, PAGE, build_page, size_record
    from kvsim.search.slo import parse_slo
    from kvsim.search.store import Store
    from kvsim.writing import json_text, write_together

    objectives, find = parse_slo(question.slo), question.find
    price = question.price_per_gpu_hour
    if price is not None and not isfinite(price):
        raise ConfigError(f"--price-per-gpu-hour: {price:g} is no price")
    loaded = fleet.settings.load(question.config)
    runner = workers.chosen()
    opened = form.requests(question.trace, loaded)
    if question.hit_rate is not None:
        opened, loaded, notes = sizing.sharing(opened, loaded, question.hit_rate, question.prefixes)
        note(*notes)
    if find in sizing.LASTING:
        opened, loaded, notes = sizing.endless(opened, loaded, find)
        note(*notes)
        objectives = objectives._replace(steady=True)
    searches, bounds = [], sizing.Bounds(question.low, question.high)
    place = tempfile.TemporaryDirectory(prefix="kvsim-") if out is None else nullcontext(out)
    with place as folder, progress_bar(f"looking for {find}") as done:
        store = Store(folder)
        for base in _bases(loaded, fleet, find):
            knob = sizing.make_knob(find, opened, to_table(base), bounds)
            varies = sizing.what_varies(opened, base, find)
            # Where nothing is drawn at random, every seed gives the same.
            numbers = range(base.seed, base.seed + (question.seeds if varies else 1))
            lab = sizing.Laboratory(
                opened, base, knob, objectives, numbers, store, runner, workers.jobs, done
            )
            searches.append(sizing.searched(lab, varies))
    record = json_text(size_record(searches, price))
    if as_json:
        print(record, end="")
    else:
        _show_sizes(searches, price)
    if out is not None:
        write_together(out, {PAGE: build_page(searches, price), NAME: record})
        tell_written(out, PAGE)


def _bases(loaded: RunConfig, fleet: FleetOptions, find: str) -> list[RunConfig]:
    """The settings of each search: one for each router, where there are replicas."""
    from kvsim.fleet import make_settings

    table = fleet.table()
    if not table and find != "replicas":
        return [loaded]
    if fleet.replicas is not None and find == "replicas":
        raise ConfigError("--replicas: is what --find replicas looks for; leave it out")
    table = {"replicas": 1, **to_table(loaded), **table}
    names = dict.fromkeys((fleet.router or "round-robin").split(","))
    return [make_settings({**table, "router": name}) for name in names]


def _show_sizes(searches: Sequence[Search], price: float | None) -> None:
    from kvsim.search.size_verdict import compared, router_of, router_table, verdict
    from kvsim.search.sweep import sources

    console = make_console()
    for search in searches:
        if len(searches) > 1:
            console.print(router_of(search.lab), style="bold")
        console.print(_neighbours(*search))
        print_remarks(console, verdict(*search, price))
    if len(searches) > 1:
        head, rows = router_table(searches, price)
        console.print(make_table(*head, rows=rows))
        console.print(compared(searches).text)
    tried = (each.records for search in searches for each in search.lab.tried.values())
    for text, measured in sources(tried):
        console.print(text, style="" if measured else "dim")


def _neighbours(lab: Laboratory, found: Answer) -> Table:
    """Values around the answer, with their figures."""
    from kvsim.search.size import neighbourhood
    from kvsim.search.size_verdict import HEAD, row

    labels = (metric.label for metric in lab.objectives.metrics)
    table = make_table(lab.knob.name, *HEAD, *labels)
    for value, configuration in neighbourhood(lab, found.value):
        style = "bold" if value == found.value else "" if configuration.meets else "dim"
        table.add_row(*row(lab, found.value, value), style=style)
    return table


class Trials(Bundle):
    """How many runs there are, and how many at a time."""

    seeds: int = Option(
        8, min=2, metavar="N", help="Up to N seeds; stops when a verdict is settled."
    )
    jobs: Jobs = None


STYLES = {"better": "green", "worse": "red"}


@takes_bundles
def advise(
    *,
    trace: str = Argument(metavar="TRACE", help="As for `kvsim run --trace`, such as chat."),
    slo: Objectives,
    config: ConfigFile = None,
    trials: Trials,
    out: OutDir = None,
    as_json: AsJson = False,
    form: TraceForm,
    settings: Settings,
) -> None:
    """Try the settings that matter, and say which to change for these objectives.

    Every change meets the same seeds. Prints what limits the server now, three sentences, a table
    with intervals, and the command line of the server.
    """
    from kvsim.search import advice as words
    from kvsim.search.advice import NAME, PAGE, build_page
    from kvsim.search.advise import MOST_COMBINED, changes_of
    from kvsim.search.advise import advise as search
    from kvsim.search.compare import How, load_of
    from kvsim.search.slo import parse_slo
    from kvsim.settings.server.command import arguments
    from kvsim.writing import json_text, write_together

    objectives = parse_slo(slo)
    loaded = settings.load(config)
    opened = form.open(trace)
    note_arrivals(opened, [loaded])
    load = load_of(opened, [("", loaded)])
    changes = tried, _ = changes_of(loaded)
    most = (1 + len(tried) + MOST_COMBINED) * trials.seeds
    with progress_bar("trying settings", most) as progress:
        advice = search(
            load,
            loaded,
            objectives,
            changes,
            seeds=trials.seeds,
            how=How(jobs=trials.jobs, progress=progress),
        )
    given = arguments(settings.vllm, settings.vllm_file)
    line = words.serve_command(advice, settings.word, given)
    cache = words.cache_sentences(opened, advice.best.config)
    now = words.present(advice)
    said = [remark.text for remark in now]
    found = json_text({"diagnosis": said, **words.record(advice, line), "cache": cache})
    if as_json:
        print(found, end="")
    else:
        _show_advice(advice, [*said, *words.sentences(advice), *cache], line)
    if out is not None:
        write_together(out, {PAGE: build_page(advice, opened, now, cache, line), NAME: found})
        tell_written(out, PAGE)


def _show_advice(advice: Advice, said: list[str], line: str) -> None:
    from kvsim.report.compare import few_seeds
    from kvsim.search.advice import method, not_tried, rows

    console = make_console()
    for sentence in said:
        console.print(sentence)
    difference = f"{advice.decides.metric.label}: difference"
    table = make_table("setting", difference, "", texts=3)
    for name, change, finding in rows(advice):
        table.add_row(name, change, finding, style=STYLES.get(finding, ""))
    console.print(table)
    few = few_seeds(advice.planned) if advice.redrawn else []
    for text in (method(advice), *few, *not_tried(advice)):
        console.print(text, style="dim")
    console.print(f"\n{line}", soft_wrap=True)
