"""A sweep in a folder: what was to be run, the parts of it, its results, and which are best.

```
DIR/sweep.json      what was to be run: trace, settings, points with their keys
DIR/points/         what has been run
DIR/sweep.parquet   one row per point, once all are there
DIR/sweep.html      the page
```
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import inf, prod
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from kvsim.errors import ConfigError, OutputError
from kvsim.explain import MARGIN, matters
from kvsim.report import Remark, time_source
from kvsim.report.wording import Tone
from kvsim.results.load import OVERLOADED, rates_words, state_of
from kvsim.results.metrics import NAMED, Metric
from kvsim.results.numerals import count, plural, show
from kvsim.results.plain import plain
from kvsim.results.tables import optional, texts, truths
from kvsim.run.simulation import simulate
from kvsim.search.grid import Point, Settings
from kvsim.search.runner import REFUSED, figures_of
from kvsim.search.slo import Objectives, parse_slo
from kvsim.search.store import ENGINE_FACTS, Count, Record, Store, Versioned, address
from kvsim.settings.parsing import is_flat, parse_json
from kvsim.version import __version__
from kvsim.workload.trace import Row, Trace
from kvsim.writing import encoded, json_text, write_bytes

if TYPE_CHECKING:
    import pyarrow as pa


MANIFEST = "sweep.json"
_REMEDY = "give a folder that `kvsim sweep --out` wrote"


class Traced(Struct, frozen=True):
    """The trace of a sweep."""

    name: str
    """Of its file."""
    format: str
    sha256: str
    requests: Count


class Planned(Struct, frozen=True, forbid_unknown_fields=True):
    """A point of a sweep and the key of its result."""

    settings: Settings
    seed: Count
    key: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class Plan(Versioned, frozen=True, kw_only=True):
    """What a sweep runs, without anything specific to this machine: the content of `sweep.json`."""

    trace: Traced
    base: dict[str, Any]
    """The given settings that all points share."""
    slo: str | None
    ledger: bool = False
    """Whether the results have the figures of the ledger."""
    points: Annotated[list[Planned], Meta(min_length=1)]

    @property
    def axes(self) -> tuple[str, ...]:
        """The settings that are varied, without the seed."""
        return tuple(self.points[0].settings)

    def describe(self) -> dict[str, Any]:
        """The plan as plain values."""
        described: dict[str, Any] = plain(msgspec.to_builtins(self))
        return described


def make_plan(
    trace: Trace,
    base: Mapping[str, Any],
    points: Sequence[Point],
    slo: str | None = None,
    *,
    ledger: bool = False,
) -> Plan:
    """The plan of these points on a trace."""
    keys = (address(point.config, trace, ledger=ledger) for point in points)
    return Plan(
        __version__,
        trace=Traced(Path(trace.path).name, trace.format, trace.sha256, len(trace.rows)),
        base=dict(base),
        slo=slo,
        ledger=ledger,
        points=[Planned(p.settings, p.config.seed, k) for p, k in zip(points, keys, strict=True)],
    )


def gather(store: Store, plan: Plan, folder: str | Path) -> list[Record]:
    """The results of all points, in order. Raises `OutputError` if some are missing."""
    records = {point.key: store.load(point.key) for point in plan.points}
    there = {key: record for key, record in records.items() if record is not None}
    if missing := len(records) - len(there):
        raise OutputError(
            f"{folder}: {missing} of {len(records)} runs are missing; run the sweep, or the"
            " shards that are not done, again with this --out"
        )
    return [there[point.key] for point in plan.points]


def manifest(plan: Plan) -> str:
    """The content of `sweep.json`."""
    return json_text(plan.describe())


def write_plan(folder: str | Path, plan: Plan, *results: str) -> None:
    """Write `sweep.json`, whole or not at all. Raises `OutputError`.

    `results`: names of files that are removed if they belong to another plan.
    """
    path, content = Path(folder) / MANIFEST, encoded(manifest(plan))
    try:
        if path.exists() and path.read_bytes() != content:
            for place in map(path.with_name, results):
                if place.is_file():  # A link stays, and so does a device.
                    place.resolve().unlink()
    except OSError as error:
        raise OutputError(f"{folder}: cannot be written: {error.strerror}") from None
    write_bytes(path, content)


def read_plan(folder: str | Path) -> Plan:
    """Read `sweep.json`. Raises `OutputError` naming the file and the remedy."""
    path = Path(folder) / MANIFEST
    try:
        table = parse_json(path.read_bytes())
        version = msgspec.convert(table, Versioned).kvsim_version
        if version != __version__:
            raise OutputError(
                f"{path}: kvsim {version} wrote it, this is {__version__}; run it again"
            )
        plan = msgspec.convert(table, Plan)
        if not is_flat(table) or len({tuple(point.settings) for point in plan.points}) > 1:
            raise ValueError
        if plan.slo is not None:
            parse_slo(plan.slo)
    except OSError as error:
        raise OutputError(f"{path}: cannot be read: {error.strerror}; {_REMEDY}") from None
    except (ConfigError, ValueError):  # also of msgspec
        raise OutputError(f"{path}: damaged or not written by kvsim; {_REMEDY}") from None
    return plan


def shard_of(number_of_points: int, text: str | None) -> range:
    """The positions in the part `K/N`: every N-th from the K-th on. Raises `ConfigError`."""
    if text is None:
        return range(number_of_points)
    number, slash, of = text.partition("/")
    digits = slash and number.isascii() and of.isascii() and number.isdigit() and of.isdigit()
    if not digits or not 1 <= int(number) <= int(of):
        raise ConfigError(f"--shard {text}: expected K/N with K from 1 to N, as in --shard 1/4")
    return range(int(number) - 1, number_of_points, int(of))


def merge(folders: Sequence[str], into: str | Path) -> Plan:
    """Copy the runs of one sweep from several folders into one; returns their plan.

    Raises `OutputError` if the folders hold different sweeps or were made for different objectives,
    or if a run is in none of them.
    """
    plans = [read_plan(folder) for folder in folders]
    plan = plans[0]
    for folder, other in zip(folders, plans, strict=True):
        if [point.key for point in other.points] != [point.key for point in plan.points]:
            raise OutputError(
                f"{folder}: part of another sweep than {folders[0]}; merge its own shards"
            )
        if other.slo != plan.slo:
            raise OutputError(
                f"{folder}: its --slo is {other.slo}, that of {folders[0]} {plan.slo}; repeat the"
                " command of one with that of the other, which repeats no run"
            )
    stores = [Store(folder) for folder in folders]
    target = Store(into)
    target.make()
    for point in plan.points:
        record = next(filter(None, (store.load(point.key) for store in stores)), None)
        if record is not None:
            target.fetch(point.key, partial(dict, record))
    gather(target, plan, into)
    write_plan(into, plan)
    return plan


TABLE = "sweep.parquet"


def table_bytes(plan: Plan, records: Sequence[Record]) -> bytes:
    """The content of `sweep.parquet`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(sweep_table(plan, records), buffer, compression="zstd")
    content: bytes = buffer.getvalue().to_pybytes()
    return content


