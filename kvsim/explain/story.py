"""Tells what happened to one request, moment by moment, and why the slowest requests are slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvsim.core.records import LOADING, PREEMPTED, RELOADING, SWAPPED_OUT
from kvsim.core.request import ABORTED
from kvsim.core.schema import BLOCKED
from kvsim.errors import OutputError, nearest
from kvsim.explain.differences import LABELS
from kvsim.results.ledger import (
    PROMPT_PARTS,
    TIME_LABELS,
    TIME_PARTS,
    WAITING_FOR,
    standings,
)
from kvsim.results.ledger.time import reasons
from kvsim.results.metrics import LATENCIES
from kvsim.results.numerals import count, percent, plural, seconds
from kvsim.results.statistics import completed, durations_ns, ints
from kvsim.results.summary import parts_of
from kvsim.results.timeline import Columns, run_end_ns

NAMED = 4
"""Most other requests that a sentence names."""
BEGINNING, END = 24, 10
"""Number of first and of last losses and returns that are listed where there are very many."""
SEPARATE = 4
"""Changes of the reason to wait, up to which each is listed by itself."""

_PASSED = {
    standings.NAMES[standings.PREEMPTED]: "admitted again after {}",
    standings.NAMES[standings.RECOMPUTE]: "recomputed its lost KV in {}",
    standings.NAMES[standings.SWAPPED]: "its blocks began to come back after {}",
    standings.NAMES[standings.HELD]: "waited {} for a store, or a load of another request",
    standings.NAMES[standings.LOADING]: "its load was over after {}",
    standings.NAMES[standings.RELOADING]: "its load was over after {}",
    standings.NAMES[standings.LATE]: (
        "went on after {} without a slot, as blocks were released late"
    ),
}
"""Text for the end of a time in this standing."""


_HAPPENED = {
    PREEMPTED: ("preempted{why}: lost the KV of {what}", "token"),
    SWAPPED_OUT: ("swapped out{why}: {what} to the CPU", "block"),
    LOADING: ("began to load {what} into its blocks", "token"),
    RELOADING: ("began to load {what} into its blocks", "token"),
}
"""Kind of transition → what happened, to tokens or to blocks."""


class Moment(NamedTuple):
    """Something that happened, or began to."""

    time_ns: int
    text: str


class Spell(NamedTuple):
    """A time in one standing."""

    standing: str
    begin_ns: int
    end_ns: int


class Story(NamedTuple):
    """What happened to a request."""

    id: str
    about: str
    arrival_ns: int
    moments: list[Moment]
    spells: list[Spell]
    times_ns: dict[str, int]
    """By `TIME_PARTS`, without those that are 0."""
    tokens: dict[str, int]
    """By `PROMPT_PARTS`, without those that are 0; empty without prefix caching."""

    @property
    def verdict(self) -> str:
        """What took the most of its time, in a sentence; empty for a request without any time."""
        if not self.times_ns:
            return ""
        part, ns = max(self.times_ns.items(), key=lambda each: each[1])
        share = percent(ns / sum(self.times_ns.values()))
        return f"Most of its time: {TIME_LABELS[part]}, {seconds(ns / 1e9)} ({share})."


def ledger_rows(values: Mapping[str, int], labels: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Label, value and share of each part of a story; parts that end in `_ns` are times."""
    whole = sum(values.values())
    rows = []
    for name, value in values.items():
        amount = seconds(value / 1e9) if name.endswith("_ns") else count(value)
        rows.append((labels[name], amount, percent(value / whole)))
    return rows


def find_request(requests: Columns, id: str) -> int:
    """The index of the request with this id. Raises `OutputError` with the nearest id."""
    ids = [str(each) for each in requests["id"]]
    if id in ids:
        return ids.index(id)
    near = nearest(id, ids) or " the page of a run lists them"
    raise OutputError(f"--request: no {id!r} among {plural(len(ids), 'request')};{near}")


def tell(
    summary: Mapping[str, Any], requests: Columns, steps: Columns, transitions: Columns, index: int
) -> Story:
    """The story of one request."""
    run = _Run(summary, requests, steps, transitions)
    found = PROMPT_PARTS if PROMPT_PARTS[1] in requests else ()
    spells = _spells(run, index)
    return Story(
        run.name(index),
        _about(run, index),
        max(int(requests["arrival_ns"][index]), 0),
        [] if requests["arrival_ns"][index] < 0 else _moments(run, index, spells),
        spells,
        {name: ns for name, ns in parts_of(requests, index).items() if ns},
        {name: int(requests[name][index]) for name in found if requests[name][index]},
    )


_READ = (
    "start_ns",
    "blocked",
    "waiting",
    "running",
    "prefill_seqs",
    "prefill_tokens",
    "decode_seqs",
    "free_blocks",
    "cached_blocks",
)
"""Columns of steps that a story reads."""


