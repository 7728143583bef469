"""Replays a measured run, and says how far the prediction is off, and why.

In go a trace with measured times and the settings of its server. Out comes one record (`check`)
with the errors, where they come from, and what to correct first; rows and a page say and draw it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from kvsim.against.matched import KINDS, STATISTICS, Matched, require_measured
from kvsim.against.suspects import EXPLAINED, Bench, corrections, misfit
from kvsim.core.vectors import added
from kvsim.errors import ConfigError
from kvsim.fleet import EngineResult, simulate_engine
from kvsim.report import Remark, finished, measured, outcome_title, time_source, wording
from kvsim.report.pages.figures import Figure, chart, compact, line, points, titled
from kvsim.report.pages.html import Html, document, join, lead, panel, placed, table
from kvsim.report.pages.run import provenance_panels
from kvsim.report.wording import assumed
from kvsim.results.metrics import LATENCIES
from kvsim.results.numerals import SPACE, count, milliseconds, percent, plural, show, signed
from kvsim.results.plain import plain
from kvsim.results.statistics import Floats, describe, describe_counts, ratio
from kvsim.settings.config import RunConfig
from kvsim.version import __version__
from kvsim.workload.trace import Trace

FEWEST = 10
"""The fewest requests without a queue from which prefills are judged."""

Table = dict[str, Any]

WHOLE = {
    "duration": ("Duration", "s"),
    "request_throughput": ("Request throughput", "requests/s"),
    "output_throughput": ("Output token throughput", "tokens/s"),
    "total_token_throughput": ("Total token throughput", "tokens/s"),
}
"""Figures of the run as a whole: label and unit."""

_WORTH = 0.5
"""A correction that removes less of the misfit than this is not the cause."""
_AS_GOOD = 0.1
"""Corrections whose shares differ by less cannot be told apart."""
_SAME_PEAK = 0.03
"""Peaks that differ by less are not worth a word."""
_MERGED = 0.01
"""Share of gaps between tokens that a client may miss without a remark."""

Record = Mapping[str, Any]


def residual(pairs: Matched, requests: dict[str, Any]) -> Table | None:
    """Where the difference of the mean E2EL comes from, over the requests whose TTFT and E2EL were
    measured: parts that add up to it, and how the queue was told from the prefill, in words. None
    if there are no such requests.

    `requests`: the columns of the replay.
    """
    measured, predicted = pairs.measured_s, pairs.predicted_s
    told = ~np.isnan(measured["ttft"] + measured["e2el"] + predicted["ttft"])
    if not told.any():
        return None
    real, ours = (
        {kind: seconds[told] for kind, seconds in side.items()} for side in (measured, predicted)
    )
    # Those that wait for nothing but the step under way in the replay.
    waited = requests["first_scheduled_ns"] - requests["arrival_ns"]
    unhindered: np.ndarray = (waited == requests["waiting_step_ns"])[pairs.places]
    queue, method = _queue(real, ours, unhindered[told])
    parts = [_part("first token", real["ttft"], ours["ttft"])]
    if queue is not None:
        prefill = _part("prefill", real["ttft"] - queue, ours["ttft"] - ours["queue"])
        parts = [_part("queue", queue, ours["queue"]), prefill]
    parts.append(_part("decode", real["e2el"] - real["ttft"], ours["e2el"] - ours["ttft"]))
    largest = max(parts, key=lambda part: abs(part["difference_ms"]))
    return {"parts": parts, "largest": largest["name"], "method": method}


def _queue(
    real: dict[str, Floats], ours: dict[str, Floats], unhindered: np.ndarray
) -> tuple[Floats | None, str]:
    """How long each request waited in reality: measured, estimated, or None if unknown."""
    if not np.isnan(real["queue"]).any():
        return real["queue"], "The server measured how long requests waited."
    number = int(unhindered.sum())
    if number < FEWEST:
        return None, (
            f"Queue and prefill cannot be told apart: only {number} requests are predicted to find"
            " no queue."
        )
    ratio = real["ttft"][unhindered].sum() / ours["ttft"][unhindered].sum()
    queue = real["ttft"] - ratio * (ours["ttft"] - ours["queue"])
    return queue, (
        f"Queue and prefill are told apart by the {number:,} requests that are predicted to find no"
        f" queue: their TTFT is {ratio:.2f} times the predicted one."
    )


def _part(name: str, measured_s: Floats, predicted_s: Floats) -> Table:
    """A part of the mean request's time; the difference is predicted minus measured."""
    measured_ms, predicted_ms = (1e3 * float(each.mean()) for each in (measured_s, predicted_s))
    return {
        "name": name,
        "measured_ms": measured_ms,
        "predicted_ms": predicted_ms,
        "difference_ms": predicted_ms - measured_ms,
    }


