"""Writes the result of a validation as one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvsim.report.document import document, figure_place, masthead
from kvsim.report.figures import Figure
from kvsim.report.html import Html, element, join, key_of, panel, table
from kvsim.report.numerals import count, plural, seconds
from kvsim.report.provenance import facts, flat
from kvsim.validate import wording
from kvsim.validate.figures import (
    KIND_LABELS,
    SIDE_COLOURS,
    SIDE_LABELS,
    latency_figures,
    step_figures,
)
from kvsim.validate.replay import KINDS

Result = Mapping[str, Any]


def build_page(result: Result) -> str:
    """The page of a result of `compare`. It needs no other file; equal results give equal bytes."""
    steps = {policy["name"]: step_figures(policy) for policy in result["policies"]}
    spread = {policy["name"]: latency_figures(policy) for policy in result["policies"]}
    sections = {
        "Errors": _errors(result),
        "Steps": join(_steps(policy, steps[policy["name"]]) for policy in result["policies"]),
        "Requests": _requests(result, spread),
        "Decisions": _decisions(result),
        "Provenance": _provenance(result),
    }
    figures = [figure for each in (steps, spread) for listed in each.values() for figure in listed]
    return document(_title(result), _header(result), sections, figures)


def _title(result: Result) -> str:
    return f"{result['model']['name']} on {result['device']['name']}"


def _header(result: Result) -> Html:
    profile = result["profile"]
    trusted = profile["error"].get("trusted")
    tags = [element("span", f"times: {profile['path']}, {profile['source']}", class_="tag good")]
    if trusted is False:
        why = "; ".join(profile["error"].get("why", ()))
        words = f"the profile is marked as not trusted: {why}"
        tags.append(element("span", words, class_="tag warning"))
    subject = f"{plural(result['trace']['requests'], 'request')} of {result['trace']['path']},"
    subject += f" {result['engine']['kv_layout']} blocks of {result['engine']['block_size']} tokens"
    return masthead(
        "kvsim validation",
        _title(result),
        element("p", *tags, class_="tags"),
        subject=subject,
        remarks=[(wording.verdict(policy), "plain") for policy in result["policies"]],
    )


def _errors(result: Result) -> Html:
    lead = "Errors of the profile, and in brackets those of a second real run, the noise: an error"
    lead += " below its noise is not significant. The clock of the real engine is the sum of"
    lead += " its measured steps. Where requests queue, a small error of every step adds up."
    head, rows = wording.error_rows(result)
    return join((element("p", lead), panel(None, table(head, rows))))


def _steps(policy: Result, figures: list[Figure]) -> Html:
    steps = policy["steps"]
    names = {"all": "all", **dict(zip(KINDS, KIND_LABELS, strict=True))}
    rows = [_step_row(label, steps[name]) for name, label in names.items() if name in steps]
    if policy["copies"] is not None:
        copies = policy["copies"]
        label = f"copies to and from the CPU, {count(copies['blocks'])} blocks"
        rows.append(_step_row(label, {**copies, "share_of_time": None}))
    head = ["Steps", "Number", "Share of time", "Median", "p95", "Worst", "Together"]
    head += ["Noise: median", "p95", "Together"]
    lead = f"{plural(steps['count'], 'step')}, {seconds(steps['measured_s'])} in all."
    if steps["extrapolated"]:
        lead += f" {count(steps['extrapolated'])} of them lie outside the tables of the profile."
    return join(
        (
            element("h3", policy["name"]),
            element("p", lead),
            element("div", *(figure_place(figure) for figure in figures), class_="trio"),
            panel(None, table(head, rows)),
        )
    )


def _step_row(label: str, errors: Result) -> list[str]:
    prediction, noise = errors["prediction"], errors["noise"]
    return [
        label,
        count(errors["count"]),
        wording.share(errors["share_of_time"]),
        *(wording.share(prediction[key]) for key in ("median", "p95", "max")),
        wording.signed_share(prediction["total"]),
        *(wording.share(noise[key]) for key in ("median", "p95")),
        wording.signed_share(noise["total"]),
    ]


def _requests(result: Result, figures: Mapping[str, list[Figure]]) -> Html:
    colours = (f"var(--{colour})" for colour in SIDE_COLOURS)
    parts: list[Html] = [key_of(zip(colours, SIDE_LABELS, strict=True))]
    for policy in result["policies"]:
        head, rows = wording.latency_rows(policy)
        drawn = (figure_place(figure) for figure in figures[policy["name"]])
        parts += [
            element("h3", policy["name"]),
            element("div", *drawn, class_="trio"),
            panel(None, table(head, rows)),
        ]
    return join(parts)


def _decisions(result: Result) -> Html:
    lead = "Real, real again, simulated. Scheduler and block manager are the same in all three, so"
    lead += " they differ only where step times led to another state."
    head, rows = wording.count_rows(result)
    return join((element("p", lead), panel(None, table(head, rows))))


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
    panels = (panel(title, facts(flat(each))) for title, each in named.items())
    return element("div", *panels, class_="columns")
