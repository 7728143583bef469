"""States advice: in sentences, as plain values, as a command line to paste, and as a page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from msgspec.structs import replace

from kvsim.engines import ENGINES
from kvsim.explain import MARGIN
from kvsim.explain.cache_curve import Asked, study_trace
from kvsim.explain.certainty import LEVEL
from kvsim.machine.memory import block_bytes
from kvsim.report import Remark, diagnosis_of, measured, time_source
from kvsim.report.compare import NO_DIFFERENCE
from kvsim.report.pages.cache import sentences as study_sentences
from kvsim.report.pages.compare import interval_figure
from kvsim.report.pages.html import (
    Html,
    card,
    cards,
    document,
    element,
    join,
    lead,
    panel,
    placed,
    table,
    tags,
)
from kvsim.results.numerals import count, interval, percent, plural, show, signed
from kvsim.results.plain import plain
from kvsim.run.assembly import assemble
from kvsim.run.told import settled
from kvsim.search.advise import Advice, Change, Tried
from kvsim.search.sweep import value_words
from kvsim.search.sweep_page import origin_panels
from kvsim.settings.config import RunConfig, to_table
from kvsim.settings.server import ServerWord
from kvsim.settings.server.arguments import Argument
from kvsim.settings.server.command import flags, given_settings, serve_line
from kvsim.version import __version__
from kvsim.workload.reuse import Counting
from kvsim.workload.trace import Trace

NOT_CERTAIN = "not certain"


def present(advice: Advice) -> list[Remark]:
    """What the present settings suffer from on the first seed, and where step times come from."""
    cost = assemble(advice.base.config).cost
    meta = {"cost": {"kind": cost.kind, "source": cost.source}}
    source = Remark(f"{time_source(meta)}.", "plain" if measured(meta) else "warning")
    return [*diagnosis_of(advice.base.runs[0]), source]


def sentences(advice: Advice) -> list[str]:
    """How the present settings do, what to change, and what else was seen."""
    return [_now(advice), _change(advice), _others(advice)]


def method(advice: Advice) -> str:
    """How it was tried, and how sure it is."""
    if not advice.redrawn:
        return (
            "Nothing in these runs is random: each is one exact replay of the trace. Intervals say"
            " what other stretches of the same traffic would give, where the trace is long enough."
        )
    return (
        f"{plural(len(advice.base.runs), 'seed')}, the same for every change; seeds differ in"
        f" {' and '.join(advice.redrawn)}. All verdicts hold together with"
        f" {percent(1 - LEVEL)} confidence."
    )


def rows(advice: Advice) -> Iterator[tuple[str, str, str]]:
    """Every value by itself, below its setting; then the values that belong together. Beside it the
    difference with its interval, and the finding.

    Values that make no difference share a line.
    """
    for key, members in groupby(advice.singles, key=lambda each: each.changes[0].key):
        yield key, "", ""
        for same, group in groupby(members, key=lambda m: _finding(advice, m) == NO_DIFFERENCE):
            listed = list(group)
            if same:
                values = ", ".join(_value(each.changes[0]) for each in listed)
                yield f"  {values}", NO_DIFFERENCE, ""
                continue
            for each in listed:
                yield f"  {_value(each.changes[0])}", *_judged(advice, each)
    if len(advice.best.changes) > 1:
        names = " + ".join(map(named, advice.best.changes))
        yield "together", "", ""
        yield f"  {names}", *_judged(advice, advice.best)


def not_tried(advice: Advice) -> Iterator[str]:
    """A line for each setting some values of which are impossible, with the first reason."""
    for key, members in groupby(advice.untried, key=lambda each: each.key):
        listed = list(members)
        values = ", ".join(value_words(each.value) for each in listed)
        yield f"Not tried: {key} {values} ({listed[0].reason})."


def record(advice: Advice, line: str) -> dict[str, Any]:
    """Everything as plain values, for a JSON file. `line`: how to start the server."""
    return {
        "slo": advice.objectives.text,
        "decides": advice.decides.metric.key,
        "unit": advice.decides.metric.unit,
        "sentences": sentences(advice),
        "command": line,
        "seeds": len(advice.base.runs),
        "planned_seeds": advice.planned,
        "redrawn": list(advice.redrawn),
        "confidence": 1 - LEVEL,
        "margin": MARGIN,
        "base": _tried(advice, advice.base),
        "advice": _tried(advice, advice.best),
        "tried": [_tried(advice, each) for each in advice.singles],
        "untried": [each._asdict() for each in advice.untried],
    }


def _now(advice: Advice) -> str:
    base, decides = advice.base, advice.decides
    met, seeds = base.met, len(base.runs)
    where = f" on {met} of {plural(seeds, 'seed')}" if seeds > 1 else ""
    value = show(base.mean(decides), decides.metric.unit)
    mean = " on average" if seeds > 1 else ""
    if met:
        tightest = f"the tightest is {decides}, at {value}{mean}"
        return f"The present settings meet all objectives{where}; {tightest}."
    return f"The present settings miss {decides}: it is {value}{mean}."


def _change(advice: Advice) -> str:
    best, decides = advice.best, advice.decides
    if best is advice.base:
        number = plural(len(advice.singles), "change")
        kept = (
            f"No tested change helps: of {number}, none is sure to improve {decides.metric.label}."
        )
        if best.met == len(best.runs):
            return kept
        return f"{kept} `kvsim size` finds the memory, the replicas or the rate that would do."
    met, seeds = best.met, len(best.runs)
    outcome = (
        "which meets all objectives"
        if met == seeds
        else "which still misses the objectives"
        if not met
        else f"which meets all objectives on {met} of {plural(seeds, 'seed')}"
    )
    changes = " and ".join(map(named, best.changes))
    becomes = f"{decides.metric.label} becomes {show(best.mean(decides), decides.metric.unit)}"
    return f"Set {changes}: {becomes} (difference {_interval(advice, best)}), {outcome}."


def _others(advice: Advice) -> str:
    """Changes with a caveat that help, then settings that make no difference."""
    parts = []
    for each in advice.singles:
        change = each.changes[0]
        if change.trial.caveat and advice.helps(each):
            metric, mean = advice.decides.metric, each.mean(advice.decides)
            parts.append(
                f"Left out: {named(change)} alone gives {metric.label} {show(mean, metric.unit)},"
                f" but {change.trial.caveat}"
            )
    by_key: dict[str, set[str]] = {}
    for each in advice.singles:
        by_key.setdefault(each.changes[0].key, set()).add(_finding(advice, each))
    same = [key for key, findings in by_key.items() if findings <= {NO_DIFFERENCE}]
    if same:
        parts.append(f"{NO_DIFFERENCE if parts else NO_DIFFERENCE.capitalize()}: {', '.join(same)}")
    return f"{'; '.join(parts) or 'Every setting tried makes a difference, or may make one'}."


def _judged(advice: Advice, tried: Tried) -> tuple[str, str]:
    """The difference with its interval, and the finding."""
    finding, verdict = _finding(advice, tried), tried.verdict
    if verdict is None:
        return "", finding
    difference = signed(verdict.difference, advice.decides.metric.unit)
    return f"{difference} ({_interval(advice, tried)})", finding


def _finding(advice: Advice, tried: Tried) -> str:
    """`better`, `worse`, `no difference`, `not certain`, or how the run ended."""
    verdict = tried.verdict
    if verdict is None:
        kinds = (str(run["outcome"]["kind"]) for run in tried.runs)
        ended = next((kind for kind in kinds if kind != "finished"), "undefined")
        return ended.replace("-", " ")
    if verdict.finding in ("same", "equal"):
        return NO_DIFFERENCE
    if verdict.finding == "insignificant":
        return NOT_CERTAIN
    return "better" if (verdict.difference < 0) == advice.decides.below else "worse"


def _interval(advice: Advice, tried: Tried) -> str:
    verdict, unit = tried.verdict, advice.decides.metric.unit
    if verdict is None or verdict.low == verdict.high:
        return "exact for this trace"
    return interval(verdict.low, verdict.high, unit)


def named(change: Change) -> str:
    """A setting and its value: `max_num_seqs 64`."""
    return f"{change.key} {_value(change)}"


def _value(change: Change) -> str:
    if isinstance(change.value, bool):
        return "on" if change.value else "off"
    return value_words(change.value)


def _tried(advice: Advice, tried: Tried) -> Mapping[str, Any]:
    verdict = None if tried.verdict is None else tried.verdict._asdict()
    return {
        "settings": tried.settings,
        "values": tried.values(advice.decides),
        "mean": tried.mean(advice.decides),
        "seeds_met": tried.met,
        "why": [change.trial.why for change in tried.changes],
        "caveats": [change.trial.caveat for change in tried.changes if change.trial.caveat],
        "verdict": verdict,
        "finding": _finding(advice, tried) if tried.changes else "",
    }


def cache_sentences(trace: Trace, config: RunConfig) -> list[str]:
    """The hits of a cache as large as the pool, alone; none where nothing can hit."""
    parts = assemble(config)
    if not parts.blocks.needs_keys or not any(row.content for row in trace.rows):
        return []
    blocks, each_bytes = parts.blocks, block_bytes(parts.model, parts.config)
    asked = Asked([blocks.gpu.size], block_bytes=each_bytes, points=0)
    study = study_trace(trace, Counting(blocks.block_size), asked)
    return [f"Prefix cache alone: {sentence}" for sentence in study_sentences(study)]


def serve_command(advice: Advice, word: ServerWord, given: Sequence[Argument]) -> str:
    """The server's command line with the advice; for other engines, that of `kvsim run`.

    `given`: the arguments of the line that the server has now; empty if nobody gave one.
    """
    best = advice.best.config
    engine = ENGINES.get(best.engine)
    if engine is None or engine.vllm_version is None:
        changes = {"engine": best.engine, **advice.best.settings}
        return shlex.join(["kvsim", "run", *flags(changes)])
    settings = given_settings(best, assemble(best).model.source)
    pool, base = "num_gpu_blocks_override", advice.base.config
    if counted := word.counted_with.get(pool):
        logged, _ = settled(replace(base, num_gpu_blocks_override=counted), word)
        if logged.num_gpu_blocks_override == base.num_gpu_blocks_override:
            settings.pop(pool, None)  # no argument of the server
    if given:
        said = word.settings
        settings = {key: value for key, value in settings.items() if said.get(key) != value}
    return serve_line(given, {**settings, **advice.best.settings})


PAGE, NAME = "advice.html", "advice.json"
_INDENT = "\u2003"


def build_page(
    advice: Advice, trace: Trace, now: Sequence[Remark], cache: Sequence[str], line: str
) -> str:
    """The page of an advice. `now`: what the present settings suffer from, and last where step
    times come from. `cache`: sentences on the prefix cache. `line`: how to start the server."""
    base, source = assemble(advice.base.config).config, now[-1]
    sent = min(len(trace.rows), base.num_prompts or len(trace.rows))
    subject = base.engine, base.model, base.hardware, plural(sent, "request")
    changed = ", ".join(map(named, advice.best.changes))
    sections = {
        "At a glance": _cards(advice),
        "Command line": panel(None, element("pre", line)),
        "Every change": _every_change(advice),
        "Prefix cache": join(map(lead, cache)) if cache else None,
        "To repeat it": _origin(advice, trace),
    }
    return document(
        "kvsim advise",
        f"Set {changed}" if changed else "No tested change helps",
        sections,
        subject=" · ".join(str(each) for each in subject if each is not None),
        about=[tags([(source.text, "good" if source.tone == "plain" else "warning")])],
        remarks=[*now[:-1], *map(Remark, sentences(advice))],
    )


def _cards(advice: Advice) -> Html:
    """Every objective: its limit, and its figure before and after."""
    best = advice.best if advice.best.changes else None
    shown = []
    for each in advice.objectives.each:
        unit, before = each.metric.unit, advice.base.mean(each)
        after = None if best is None else best.mean(each)
        words = (
            show(before, unit) if after is None else f"{show(before, unit)} → {show(after, unit)}"
        )
        last = before if after is None else after
        kept = last is not None and each.met({each.metric.key: last})
        shown.append(card(each.metric.label, words, str(each), tone="better" if kept else "worse"))
    met = f"{count((best or advice.base).met)} of {len(advice.base.runs)}"
    return cards([*shown, card("Seeds that meet all objectives", met)])


def _every_change(advice: Advice) -> Html:
    tried = [*advice.singles, advice.best] if advice.best.changes[1:] else advice.singles
    drawn = [
        (" + ".join(map(named, each.changes)), each.verdict)
        for each in tried
        if each.verdict is not None and each.verdict.finding not in ("same", "equal")
    ]
    mean = advice.base.mean(advice.decides)
    difference = f"{advice.decides.metric.label}: difference"
    body = [(name.replace("  ", _INDENT), *found) for name, *found in rows(advice)]
    parts: list[object] = [lead(method(advice))]
    if mean and drawn:
        title = f"{advice.decides.metric.label}: difference to the present settings"
        parts.append(placed([interval_figure(title, mean, drawn)]))
    parts.append(panel(None, table(["Setting", difference, ""], body, text_columns=3)))
    return join([*parts, *map(lead, not_tried(advice))])


def _origin(advice: Advice, trace: Trace) -> Html:
    origin = {
        "Trace": trace.path,
        "Trace SHA-256": trace.sha256,
        "Objectives": advice.objectives.text,
        "Seeds": count(len(advice.base.runs)),
        "kvsim": __version__,
    }
    return origin_panels(origin, plain(to_table(advice.base.config)))