def sweep_table(plan: Plan, records: Sequence[Record]) -> pa.Table:
    """One row per point, in the order of the plan."""
    import pyarrow as pa

    columns: dict[str, pa.Array] = {
        key: _settings_column([point.settings[key] for point in plan.points]) for key in plan.axes
    }
    columns["seed"] = optional([point.seed for point in plan.points], whole=True)
    columns["key"] = texts(record["key"] for record in records)
    columns["outcome"] = _text_column([record["outcome"]["kind"] for record in records])
    columns["reason"] = _text_column([reason(record) for record in records])
    if plan.slo is not None:
        objectives = parse_slo(plan.slo)
        columns["meets_slo"] = truths([objectives.met(record) for record in records])
    for key in ENGINE_FACTS:
        values = [record.get("engine", {}).get(key) for record in records]
        columns[f"engine.{key}"] = optional(values, whole=True)
    columns |= _figure_columns(records, plan.ledger)
    described = plan.describe()
    del described["points"]
    about = {"kvsim": encoded(json.dumps(described, ensure_ascii=False))}
    return pa.Table.from_arrays(list(columns.values()), list(columns), metadata=about)


def reason(record: Record) -> str:
    """Why a run did not finish, in words; empty if it did."""
    outcome = record["outcome"]
    return "" if outcome["kind"] == "finished" else str(outcome.get("explanation", ""))