class _Run:
    """A run, with the columns that a story looks up repeatedly."""

    def __init__(
        self, summary: Mapping[str, Any], requests: Columns, steps: Columns, transitions: Columns
    ) -> None:
        self.summary, self.requests, self.transitions = summary, requests, transitions
        self.starts, self.step_ends = steps["start_ns"], steps["end_ns"]
        self.steps = {name: np.asarray(steps[name]) for name in _READ}
        self.end_ns = run_end_ns(steps, requests)
        self.ends = standings.ends_ns(requests, self.end_ns)
        self.first_steps = standings.first_steps_ns(requests, transitions)

    def name(self, index: int) -> str:
        return str(self.requests["id"][index])

    def state(self, time_ns: int) -> dict[str, int]:
        """The row of the last step that had begun by then, or of the first; empty without steps."""
        if not len(self.starts):
            return {}
        row = max(int(np.searchsorted(self.starts, time_ns, side="right")) - 1, 0)
        return {name: int(column[row]) for name, column in self.steps.items()}

    def running(self, begin_ns: int, end_ns: int, but: int) -> list[int]:
        """Other requests that had begun and not ended in this time, the first to end first."""
        first = self.first_steps
        here = (first >= 0) & (first < end_ns) & (self.ends > begin_ns)
        here[but] = False
        others = np.flatnonzero(here)
        return [int(i) for i in others[np.argsort(self.ends[others], kind="stable")]]

    def names(self, requests: list[int]) -> str:
        """The names of up to `NAMED` requests, and the number of the others."""
        listed, others = ", ".join(map(self.name, requests[:NAMED])), len(requests) - NAMED
        return f"{listed} and {count(others)} more" if others > 0 else listed


def _about(run: _Run, index: int) -> str:
    requests = run.requests
    prompt, output = (int(requests[name][index]) for name in ("input_length", "output_tokens"))
    text = f"{plural(prompt, 'prompt token')}, {plural(output, 'output token')}"
    arrival, finish = int(requests["arrival_ns"][index]), int(requests["finish_ns"][index])
    if arrival < 0:
        return f"{text}; never sent: {requests['reason'][index]}"
    if requests["status"][index] == "completed":
        text += f"; E2EL {seconds((finish - arrival) / 1e9)}"
    elif requests["status"][index] == ABORTED:
        text += f"; given up by its client after {seconds((finish - arrival) / 1e9)}"
    else:
        text += f"; rejected: {requests['reason'][index]}"
    first = int(requests["first_token_ns"][index])
    if first >= 0:
        text += f", TTFT {seconds((first - arrival) / 1e9)}"
    preempted = int(requests["num_preemptions"][index])
    return f"{text}, {plural(preempted, 'preemption')}" if preempted else text


def _moments(run: _Run, index: int, spells: list[Spell]) -> list[Moment]:
    """Everything that happened to a request that was sent, in order."""
    moments = _arrival(run, index)
    for spell in spells:
        if spell.standing == standings.NAMES[standings.WAITING]:
            moments += _waits(run, index, spell.begin_ns, spell.end_ns)
    turns, begun = _turns(run, index, spells), int(run.first_steps[index])
    # At one instant, loads come before the first step, and losses after the first token.
    moments += [turn for turn in turns if turn.time_ns <= begun]
    moments += _first_step(run, index)
    first = int(run.requests["first_token_ns"][index])
    if first >= 0:
        moments.append(Moment(first, "first token"))
    moments += [turn for turn in turns if turn.time_ns > begun]
    moments.append(_end(run, index))
    return sorted(moments, key=lambda moment: moment.time_ns)


def _turns(run: _Run, index: int, spells: list[Spell]) -> list[Moment]:
    """Losses of its blocks and what followed; of very many, the first and the last."""
    turns: list[tuple[int, Callable[[], str]]] = []
    for spell in spells:
        if spell.standing in _PASSED and spell.end_ns < run.ends[index]:
            took = seconds((spell.end_ns - spell.begin_ns) / 1e9)
            turns.append((spell.end_ns, partial(_PASSED[spell.standing].format, took)))
    own = run.transitions["request"] == index
    columns = (run.transitions[name][own].tolist() for name in ("kind", "time_ns", "value"))
    for kind, time_ns, value in zip(*columns, strict=True):
        if kind in _HAPPENED:
            turns.append((time_ns, partial(_happened, run, index, kind, time_ns, value)))
    turns.sort(key=lambda turn: turn[0])
    left_out = len(turns) - BEGINNING - END
    if left_out <= 1:
        return [Moment(time_ns, words()) for time_ns, words in turns]
    shown = [Moment(time_ns, words()) for time_ns, words in (*turns[:BEGINNING], *turns[-END:])]
    gap = Moment(turns[BEGINNING][0], f"… and {count(left_out)} more such moments")
    return [*shown[:BEGINNING], gap, *shown[BEGINNING:]]