SCHEMA = "kvsim.against.check/1"
NEAR = 0.01
"""If no figure is farther off than this, nothing needs a correction."""


def check(
    trace: Trace,
    config: RunConfig,
    *,
    tolerance: float | None = None,
    correct: bool = True,
    command: str = "",
    done: Callable[[int], None] = lambda number: None,
) -> Table:
    """Replay `trace` and compare the prediction with what was measured of its requests.

    The record is made of plain values. Its figures have the keys of the result of `vllm bench
    serve`, each with `measured`, `predicted` and `error` (predicted / measured - 1). `tolerance`:
    the largest error with which the check passes; None: any. With `correct`, corrections are
    tried where a figure is more than `NEAR` off; `done` is called with 1 after each run.

    Raises `ConfigError` if nothing was measured, or if nothing of it could be replayed.
    """
    require_measured(trace)
    result = simulate_engine(trace, config, command=command)
    done(1)
    bench = Bench(trace, config, result, done)
    pairs, signs = bench.base.pairs, bench.base.signs
    figures = {**_latencies(pairs, result), **_whole(trace, result, pairs)}
    if not figures:
        raise ConfigError(f"{trace.path}: all measured times are 0; give times in seconds")
    worst = max(abs(figure["error"]) for figure in figures.values())
    found = corrections(bench) if correct and worst > NEAR else []
    record: Table = {
        "schema": SCHEMA,
        "kvsim_version": __version__,
        "requests": {
            "measured": sum(bool(row.observed) for row in trace.rows),
            "compared": len(pairs.rows),
        },
        "figures": figures,
        "worst_error": worst,
        "tolerance": tolerance,
        "passed": tolerance is None or worst <= tolerance,
        "spread": {kind: _spread(pairs, kind) for kind in KINDS if pairs.has(kind)},
        "residual": residual(pairs, result.requests),
        "signs": signs and {"measured": signs[0]._asdict(), "predicted": signs[1]._asdict()},
        "misfit": misfit(pairs),
        "corrections": [each._asdict() for each in found],
        "points": _points(trace, pairs),
        "meta": bench.base.figures["meta"],
    }
    remarks = verdict(record, _tokens_missing(trace, pairs))
    record["verdict"] = [remark._asdict() for remark in remarks]
    checked: Table = plain(record)
    return checked


def _latencies(pairs: Matched, result: EngineResult) -> dict[str, Table]:
    """`mean_ttft_ms` and so on, of the requests that have both."""
    sides = {
        kind: tuple(describe(1e3 * seconds) for seconds in pairs.pairs(kind))
        for kind in KINDS
        if pairs.has(kind)
    }
    if len(pairs.gaps_s):
        ours = describe_counts(result.token_gaps_ns)
        predicted = {name: None if x is None else x / 1e6 for name, x in ours.items()}
        sides["itl"] = describe(1e3 * pairs.gaps_s), predicted
    found = {
        f"{name}_{kind}_ms": _figure(sides[kind][0][name], sides[kind][1][name])
        for kind in ("ttft", "tpot", "itl", "e2el", "queue")
        if kind in sides
        for name in STATISTICS
    }
    return {key: figure for key, figure in found.items() if figure["error"] is not None}


