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
    run = _Run(summary, requests, steps, transitions, index)
    found, spells = PROMPT_PARTS if run.caches else (), _spells(run)
    return Story(
        run.own["id"],
        _about(run),
        max(run.own["arrival_ns"], 0),
        _moments(run, spells) if run.own["arrival_ns"] >= 0 else [],
        spells,
        {name: ns for name, ns in parts_of(requests, index).items() if ns},
        {name: run.own[name] for name in found if run.own[name]},
    )


class _Run:
    """A run, with the columns that a story looks up repeatedly, and the request that it is of."""

    def __init__(
        self,
        summary: Mapping[str, Any],
        requests: Columns,
        steps: Columns,
        transitions: Columns,
        index: int,
    ) -> None:
        self.meta, self.requests, self.transitions = summary["meta"], requests, transitions
        self.steps, self.starts = steps, steps["start_ns"]
        self.end_ns = run_end_ns(steps, requests)
        self.ends = standings.ends_ns(requests, self.end_ns)
        self.first_steps = standings.first_steps_ns(requests, transitions)
        self.caches = PROMPT_PARTS[1] in requests
        """Whether the run has a prefix cache."""
        self.index = index
        self.own: dict[str, Any] = {
            name: np.asarray(column)[index : index + 1].tolist()[0]
            for name, column in requests.items()
        }
        """The columns of the request."""
        self.own_end_ns = int(self.ends[index])
        self.begun_ns = int(self.first_steps[index])
        """When its first step began; -1 if none did."""

    def state(self, time_ns: int) -> dict[str, int]:
        """The row of the last step that had begun by then, or of the first; empty without steps."""
        if not len(self.starts):
            return {}
        row = max(int(np.searchsorted(self.starts, time_ns, side="right")) - 1, 0)
        return {name: int(column[row]) for name, column in self.steps.items()}

    def others(self, begin_ns: int, end_ns: int) -> str:
        """Other requests that had begun and not ended in this time, the first to end first."""
        first = self.first_steps
        found = np.flatnonzero((first >= 0) & (first < end_ns) & (self.ends > begin_ns))
        return self.names(found[np.argsort(self.ends[found], kind="stable")])

    def names(self, requests: Any) -> str:
        """The names of up to `NAMED` of these requests but its own, and the number of the others;
        empty without any."""
        others = [int(i) for i in requests if i != self.index]
        listed = ", ".join(str(self.requests["id"][i]) for i in others[:NAMED])
        return f"{listed} and {count(len(others) - NAMED)} more" if others[NAMED:] else listed


def _about(run: _Run) -> str:
    own = run.own
    text = f"{plural(own['input_length'], 'prompt token')}"
    text += f", {plural(own['output_tokens'], 'output token')}"
    arrival = own["arrival_ns"]
    if arrival < 0:
        return f"{text}; never sent: {own['reason']}"
    took = seconds((own["finish_ns"] - arrival) / 1e9)
    if own["status"] == "completed":
        text += f"; E2EL {took}"
    elif own["status"] == ABORTED:
        text += f"; given up by its client after {took}"
    else:
        text += f"; rejected: {own['reason']}"
    if own["first_token_ns"] >= 0:
        text += f", TTFT {seconds((own['first_token_ns'] - arrival) / 1e9)}"
    preempted = own["num_preemptions"]
    return f"{text}, {plural(preempted, 'preemption')}" if preempted else text


def _moments(run: _Run, spells: list[Spell]) -> list[Moment]:
    """Everything that happened to a request that was sent, in order."""
    moments = _arrival(run)
    for spell in spells:
        if spell.standing == standings.NAMES[standings.WAITING]:
            moments += _waits(run, spell.begin_ns, spell.end_ns)
    turns = _turns(run, spells)
    # At one instant, loads come before the first step, and losses after the first token.
    moments += [turn for turn in turns if turn.time_ns <= run.begun_ns]
    moments += _first_step(run)
    if run.own["first_token_ns"] >= 0:
        moments.append(Moment(run.own["first_token_ns"], "first token"))
    moments += [turn for turn in turns if turn.time_ns > run.begun_ns]
    moments.append(Moment(run.own_end_ns, _end(run)))
    return sorted(moments, key=lambda moment: moment.time_ns)


def _turns(run: _Run, spells: list[Spell]) -> list[Moment]:
    """Losses of its blocks and what followed; of very many, the first and the last."""
    turns: list[tuple[int, Callable[[], str]]] = []
    for spell in spells:
        if spell.standing in _PASSED and spell.end_ns < run.own_end_ns:
            took = seconds((spell.end_ns - spell.begin_ns) / 1e9)
            turns.append((spell.end_ns, partial(_PASSED[spell.standing].format, took)))
    own = run.transitions["request"] == run.index
    columns = (run.transitions[name][own].tolist() for name in ("kind", "time_ns", "value"))
    for kind, time_ns, value in zip(*columns, strict=True):
        if kind in _HAPPENED:
            turns.append((time_ns, partial(_happened, run, kind, time_ns, value)))
    turns.sort(key=lambda turn: turn[0])
    left_out = len(turns) - BEGINNING - END
    if left_out <= 1:
        return [Moment(time_ns, words()) for time_ns, words in turns]
    shown = [Moment(time_ns, words()) for time_ns, words in (*turns[:BEGINNING], *turns[-END:])]
    gap = Moment(turns[BEGINNING][0], f"… and {count(left_out)} more such moments")
    return [*shown[:BEGINNING], gap, *shown[BEGINNING:]]