def _arrival(run: _Run, index: int) -> list[Moment]:
    requests = run.requests
    arrival, held = int(requests["arrival_ns"][index]), int(requests["client_queue_ns"][index])
    moments = []
    if held:
        released = int(requests["released_ns"][index])
        text = f"was due; its client held it back for {seconds(held / 1e9)}"
        moments.append(Moment(released, text))
    state = run.state(arrival)
    text = "arrived"
    if state and run.starts[0] <= arrival:
        free = state["free_blocks"] + state["cached_blocks"]
        text += (
            f"; {count(state['waiting'])} waiting, {count(state['running'])} running,"
            f" {count(free)} of {count(run.summary['meta']['num_gpu_blocks'])} blocks free"
        )
    return [*moments, Moment(arrival, text)]


def _waits(run: _Run, index: int, arrival: int, end: int) -> list[Moment]:
    """What it waited for from `arrival` to `end`, before its first step."""
    first, last = np.searchsorted(run.starts, (arrival, end), side="left")
    moments = []
    # Until the next step begins, it waits for the one under way.
    lead = (int(run.starts[first]) if first < last else end) - arrival
    if lead:
        moments.append(Moment(arrival, _waited(lead, "waiting_step_ns")))
    blocked, prompts = (run.steps[name][first:last] for name in ("blocked", "prefill_seqs"))
    why = reasons(blocked, prompts, int(run.summary["meta"].get("steps_in_flight", 1)))
    changes = np.flatnonzero(np.diff(why, prepend=-1))
    if len(changes) > SEPARATE:
        return [*moments, _long_wait(run, index, int(run.starts[first]), end)]
    for place, change in enumerate(changes):
        begin = int(run.starts[first + change])
        following = changes[place + 1] if place + 1 < len(changes) else last - first
        stop = int(run.starts[first + following]) if first + following < last else end
        others = run.running(begin, stop, index)
        text = _waited(stop - begin, WAITING_FOR[BLOCKED[int(why[change])]])
        moments.append(Moment(begin, f"{text}, while {run.names(others)} ran" if others else text))
    return moments


def _long_wait(run: _Run, index: int, begin: int, end: int) -> Moment:
    """A wait whose reason changed often, in one sentence."""
    refused = list(WAITING_FOR.values())[1:]
    times = {part: int(run.requests[part][index]) for part in refused}
    order = sorted((part for part in times if times[part]), key=lambda part: -times[part])
    text = "; ".join(_waited(times[part], part) for part in order)
    others = run.running(begin, end, index)
    return Moment(begin, f"{text}, in turns, while {run.names(others)} ran")


def _waited(ns: int, part: str) -> str:
    return f"waited {seconds(ns / 1e9)}{TIME_LABELS[part].removeprefix('waiting')}"


def _first_step(run: _Run, index: int) -> list[Moment]:
    """What led to its first step."""
    requests, begun = run.requests, int(run.first_steps[index])
    if begun < 0 or begun > run.ends[index]:
        return []
    ended = np.flatnonzero(requests["finish_ns"] == requests["first_scheduled_ns"][index])
    before = [int(i) for i in ended if i != index and requests["first_scheduled_ns"][i] >= 0]
    text = "first step"
    waited = int(requests["first_scheduled_ns"][index] - requests["arrival_ns"][index])
    if before and waited:
        text = f"{run.names(before)} ended; first step"
    cached = int(requests["num_cached_tokens"][index])
    if PROMPT_PARTS[1] in requests:
        prompt = int(requests["input_length"][index])
        text += f": {count(cached)} of {plural(prompt, 'prompt token')} hit"
        for tier in (1, 2):
            loaded = int(requests[f"tier{tier}_hit_tokens"][index])
            text += f", {count(loaded)} of them in tier {tier}" if loaded else ""
    state = run.state(begun)
    if state.get("start_ns") == begun:
        tokens, seqs = state["prefill_tokens"], state["prefill_seqs"]
        text += f"; the step computes {plural(tokens, 'prompt token')} of {plural(seqs, 'request')}"
        text += f" and {plural(state['decode_seqs'], 'decode')}"
    return [Moment(begun, text)]


def _happened(run: _Run, index: int, kind: int, time_ns: int, value: int) -> str:
    text, unit = _HAPPENED[kind]
    why = _why(run, index, time_ns) if "{why}" in text else ""
    return text.format(why=why, what=plural(value, unit))