def _whole(trace: Trace, result: EngineResult, pairs: Matched) -> dict[str, Table]:
    """Duration and throughput, from the first arrival to the last token of these requests."""
    rows = [trace.rows[i] for i in pairs.rows]
    ends = pairs.measured_s["e2el"]
    if np.isnan(ends).any() or any(row.arrival_ns is None for row in rows):
        return {}
    sent = np.array([row.arrival_ns for row in rows]) / 1e9
    arrived, finished = (
        np.asarray(result.requests[name])[pairs.places] / 1e9
        for name in ("arrival_ns", "finish_ns")
    )
    lengths = [(row.input_length, row.output_length) for row in rows]
    tokens_in, tokens_out = (sum(column) for column in zip(*lengths, strict=True))
    durations = (
        float((sent + ends).max() - sent.min()),
        float(finished.max() - arrived.min()),
    )
    amounts = {
        "request_throughput": len(rows),
        "output_throughput": tokens_out,
        "total_token_throughput": tokens_in + tokens_out,
    }
    rates = {
        key: _figure(*(ratio(amount, each) for each in durations))
        for key, amount in amounts.items()
    }
    return {"duration": _figure(*durations), **rates}


def _figure(measured: float | None, predicted: float | None) -> Table:
    error = None if predicted is None or not measured else predicted / measured - 1
    if error == inf:  # What was measured is next to nothing.
        error = None
    return {"measured": measured, "predicted": predicted, "error": error}


def _spread(pairs: Matched, kind: str) -> Table:
    """How far single requests are off: the median and p90 of their relative errors' sizes."""
    measured, predicted = pairs.pairs(kind)
    there = measured >= 1e-9  # No clock shows less.
    sizes = np.abs(predicted[there] / measured[there] - 1)
    if not len(sizes):
        return {"requests": 0, "median": None, "p90": None}
    median, p90 = np.percentile(sizes, [50, 90])
    return {"requests": len(sizes), "median": float(median), "p90": float(p90)}


def _points(trace: Trace, pairs: Matched) -> Table:
    """Every request: its id, and its measured and predicted milliseconds."""
    columns: Table = {"id": [trace.rows[i].id for i in pairs.rows]}
    for kind in KINDS:
        if pairs.has(kind):
            columns[kind] = {
                "measured_ms": _listed(pairs.measured_s[kind]),
                "predicted_ms": _listed(pairs.predicted_s[kind]),
            }
    return columns


def _listed(seconds: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(1e3 * value) for value in seconds]


def _tokens_missing(trace: Trace, pairs: Matched) -> float:
    """Share of the gaps between tokens that the client did not see one by one."""
    expected = sum(
        trace.rows[i].output_length - 1
        for i in pairs.rows
        if "itl_s" in (trace.rows[i].observed or {})
    )
    return 1 - len(pairs.gaps_s) / expected if expected else 0.0


def label(key: str) -> tuple[str, str]:
    """The label and the unit of a figure: `TTFT p99`, `ms`."""
    if key in WHOLE:
        return WHOLE[key]
    statistic, kind, _ = key.split("_")
    return f"{LATENCIES[kind]} {statistic}", "ms"


def share_off(error: float) -> str:
    """A relative error with its sign: `+0.3 %`."""
    tenths = round(1000 * error)
    return f"{'−' if tenths < 0 else '+'}{abs(tenths) / 10:.1f}{SPACE}%"


def figure_rows(record: Record) -> list[list[str]]:
    """A row per figure: label, measured, predicted, error."""
    rows = []
    for key, figure in record["figures"].items():
        name, unit = label(key)
        sides = (show(figure[side], unit) for side in ("measured", "predicted"))
        rows.append([name, *sides, share_off(figure["error"])])
    return rows


def part_rows(record: Record) -> list[list[str]]:
    """A row per part of the mean E2EL: name, measured, predicted, difference."""
    parts = (record["residual"] or {"parts": []})["parts"]
    return [
        [
            part["name"],
            *(milliseconds(part[side]) for side in ("measured_ms", "predicted_ms")),
            signed(part["difference_ms"], "ms"),
        ]
        for part in parts
    ]


def correction_rows(record: Record) -> list[list[str]]:
    """A row per correction that was tried: words, the remedy, the error that is left."""
    return [
        [each["words"], each["remedy"], percent(each["misfit"])] for each in record["corrections"]
    ]


