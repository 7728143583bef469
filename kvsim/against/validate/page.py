"""Writes the result of a validation: how far prices are from measurements, step by step and request
by request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvsim.against.validate.errors import (
    KINDS,
    LATENCIES,
    SIDES,
    count_rows,
    error_rows,
    latency_rows,
    sentence,
    share,
    signed_share,
)
from kvsim.cost.profile import distrust
from kvsim.report.pages.figures import (
    Figure,
    Trace,
    chart,
    compact,
    line,
    log_ticks,
    points,
    thinned,
    titled,
)
from kvsim.report.pages.html import (
    Html,
    columns,
    document,
    element,
    facts,
    join,
    key_of,
    lead,
    panel,
    placed,
    table,
    tags,
)
from kvsim.report.pages.latencies import curve, distribution_figures
from kvsim.results.numerals import count, plural, seconds
from kvsim.results.plain import flat
from kvsim.results.statistics import Floats

Result = Mapping[str, Any]

POINTS = 400
"""Most points of each kind of step in a scatter plot."""

KIND_COLOURS = ("decode", "prefill", "waiting")
KIND_LABELS = ("decodes alone", "prompts alone", "both")
SIDE_COLOURS = ("run-0", "run-2", "run-1")
SIDE_LABELS = ("real", "real again", "simulated")


def build_page(result: Result) -> str:
    """The page of a result of `compare`."""
    policies = result["policies"]
    sections = {
        "Errors": _errors(result),
        "Steps": join(map(_steps, policies)),
        "Requests": _requests(policies),
        "Decisions": _decisions(result),
        "Provenance": _provenance(result),
    }
    profile, requests = result["profile"], plural(result["trace"]["requests"], "request")
    named = [(f"times: {profile['path']}, {profile['source']}", "good")]
    if why := distrust(profile["error"]):
        named.append((f"the profile is marked as not trusted: {why}", "warning"))
    blocks = f"{result['engine']['kv_layout']} blocks of {result['engine']['block_size']} tokens"
    return document(
        "kvsim validate",
        f"{result['model']['name']} on {result['device']['name']}",
        sections,
        subject=f"{requests} of {result['trace']['path']}, {blocks}",
        about=[tags(named)],
        remarks=[(sentence(policy), "plain") for policy in policies],
    )


def step_figures(policy: Result) -> list[Figure]:
    """Predicted against measured, and the distribution of errors beside the noise."""
    steps = {key: np.array(values) for key, values in policy["points"].items()}
    return [_scatter(policy["name"], steps), _error_curves(policy["name"], steps)]


def latency_figures(policy: Result) -> list[Figure]:
    """The distribution of each latency for the three runs, in one chart each."""
    sides = [
        (
            label,
            colour,
            {k: 1e6 * np.array(policy["latencies_ms"][k][side], float) for k in LATENCIES},
        )
        for side, label, colour in zip(SIDES, SIDE_LABELS, SIDE_COLOURS, strict=True)
    ]
    figures = distribution_figures(sides)
    return [figure._replace(id=f"{policy['name']}-{figure.id}") for figure in figures]


def _scatter(name: str, steps: Mapping[str, Floats]) -> Figure:
    measured, predicted = steps["measured_us"] / 1e3, steps["predicted_us"] / 1e3
    data: list[Trace] = []
    for kind, (label, colour) in enumerate(zip(KIND_LABELS, KIND_COLOURS, strict=True)):
        (which,) = np.nonzero(steps["kind"] == kind)
        if len(which):
            shown = which[thinned(len(which), POINTS)]
            x, y = compact(measured[shown]), compact(predicted[shown])
            hover = "measured %{x:.4~g} ms<br>predicted %{y:.4~g} ms"
            named = {"name": label, "hovertemplate": hover}
            data.append(points(x, y, colour, size=5, opacity=0.55) | named)
    together = np.concatenate((measured, predicted))
    together = together[together > 0]
    ends = float(together.min()) / 1.15, float(together.max()) * 1.15
    data.append(line(compact(ends), compact(ends), "ink", width=1))
    axis = {**log_ticks(*ends), "range": [math.log10(end) for end in ends]}
    return chart(
        f"{name}-scatter",
        "Predicted against measured",
        "Each point is a step of the real run. On the line, the profile is right.",
        data,
        titled("measured (ms)", showgrid=True, **axis),
        titled("predicted (ms)", **axis),
        height=320,
        hovermode="closest",
    )


def _error_curves(name: str, steps: Mapping[str, Floats]) -> Figure:
    """Cumulative distribution of the errors of single steps."""
    data, widest = list[Trace](), 1.0
    for label, colour, key in (
        ("prediction", "run-1", "predicted_us"),
        ("measured again", "run-0", "again_us"),
    ):
        distance = 100 * np.abs(steps[key] / steps["measured_us"] - 1)
        widest = max(widest, float(np.percentile(distance, 98)))
        data.append(curve(distance, colour, label))
    x = titled(
        "distance from the measured time (%)",
        range=[0, widest],
        showgrid=True,
        unifiedhovertitle={"text": "within %{x:.3~g} %"},
    )
    y = titled("steps (%)", range=[0, 103], dtick=25)
    note = "The share of steps whose error is at most the value on the axis. Grey: the noise."
    return chart(f"{name}-errors", "Errors of single steps", note, data, x, y, height=320)


def _errors(result: Result) -> Html:
    words = "Errors of the profile, and in brackets those of a second real run, the noise: an error"
    words += " below its noise is not significant. The clock of the real engine is the sum of"
    words += " its measured steps. Where requests queue, a small error of every step adds up."
    head, rows = error_rows(result)
    return join((lead(words), panel(None, table(head, rows))))


def _steps(policy: Result) -> Html:
    steps = policy["steps"]
    names = {"all": "all", **dict(zip(KINDS, KIND_LABELS, strict=True))}
    rows = [_step_row(label, steps[name]) for name, label in names.items() if name in steps]
    if policy["copies"] is not None:
        copies = policy["copies"]
        label = f"copies to and from the CPU, {count(copies['blocks'])} blocks"
        rows.append(_step_row(label, {**copies, "share_of_time": None}))
    head = ["Steps", "Number", "Share of time", "Median", "p95", "Worst", "Together"]
    head += ["Noise: median", "p95", "Together"]
    words = f"{plural(steps['count'], 'step')}, {seconds(steps['measured_s'])} in all."
    if steps["extrapolated"]:
        words += f" {count(steps['extrapolated'])} of them lie outside the tables of the profile."
    return join(
        (
            element("h3", policy["name"]),
            lead(words),
            placed(step_figures(policy), "trio"),
            panel(None, table(head, rows)),
        )
    )


def _step_row(label: str, errors: Result) -> list[str]:
    prediction, noise = errors["prediction"], errors["noise"]
    return [
        label,
        count(errors["count"]),
        share(errors["share_of_time"]),
        *(share(prediction[key]) for key in ("median", "p95", "max")),
        signed_share(prediction["total"]),
        *(share(noise[key]) for key in ("median", "p95")),
        signed_share(noise["total"]),
    ]


def _requests(policies: Sequence[Result]) -> Html:
    parts: list[Html] = [key_of(zip(SIDE_COLOURS, SIDE_LABELS, strict=True))]
    for policy in policies:
        head, rows = latency_rows(policy)
        parts += [
            element("h3", policy["name"]),
            placed(latency_figures(policy), "trio"),
            panel(None, table(head, rows)),
        ]
    return join(parts)


def _decisions(result: Result) -> Html:
    words = "Real, real again, simulated. Scheduler and block manager are the same in all three, so"
    words += " they differ only where step times led to another state."
    head, rows = count_rows(result)
    return join((lead(words), panel(None, table(head, rows))))


def _provenance(result: Result) -> Html:
    engine = {key: value for key, value in result["engine"].items() if key != "capture_sizes"}
    profile = {key: value for key, value in result["profile"].items() if key != "error"}
    named = {
        "Device": result["device"],
        "Software": result["software"],
        "Model": result["model"],
        "Engine": engine,
        "Profile": profile,
        "Trace": result["trace"],
        **{f"Policy {each['name']}": each["settings"] for each in result["policies"]},
    }
    return columns(panel(title, facts(flat(each))) for title, each in named.items())