@cache
def figure_kinds(ledger: bool = False) -> Mapping[str, bool]:
    """Every figure of a summary, in order, and whether it is a whole number; those of the ledger,
    too, if asked for.

    The figures are those of a run of one request. So columns are the same in every table, even if
    no point could be run.
    """
    row = Row(0, "0", 0, 0, 1, 1)
    trace = Trace(path="", format="native", sha256="", rows=[row])
    result = simulate(trace, {"cost": {"model": "constant"}})
    figures = figures_of(result.summary if ledger else result.figures)
    return {key: isinstance(value, int) for key, value in figures.items()}


def _figure_columns(records: Sequence[Record], ledger: bool) -> dict[str, pa.Array]:
    """All figures of these records; those of the cost model last."""
    kinds = dict(figure_kinds(ledger))
    for record in records:
        for key, value in record["figures"].items():
            kinds[key] = kinds.get(key, True) and not isinstance(value, float)
    return {
        key: optional([record["figures"].get(key) for record in records], whole=is_whole)
        for key, is_whole in kinds.items()
    }


def _settings_column(values: Sequence[Any]) -> pa.Array:
    """Values as a column of integers, floats or booleans, else of text."""
    if all(isinstance(value, bool) for value in values):
        return truths(values)
    if all(type(value) is int and abs(value) < 1 << 63 for value in values):
        return optional(values, whole=True)
    if all(type(value) in (int, float) for value in values):
        return optional([float(value) for value in values], whole=False)
    return _text_column(
        v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values
    )


def _text_column(written: Iterable[str]) -> pa.Array:
    return texts(encoded(text).decode() for text in written)


MEMORY = Metric("kv_cache_bytes", "KV memory", "bytes", "lower", "Memory")
"""What a configuration costs: bytes of all GPUs that hold KV blocks."""

TTFT, TPOT = NAMED["p99_ttft_ms"], NAMED["p99_tpot_ms"]
THROUGHPUT, PREEMPTIONS = NAMED["output_throughput"], NAMED["num_preemptions"]
GOODPUT, SERVED = NAMED["request_goodput"], NAMED["request_throughput"]
RATE = "request_rate"
_HELD_BACK = 0.9
"""Share of a request rate below which clients that wait for replies are said to send less."""
_MOST_VALUES = 3
_NONE = f" (differences below {100 * MARGIN:g} % do not count)"


class Configuration(NamedTuple):
    """The runs of one combination of settings, one per seed."""

    number: int
    """From 1, in the order of the sweep."""
    settings: Settings
    records: Sequence[Record]
    figures: dict[str, float]
    """Means over the seeds of the figures that every seed defines; empty if a run did not
    finish."""
    met: int
    """Seeds on which all objectives are met."""
    load: float
    """Load of the tightest objective on the worst seed: 1 is its limit; inf if a run did not
    finish."""

    @property
    def outcome(self) -> str:
        """`finished`, or the outcome of the first run that did not finish."""
        kinds = [str(record["outcome"]["kind"]) for record in self.records]
        return next((kind for kind in kinds if kind != "finished"), "finished")

    @property
    def reason(self) -> str:
        """The reason of that outcome, in words; empty if all runs finished."""
        return next(filter(None, map(reason, self.records)), "")

    @property
    def overloaded(self) -> bool:
        """Whether the engine did not keep up on some seed."""
        finished = (each for each in self.records if each["outcome"]["kind"] == "finished")
        return any(state_of(record["figures"]) == OVERLOADED for record in finished)

    @property
    def meets(self) -> bool:
        """Whether every seed meets all objectives."""
        return self.met == len(self.records)


class Place(NamedTuple):
    """A place in a ranking: configurations whose figures are all equal."""

    members: tuple[Configuration, ...]

    @property
    def first(self) -> Configuration:
        """The member that the sweep ran first."""
        return self.members[0]

    @property
    def settings(self) -> dict[str, str]:
        """The settings in words: `64 or 128` where it makes no difference."""
        found = {
            key: tuple(dict.fromkeys(value_words(each.settings[key]) for each in self.members))
            for key in self.first.settings
        }
        whole = prod(map(len, found.values())) == len(self.members)
        return {key: _alternatives(values, whole) for key, values in found.items()}