def verdict(record: Record, tokens_missing: float) -> list[Remark]:
    """All remarks on a check. `tokens_missing`: share of the gaps that the client did not see."""
    return [
        *_ending(record),
        *_correction(record),
        _farthest(record),
        *_judged(record),
        *_cause(record),
        *_seen(record),
        *_guessed(record),
        *_merged(tokens_missing),
    ]


def _ending(record: Record) -> Iterator[Remark]:
    """What of the run could not be replayed."""
    if not finished(record):
        yield Remark(f"The replay did not finish: {outcome_title(record).lower()}.", "bad")
    missing = record["requests"]["measured"] - record["requests"]["compared"]
    if missing:
        text = f"{plural(missing, 'measured request')} not completed in the replay, and left out."
        yield Remark(text, "warning")


def _farthest(record: Record) -> Remark:
    key, figure = max(record["figures"].items(), key=lambda each: abs(each[1]["error"]))
    name, unit = label(key)
    sides = (
        f"{show(figure['predicted'], unit)} predicted, {show(figure['measured'], unit)} measured"
    )
    error = share_off(figure["error"])
    return Remark(f"Largest error of {len(record['figures'])} metrics: {name}, {sides} ({error}).")


def _judged(record: Record) -> Iterator[Remark]:
    tolerance = record["tolerance"]
    if tolerance is None:
        return
    beyond = sum(abs(figure["error"]) > tolerance for figure in record["figures"].values())
    text = f"{count(beyond)} of {plural(len(record['figures']), 'figure')}"
    text += f" beyond the tolerance of {percent(tolerance)}."
    yield Remark(text, "bad" if beyond else "plain")


def _cause(record: Record) -> Iterator[Remark]:
    split = record["residual"]
    if split is None:
        return
    parts = split["parts"]
    whole = added(part["difference_ms"] for part in parts)
    listed = ", ".join(f"{part['name']} {signed(part['difference_ms'], 'ms')}" for part in parts)
    text = f"Predicted minus measured E2EL, on average {signed(whole, 'ms')}: {listed}."
    yield Remark(f"{text} {split['method']}")


def _seen(record: Record) -> Iterator[Remark]:
    """What was at work at once, where that differs."""
    found = record["signs"]
    if found is None:
        return
    real, ours = found["measured"], found["predicted"]
    words = []
    if abs(real["requests"] - ours["requests"]) > _SAME_PEAK * ours["requests"]:
        words.append(
            f"at most {plural(real['requests'], 'request')} past the first token at once"
            f" ({percent(real['share'])} of the time), {count(ours['requests'])} in the replay"
        )
    if abs(real["tokens"] - ours["tokens"]) > _SAME_PEAK * ours["tokens"]:
        words.append(
            f"at most {count(round(real['tokens']))} tokens of theirs,"
            f" {count(round(ours['tokens']))} in the replay"
        )
    if words:
        yield Remark(f"The measured times show {'; '.join(words)}.")


def named(record: Record) -> list[Record]:
    """The correction that explains the difference, and those as likely; empty if none does."""
    before, found = record["misfit"], record["corrections"]
    if not found or not before:
        return []
    left = found[0]["misfit"]
    if 1 - left / before < _WORTH or left > EXPLAINED:
        return []
    likely = [each for each in found[1:] if (each["misfit"] - left) / before < _AS_GOOD]
    return [found[0], *(each for each in likely if each["misfit"] <= EXPLAINED)]


def _correction(record: Record) -> Iterator[Remark]:
    """The correction that removes most of the misfit, or that none does."""
    if not record["corrections"] or not record["misfit"]:
        return
    best, found = record["corrections"][0], named(record)
    errors = f"{percent(record['misfit'])} to {percent(best['misfit'])}"
    if not found:
        text = "Neither one correction nor two explain the difference: the best takes the mean"
        yield Remark(f"{text} error from {errors}.", "warning")
        return
    text = f"Correct first: {best['words']}. That takes the mean error from {errors}."
    yield Remark(f"{text} Remedy: {best['remedy']}.", "warning")
    if others := [each["words"] for each in found[1:]]:
        yield Remark(f"Equally likely: {'; '.join(others)}.", "warning")