def _why(run: _Run, index: int, time_ns: int) -> str:
    """Which other requests lost blocks in the step, and how many requests continued."""
    log, state = run.transitions, run.state(time_ns)
    lost = np.isin(log["kind"], (PREEMPTED, SWAPPED_OUT)) & (log["time_ns"] == time_ns)
    others = [int(i) for i in log["request"][lost] if i != index]
    text = f" together with {run.names(others)}" if others else ""
    if state:
        left = state["free_blocks"] + state["cached_blocks"]
        text += (
            f", so that {plural(state['running'], 'running request')} could grow"
            f" ({plural(left, 'block')} free after it)"
        )
    return text


def _end(run: _Run, index: int) -> Moment:
    requests, end = run.requests, int(run.ends[index])
    if requests["status"][index] == "completed":
        text = f"finished with {plural(int(requests['output_tokens'][index]), 'token')}"
        return Moment(end, text + _beside_prompts(run, index, end))
    reason = str(requests["reason"][index])
    if requests["finish_ns"][index] < 0:
        return Moment(end, f"the run ended without it: {reason}")
    if reason == ABORTED:
        return Moment(end, "given up by its client")
    return Moment(end, f"given up by the engine: {reason}")


def _beside_prompts(run: _Run, index: int, end: int) -> str:
    """Whose prompts were computed while it decoded, the longest first; empty if nobody's were."""
    first = int(run.requests["first_token_ns"][index])
    began = run.first_steps
    others = np.flatnonzero((began >= first) & (began < end) & (began >= 0))
    if first < 0 or not len(others):
        return ""
    longest = others[np.argsort(-np.asarray(run.requests["input_length"])[others], kind="stable")]
    return f"; meanwhile, prompts of {run.names([int(i) for i in longest])} were computed"


def _spells(run: _Run, index: int) -> list[Spell]:
    spells = standings.lay_out(run.requests, run.transitions, run.starts, run.step_ends, run.end_ns)
    own = spells.request == index
    columns = (getattr(spells, name)[own].tolist() for name in ("standing", "begin_ns", "end_ns"))
    return [
        Spell(standings.NAMES[standing], begin, end)
        for standing, begin, end in zip(*columns, strict=True)
    ]


_NAMED = 3
"""Parts of their time that are named."""


def tail_words(requests: Columns, metric: str) -> tuple[str, list[str]]:
    """The completed request whose latency `metric` (a key of `LATENCIES` but `itl`) is the least
    that 99 % do not exceed, and why it and those above are slow, beside all requests. Raises
    `OutputError` where no request has the latency."""
    latency = np.where(completed(requests), durations_ns(requests)[metric], np.nan)
    everyone = np.flatnonzero(~np.isnan(latency))
    if not len(everyone):
        raise OutputError(f"--p99 {metric}: no request was completed")
    order = everyone[np.argsort(latency[everyone], kind="stable")]
    place = -(-99 * len(order) // 100) - 1
    slow, id, label = order[place:], str(requests["id"][order[place]]), LATENCIES[metric]
    at, median = latency[order[place]] / 1e9, float(np.median(latency[everyone])) / 1e9
    parts = {
        part: ints(requests[part])
        for part in TIME_PARTS
        if metric == "e2el" or part.startswith("waiting_") != (metric == "tpot")
    }
    if metric == "tpot":  # from the first token on
        del parts["own_prefill_ns"]
    if metric == "ttft":
        begun, first = ints(requests["first_scheduled_ns"]), ints(requests["first_token_ns"])
        parts["first_step_ns"] = first - begun
    means = {part: (ns[slow].mean() / 1e9, ns[everyone].mean() / 1e9) for part, ns in parts.items()}
    largest = sorted(means, key=lambda part: -means[part][0])[:_NAMED]
    named = (
        f"{LABELS[part]} {seconds(means[part][0])} ({seconds(means[part][1])})"
        for part in largest
        if means[part][0]
    )
    arrived = ints(requests["arrival_ns"])[slow] / 1e9
    prompt, cached = ints(requests["input_length"]), ints(requests["num_cached_tokens"])
    alike = (
        f"{count(prompt[rows].mean())} prompt tokens, {percent(hits / max(prompt[rows].sum(), 1))}"
        f" of them found in the cache"
        for rows in (slow, everyone)
        for hits in [int(cached[rows].sum())]
    )
    return id, [
        f"{label} p99: {seconds(at)}, p50: {seconds(median)}. {plural(len(slow), 'request')} of"
        f" {count(len(everyone))} take that long; request {id} is the first of them.",
        f"Where their time goes, on average (in brackets: of all requests): {', '.join(named)}.",
        f"They arrived from {arrived.min():,.1f} s to {arrived.max():,.1f} s, with"
        f" {next(alike)}; all requests have {next(alike)}.",
    ]