class Chosen(NamedTuple):
    """A sweep with its configurations ranked."""

    configurations: list[Configuration]
    objectives: Objectives | None
    metrics: tuple[Metric, ...]
    """The figures to show first: those that decide the ranking, latency, throughput; `MEMORY` only
    where the configurations differ in it."""
    best: list[Place]
    """The ranking, best first; all finished and, if there are objectives, meet them."""
    standing: dict[int, int]
    """Number of a finished configuration -> its place among all, those that miss an objective
    last; empty without objectives."""
    rule: str
    """The rule of the ranking, in words."""
    verdict: list[Remark]

    @property
    def finished(self) -> list[Configuration]:
        """The configurations whose runs all finished."""
        return [each for each in self.configurations if each.figures]

    def best_of(self, members: Iterable[Configuration], metric: Metric) -> Configuration:
        """The member that ranks first; without objectives, the one whose `metric` is best."""
        if self.standing:
            return min(members, key=lambda each: self.standing[each.number])
        return min(members, key=lambda each: (_costs(each, metric), each.number))


def chosen_record(chosen: Chosen) -> dict[str, Any]:
    """Verdict, ranking and every configuration as plain values."""
    configurations = [
        {
            "settings": each.settings,
            "outcome": each.outcome,
            "seeds": len(each.records),
            "seeds_met": each.met,
            "figures": each.figures,
        }
        for each in chosen.configurations
    ]
    return {
        "verdict": [remark.text for remark in chosen.verdict],
        "rule": chosen.rule,
        "best": [[member.number - 1 for member in place.members] for place in chosen.best],
        "configurations": plain(configurations),
    }


def choose(plan: Plan, records: Sequence[Record]) -> Chosen:
    """Rank the configurations of a sweep; `records`: one per point.

    With objectives, only configurations that meet all of them on every seed are ranked: by goodput,
    then by KV memory, then by their distance from the limits. Goodput is the rate of requests that
    meet the settings' own `goodput` limits; without such limits, the rate of completed requests.
    Without objectives, the ranking is the Pareto front of TTFT and throughput.
    """
    objectives = None if plan.slo is None else parse_slo(plan.slo)
    settings = map(attrgetter("settings"), plan.points)
    configurations = joined(zip(settings, records, strict=True), objectives)
    finished = [c for c in configurations if c.figures]
    memory = [c.figures[MEMORY.key] for c in finished]
    least = min(memory, default=0.0)
    costs = [MEMORY] if matters(max(memory, default=0.0) - least, least) else []
    shown = [TTFT, TPOT, THROUGHPUT, PREEMPTIONS, *costs]
    standing: dict[int, int] = {}
    if objectives is None:
        places = _collapsed(pareto(configurations, TTFT, THROUGHPUT), finished)
        rule = f"No other configuration has both a lower TTFT p99 and a higher throughput{_NONE}."
    else:
        goodput = GOODPUT if any(GOODPUT.key in c.figures for c in finished) else SERVED
        shown = [*objectives.metrics, goodput, *costs, *shown]
        best, rule = _meeting(finished, goodput, plan.axes)
        others = sorted((c for c in finished if not c.meets), key=lambda c: (c.load, c.number))
        standing = {c.number: place for place, c in enumerate([*best, *others])}
        places = _collapsed(best, best)
    verdict = _verdict(configurations, objectives, places)
    metrics = tuple(dict.fromkeys(shown))
    return Chosen(configurations, objectives, metrics, places, standing, rule, verdict)