def _guessed(record: Record) -> Iterator[Remark]:
    """Settings that were not given, and times that were not measured."""
    meta = record["meta"]
    chosen = [key for key in ("model", "hardware") if key in (meta["assumed"] or {})]
    if chosen:
        options = " and ".join(f"--{key}" for key in chosen)
        text = f"Nobody said which {' and '.join(chosen)} was measured: give {options} first."
        yield Remark(text, "bad")
    if not measured(meta):
        yield Remark(f"{time_source(meta)}: not measured on this machine.", "warning")
    if meta["assumed"]:
        yield Remark(f"Assumed: {'; '.join(assumed(meta))}.")


def _merged(tokens_missing: float) -> Iterator[Remark]:
    if abs(tokens_missing) > _MERGED:
        text = f"The client saw {percent(abs(tokens_missing))}"
        text += f" {'fewer' if tokens_missing > 0 else 'more'} gaps than there are between tokens:"
        yield Remark(f"{text} its ITL is that of chunks; judge by TPOT.", "warning")


POINTS = 3000
"""Most requests of a scatter; more are thinned out evenly."""


def build_check(record: Mapping[str, Any]) -> str:
    """The page of a record of `kvsim.against.check.check`."""
    parts, corrections = part_rows(record), correction_rows(record)
    drawn = [_scatter(kind, record["points"]) for kind in LATENCIES if kind in record["points"]]
    beside = table(("", "measured", "predicted", "error"), figure_rows(record))
    differences = table(("mean", "measured", "predicted", "difference"), parts)
    tried = table(("correction", "remedy", "mean error left"), corrections, text_columns=2)
    fitted = "Each was fitted alone, by running the replay again."
    sections = {
        "Predicted beside measured": panel(None, beside),
        "Request by request": _requests(record, drawn),
        "Where the difference comes from": join(
            (panel(None, differences), lead(record["residual"]["method"]))
        )
        if parts
        else None,
        "What to correct": join((lead(fitted), panel(None, tried))) if corrections else None,
        "Provenance": provenance_panels(record["meta"]),
    }
    return document(
        "kvsim check",
        str(record["meta"]["trace"]["path"]).rpartition("/")[2],
        sections,
        subject=wording.subject(record["meta"]),
        remarks=[(each["text"], each["tone"]) for each in record["verdict"]],
    )


def _requests(record: Mapping[str, Any], drawn: Sequence[Figure]) -> Html:
    rows = [
        [
            LATENCIES[kind],
            plural(each["requests"], "request"),
            *(show(each[key], "share") for key in ("median", "p90")),
        ]
        for kind, each in record["spread"].items()
    ]
    errors = table(("error of single requests", "compared", "median", "p90"), rows)
    words = "A point per request; on the line, both are equal."
    return join((lead(words), placed(drawn, "trio"), panel(None, errors)))


def _scatter(kind: str, found: Mapping[str, Any]) -> Figure:
    """Predicted against measured times of one kind, with the line on which they are equal."""
    both = [
        (name, one, other)
        for name, one, other in zip(
            found["id"], found[kind]["measured_ms"], found[kind]["predicted_ms"], strict=True
        )
        if one is not None and other is not None
    ]
    most = max(max(one, other) for _, one, other in both)
    unit, per_unit = ("ms", 1.0) if most < 1000 else ("s", 1e3)
    shown = both[:: -(-len(both) // POINTS)]
    ends = [0, most / per_unit]
    x = compact(one / per_unit for _, one, _ in shown)
    y = compact(other / per_unit for *_, other in shown)
    hover = f"%{{text}}: %{{x:.4~g}} {unit} measured, %{{y:.4~g}} {unit} predicted<extra></extra>"
    dots = points(x, y, "used", size=5, opacity=0.5)
    dots |= {"text": [name for name, *_ in shown], "hovertemplate": hover}
    note = "" if len(shown) == len(both) else f"{len(shown):,} of {len(both):,} requests."
    return chart(
        f"scatter-{kind}",
        LATENCIES[kind],
        note,
        [line(ends, ends, "muted", width=1, dash="dot"), dots],
        titled(f"measured ({unit})", rangemode="tozero", showgrid=True, nticks=6),
        titled(f"predicted ({unit})"),
        height=300,
        hovermode="closest",
    )