def _arrival(run: _Run) -> list[Moment]:
    arrival, held = run.own["arrival_ns"], run.own["client_queue_ns"]
    moments = []
    if held:
        text = f"was due; its client held it back for {seconds(held / 1e9)}"
        moments.append(Moment(run.own["released_ns"], text))
    state = run.state(arrival)
    text = "arrived"
    if state and run.starts[0] <= arrival:
        free = state["free_blocks"] + state["cached_blocks"]
        text += (
            f"; {count(state['waiting'])} waiting, {count(state['running'])} running,"
            f" {count(free)} of {count(run.meta['num_gpu_blocks'])} blocks free"
        )
    return [*moments, Moment(arrival, text)]


def _waits(run: _Run, arrival: int, end: int) -> list[Moment]:
    """What it waited for from `arrival` to `end`, before its first step."""
    first, last = np.searchsorted(run.starts, (arrival, end), side="left")
    moments = []
    # Until the next step begins, it waits for the one under way.
    lead = (int(run.starts[first]) if first < last else end) - arrival
    if lead:
        moments.append(Moment(arrival, _waited(lead, "waiting_step_ns")))
    blocked, prompts = (run.steps[name][first:last] for name in ("blocked", "prefill_seqs"))
    why = reasons(blocked, prompts, int(run.meta.get("steps_in_flight", 1)))
    changes = np.flatnonzero(np.diff(why, prepend=-1))
    if len(changes) > SEPARATE:
        return [*moments, _long_wait(run, int(run.starts[first]), end)]
    begins = [int(run.starts[first + change]) for change in changes]
    for change, begin, stop in zip(changes, begins, [*begins, end][1:], strict=True):
        text = _waited(stop - begin, WAITING_FOR[BLOCKED[int(why[change])]])
        others = run.others(begin, stop)
        moments.append(Moment(begin, f"{text}, while {others} ran" if others else text))
    return moments


def _long_wait(run: _Run, begin: int, end: int) -> Moment:
    """A wait whose reason changed often, in one sentence."""
    refused = list(WAITING_FOR.values())[1:]
    order = sorted((part for part in refused if run.own[part]), key=lambda part: -run.own[part])
    text = "; ".join(_waited(run.own[part], part) for part in order)
    return Moment(begin, f"{text}, in turns, while {run.others(begin, end)} ran")


def _waited(ns: int, part: str) -> str:
    return f"waited {seconds(ns / 1e9)}{TIME_LABELS[part].removeprefix('waiting')}"


def _first_step(run: _Run) -> list[Moment]:
    """What led to its first step."""
    requests, own, begun = run.requests, run.own, run.begun_ns
    if begun < 0 or begun > run.own_end_ns:
        return []
    ended = requests["finish_ns"] == own["first_scheduled_ns"]
    before = run.names(np.flatnonzero(ended & (requests["first_scheduled_ns"] >= 0)))
    text = "first step"
    if before and own["first_scheduled_ns"] > own["arrival_ns"]:
        text = f"{before} ended; first step"
    if run.caches:
        prompt = plural(own["input_length"], "prompt token")
        text += f": {count(own['num_cached_tokens'])} of {prompt} hit"
        for tier in (1, 2):
            loaded = own[f"tier{tier}_hit_tokens"]
            text += f", {count(loaded)} of them in tier {tier}" if loaded else ""
    state = run.state(begun)
    if state.get("start_ns") == begun:
        tokens, seqs = state["prefill_tokens"], state["prefill_seqs"]
        text += f"; the step computes {plural(tokens, 'prompt token')} of {plural(seqs, 'request')}"
        text += f" and {plural(state['decode_seqs'], 'decode')}"
    return [Moment(begun, text)]


def _happened(run: _Run, kind: int, time_ns: int, value: int) -> str:
    text, unit = _HAPPENED[kind]
    why = _why(run, time_ns) if "{why}" in text else ""
    return text.format(why=why, what=plural(value, unit))


def _why(run: _Run, time_ns: int) -> str:
    """Which other requests lost blocks in the step, and how many requests continued."""
    log, state = run.transitions, run.state(time_ns)
    lost = np.isin(log["kind"], (PREEMPTED, SWAPPED_OUT)) & (log["time_ns"] == time_ns)
    others = run.names(log["request"][lost])
    text = f" together with {others}" if others else ""
    if state:
        left = state["free_blocks"] + state["cached_blocks"]
        text += (
            f", so that {plural(state['running'], 'running request')} could grow"
            f" ({plural(left, 'block')} free after it)"
        )
    return text


def _end(run: _Run) -> str:
    own = run.own
    if own["status"] == "completed":
        return f"finished with {plural(own['output_tokens'], 'token')}{_beside_prompts(run)}"
    if own["finish_ns"] < 0:
        return f"the run ended without it: {own['reason']}"
    if own["reason"] == ABORTED:
        return "given up by its client"
    return f"given up by the engine: {own['reason']}"


def _beside_prompts(run: _Run) -> str:
    """Whose prompts were computed while it decoded, the longest first; empty if nobody's were."""
    first, began = run.own["first_token_ns"], run.first_steps
    others = np.flatnonzero((began >= first) & (began < run.own_end_ns) & (began >= 0))
    if first < 0 or not len(others):
        return ""
    longest = others[np.argsort(-np.asarray(run.requests["input_length"])[others], kind="stable")]
    return f"; meanwhile, prompts of {run.names(longest)} were computed"


def _spells(run: _Run) -> list[Spell]:
    ends = run.steps["end_ns"]
    spells = standings.lay_out(run.requests, run.transitions, run.starts, ends, run.end_ns)
    own = spells.request == run.index
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