def _meeting(
    finished: Sequence[Configuration], goodput: Metric, axes: Sequence[str]
) -> tuple[list[Configuration], str]:
    """Those that meet all objectives, the best first, and the rule of their order, in words."""
    keys = [lambda c: _costs(c, goodput), lambda c: _costs(c, MEMORY), lambda c: c.load]
    first = goodput.label.lower()
    # With the rate alone, the question is how much load the objectives allow.
    if axes == (RATE,):
        keys[0], first = (lambda c: -c.settings[RATE]), "request rate"
    return _ordered([c for c in finished if c.meets], keys), (
        f"Of those that meet all objectives on every seed: the highest {first}"
        f" first, then the least KV memory{_NONE}, then the farthest from its limits."
    )


def pareto(
    configurations: Sequence[Configuration], one: Metric, other: Metric
) -> list[Configuration]:
    """The Pareto front of two figures, in order of `one`; of equal configurations, the first stays.

    No other configuration is better in one of the figures without being worse in the other;
    differences too small to matter are neither.
    """

    def costs(configuration: Configuration) -> tuple[float, float]:
        return _costs(configuration, one), _costs(configuration, other)

    defined = [c for c in configurations if {one.key, other.key} <= c.figures.keys()]
    unbeaten: list[Configuration] = []
    for configuration in sorted(defined, key=costs):
        if not unbeaten or costs(configuration)[1] < costs(unbeaten[-1])[1]:
            unbeaten.append(configuration)
    # In the strict front, some are better by too little to matter.
    front = [c for c in unbeaten if not any(_beats(costs(by), costs(c)) for by in unbeaten)]
    return sorted(front, key=lambda configuration: configuration.figures[one.key])


def _beats(costs: Iterable[float], others: Iterable[float]) -> bool:
    """Whether one of two costs is less, and the other is not more, by what matters."""
    pairs = [
        pair for pair in zip(costs, others, strict=True) if matters(pair[0] - pair[1], pair[1])
    ]
    return bool(pairs) and all(cost < other for cost, other in pairs)


def sources(groups: Iterable[Sequence[Record]]) -> list[tuple[str, bool]]:
    """The sources of the runs' step times, each once, and whether each is measured."""
    costs = (r["time_source"] for group in groups for r in group if "time_source" in r)
    return list({time_source({"cost": c}): c["kind"] == "measured" for c in costs}.items())


def words(settings: Settings) -> str:
    """`watermark 0.05 · preemption_mode swap`."""
    return " · ".join(f"{key} {value_words(value)}" for key, value in settings.items()) or "base"


def _alternatives(values: Sequence[str], whole: bool) -> str:
    """`64`, `64 or 128`, `32 … 128`; `64 or others` unless `whole`: every combination is meant."""
    if len(values) == 1:
        return values[0]
    if not whole:
        return f"{values[0]} or others"
    return " or ".join(values) if len(values) <= _MOST_VALUES else f"{values[0]} … {values[-1]}"


def value_words(value: Any) -> str:
    """A setting's value as in a configuration file, but without quotes."""
    if value is None:
        return "default"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def joined(
    runs: Iterable[tuple[Settings, Record]], objectives: Objectives | None
) -> list[Configuration]:
    """The configurations of these runs, each with all its seeds, in order of first appearance."""
    groups: dict[str, tuple[Settings, list[Record]]] = {}
    for settings, record in runs:
        groups.setdefault(json.dumps(settings), (settings, []))[1].append(record)
    made = []
    for number, (settings, records) in enumerate(groups.values(), 1):
        met, load = len(records), 0.0
        if objectives is not None:
            met = objectives.met_by(records)
            load = max(map(objectives.load, records))
        made.append(Configuration(number, settings, records, _means(records), met, load))
    return made


def _means(records: Sequence[Record]) -> dict[str, float]:
    if any(record["outcome"]["kind"] != "finished" for record in records):
        return {}
    tables = [{**record["figures"], MEMORY.key: record["engine"][MEMORY.key]} for record in records]
    return {
        key: fmean([table[key] for table in tables])
        for key in tables[0]
        if all(table[key] is not None for table in tables)
    }


def _costs(configuration: Configuration, metric: Metric) -> float:
    """A figure such that less is better; inf if it is undefined."""
    value = configuration.figures.get(metric.key, inf if metric.better != "higher" else -inf)
    return -value if metric.better == "higher" else value


def _ordered(
    members: Sequence[Configuration], keys: Sequence[Callable[[Configuration], float]]
) -> list[Configuration]:
    """Sorted by the first key, least first; where it is nearly equal, by the next one.

    Nearly equal to the first of those that remain: the order has no circles.
    """
    if not keys:
        return sorted(members, key=lambda each: each.number)
    key, *further = keys
    rest, order = sorted(members, key=key), list[Configuration]()
    while rest:
        least = key(rest[0])
        equal = [each for each in rest if not matters(key(each) - least, least)]
        order += _ordered(equal, further)
        # `rest` is sorted, so the equal ones were its first.
        rest = rest[len(equal) :]
    return order


def _collapsed(best: Sequence[Configuration], among: Sequence[Configuration]) -> list[Place]:
    """The places of the best; configurations `among` these with equal figures share a place."""
    alike: dict[tuple[tuple[str, float], ...], list[Configuration]] = {}
    for each in among:
        alike.setdefault(tuple(each.figures.items()), []).append(each)
    found = dict.fromkeys(tuple(each.figures.items()) for each in best)
    return [Place(tuple(alike[key])) for key in found]


def _verdict(
    configurations: Sequence[Configuration], objectives: Objectives | None, best: Sequence[Place]
) -> list[Remark]:
    outcomes = [each.outcome for each in configurations]
    ended = sum(outcome not in (REFUSED, "finished") for outcome in outcomes)
    behind = sum(each.overloaded for each in configurations)
    return [
        *_counted("Overloaded in {}: more was offered than served.", behind),
        *_kept(configurations, objectives, best),
        *(_best_remark(place, objectives) for place in best[:1]),
        *_less_than_asked(configurations),
        *_counted("{} refused at start-up.", outcomes.count(REFUSED)),
        *_counted("The engine stopped before the end in {}.", ended, "bad"),
    ]


def _counted(text: str, number: int, tone: Tone = "warning") -> list[Remark]:
    """What to say of a number of configurations; nothing of none."""
    return [Remark(text.format(plural(number, "configuration")), tone)] if number else []


def _kept(
    configurations: Sequence[Configuration], objectives: Objectives | None, best: Sequence[Place]
) -> list[Remark]:
    """How many configurations meet the objectives, or which misses them least."""
    if objectives is None:
        return []
    bounds = " and ".join(map(str, objectives.each))
    meeting = count(sum(len(place.members) for place in best))
    text = f"{meeting} of {plural(len(configurations), 'configuration')} meet {bounds}."
    if best:
        return [Remark(text)]
    return [Remark(text, "bad"), *_nearest_miss(configurations)]


def _best_remark(place: Place, objectives: Objectives | None) -> Remark:
    figures = place.first.figures
    listed = ", ".join(
        f"{metric.label} {show(figures[metric.key], metric.unit)}"
        for metric in (TTFT, TPOT, THROUGHPUT)
        if metric.key in figures
    )
    if objectives is None:
        name = "Lowest TTFT p99"
    else:
        name = "Highest" if set(place.settings) == {RATE} else "Best"
    return Remark(f"{name}: {words(place.settings)} ({listed}; {rates_words(figures)}).")


def _less_than_asked(configurations: Sequence[Configuration]) -> list[Remark]:
    """What to say where clients sent less than the request rate, because they wait for replies."""
    less = [
        (rate, sent)
        for each in configurations
        for rate, sent in [(each.settings.get(RATE), each.figures.get("request_rate"))]
        if rate and sent and rate < inf and sent < _HELD_BACK * rate
    ]
    if not less:
        return []
    rate, sent = (show(each, "requests/s") for each in max(less))
    text = f"At a request rate of {rate}, {sent} were sent: turns of a session wait for replies."
    return [Remark(f"{text} With --sessions recorded, they do not.", "warning")]


def _nearest_miss(configurations: Sequence[Configuration]) -> list[Remark]:
    finished = [c for c in configurations if c.load < inf]
    if not finished:
        return []
    nearest = min(finished, key=lambda configuration: configuration.load)
    over = f"{100 * (nearest.load - 1):.0f} % beyond a limit"
    seed = " on a seed" if len(nearest.records) > 1 else ""
    return [Remark(f"Nearest: {words(nearest.settings)}, {over}{seed}.")]
