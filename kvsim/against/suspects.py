"""What may be different about a measured server, and how much of the misfit each would remove.

A suspect changes what is believed of the server: settings first, then prices of steps. Settings
have few values, which are tried one by one, or which the measured times show. A price has a
number, which is fitted by running the replay again until predictions are on average neither too
high nor too low.

`Signs` are what a client can see: from its first token to its last, a request is in the batch, and
its tokens are in the KV cache. So the most requests between the two show a limit of the batch, and
the most tokens one of the pool.

The right correction fits every figure; a wrong one trades errors of one figure for errors of
another. So what counts is the misfit that is left, the mean distance of the logarithms of predicted
and measured figures. A price is only preferred to a setting where it leaves clearly less: prices
can bend to what a wrong setting does. Where one correction is not enough, pairs are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import exp, log
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvsim.against.matched import Change, Matched, errors, matched, with_change
from kvsim.errors import ConfigError
from kvsim.fleet import EngineResult, figures_of, simulate_engine
from kvsim.results.numerals import milliseconds, percent
from kvsim.results.statistics import Floats
from kvsim.settings.config import RunConfig
from kvsim.workload.spec import assume_hit_rate
from kvsim.workload.trace import Row, Trace

_MOMENTS = 1000
_AT_A_PEAK = 99
"""Percentile of all moments that counts as the most: a client's clock blurs single moments."""

EXPLAINED = 0.03
"""A misfit that is left by more than this is not explained."""
_MOST_RUNS = 6
"""Replays of a search."""
_BALANCED = 2e-4
_STEPS = (0.04, 0.01, 0.003)
_CLEARLY = 0.75
"""A price that leaves no less than this share of what a setting leaves is not preferred to it."""
_EXPLAINS, _REFINES = 0.67, 0.5
"""A pair is not preferred to one correction if it leaves more than this share of what that leaves;
the latter where that one explains the misfit: a second correction has to halve it."""
_ENOUGH = EXPLAINED / 2
"""A misfit that no pair has to explain: the noise of a run leaves as much."""
_KEPT = 3
"""So many pairs are fitted together."""
_FEW_RUNS = 3
_FINEST = 0.01
"""Share of a number to which it is fitted together with another."""


class Signs(NamedTuple):
    """What was at work at once."""

    requests: int
    """The most requests between their first and their last token."""
    share: float
    """Share of the time in which there were as many, or one fewer."""
    tokens: float
    """The most tokens that such requests held."""


def signs(pairs: Matched, rows: Sequence[Row]) -> tuple[Signs, Signs] | None:
    """Those of the measured run and of its replay; None where arrivals or times are not known."""
    rows = [rows[i] for i in pairs.rows]
    sides = pairs.measured_s, pairs.predicted_s
    known = all(not np.isnan(side[kind]).any() for side in sides for kind in ("ttft", "e2el"))
    if not known or any(row.arrival_ns is None for row in rows):
        return None
    sent = np.array([row.arrival_ns for row in rows], dtype=np.float64) / 1e9
    lengths = np.array([(row.input_length, row.output_length) for row in rows], dtype=np.float64)
    real, ours = (_signs(sent + side["ttft"], sent + side["e2el"], lengths) for side in sides)
    return real, ours


def _signs(first_s: Floats, last_s: Floats, lengths: Floats) -> Signs:
    moments = np.linspace(first_s.min(), last_s.max(), _MOMENTS)
    requests, tokens = np.zeros(_MOMENTS), np.zeros(_MOMENTS)
    for first, last, (prompt, output) in zip(first_s, last_s, lengths, strict=True):
        low, high = np.searchsorted(moments, (first, last))
        requests[low:high] += 1
        done = (moments[low:high] - first) / max(last - first, 1e-9)
        tokens[low:high] += prompt + output * done
    most = round(float(np.percentile(requests, _AT_A_PEAK)))
    share = float((requests >= most - 1).mean())
    return Signs(most, share, float(np.percentile(tokens, _AT_A_PEAK)))


WIDEST = log(4)
"""A factor beyond 1/4 to 4 is no correction."""
_FULL = 0.95
"""Share of the pool from which its size may matter."""
_NEAR = 0.03
"""Two peaks that differ by less are the same."""
_BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
"""Token budgets of a step that servers have."""
_RELEASES = ("0.9.2", "0.10.2", "0.13.0", "0.18.0", "0.23.0", "0.33.0")
"""A release of each kind (`kvsim.engines.vllm_v1.releases`, `kvsim.settings.versions`)."""


class Belief(NamedTuple):
    """What is believed of the server, beside the configuration."""

    settings: tuple[tuple[str, Any], ...] = ()
    change: Change = Change()
    later_s: float = 0.0
    """How much later every token reaches the client."""
    hits: float = 0.0
    """Share of the prompt tokens that hit the cache, in a trace that does not say it."""

    def having(self, **settings: Any) -> Belief:
        """The belief with these settings."""
        return self._replace(settings=tuple((dict(self.settings) | settings).items()))

    def slowed(self, prompts: float, decodes: float) -> Belief:
        """The belief with the times of steps with and without prompts multiplied."""
        old = self.change
        factors = {"prompts": old.prompts * prompts, "decodes": old.decodes * decodes}
        return self._replace(change=old._replace(**factors))


class Replay(NamedTuple):
    """A prediction, and what it says of the engine."""

    pairs: Matched
    figures: Mapping[str, Any]
    signs: tuple[Signs, Signs] | None

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of the replay, with what was assumed."""
        found: Mapping[str, Any] = self.figures["meta"]["config"]
        return found

    @property
    def usage(self) -> float:
        """The largest share of the pool in use."""
        return self.figures["kv_cache_usage_max"] or 0.0

    @property
    def held(self) -> float:
        """The most tokens of the measured run over those of the replay."""
        if self.signs is None or not self.signs[1].tokens:
            return 1.0
        return self.signs[0].tokens / self.signs[1].tokens


class Bench:
    """A measured run, and its replays under different beliefs."""

    def __init__(
        self, trace: Trace, config: RunConfig, result: EngineResult, done: Callable[[int], None]
    ) -> None:
        """`result`: the replay under no belief at all."""
        self.trace, self.config, self._done = trace, config, done
        self.base = self._told(trace, result)
        self._known = {Belief(): self.base}

    def replay(self, belief: Belief) -> Replay:
        """The prediction. Raises `ConfigError` for settings that no server takes."""
        # What reaches clients later changes nothing in the engine: that needs no replay.
        run = belief._replace(later_s=0.0)
        if run not in self._known:
            self._known[run] = self._replayed(run)
            self._done(1)
        found = self._known[run]
        if not belief.later_s:
            return found
        ours = found.pairs.predicted_s
        later = ours | {kind: ours[kind] + belief.later_s for kind in ("ttft", "e2el")}
        return found._replace(pairs=found.pairs._replace(predicted_s=later))

    def _replayed(self, belief: Belief) -> Replay:
        trace, config = self.trace, self.config
        if belief.hits:
            block_size = self.base.figures["meta"]["block_size"]
            trace = assume_hit_rate(trace, belief.hits, block_size, seed=config.seed)
        config = msgspec.structs.replace(config, **dict(belief.settings))
        return self._told(
            trace, simulate_engine(trace, config, parts_of=with_change(belief.change))
        )

    def _told(self, trace: Trace, result: EngineResult) -> Replay:
        pairs = matched(trace, result)
        return Replay(pairs, figures_of(result), signs(pairs, trace.rows))


class Suspect(NamedTuple):
    """One thing that may be different; `believe(belief, x)` is the belief that it is."""

    name: str
    believe: Callable[[Belief, Any], Belief]
    words: Callable[[Any], str]
    remedy: str
    values: tuple[Any, ...] = ()
    """What is tried; empty for a number, which is searched for: at 0 it changes nothing."""
    starts: Callable[[float], tuple[float, ...]] = lambda balance: ()
    """First guesses of the number from the balance (`kvsim.against.suspects`)."""
    low: float = -WIDEST
    high: float = WIDEST
    value: Callable[[Any], Any] = lambda x: x
    """What is shown of a number."""
    setting: bool = True
    """A setting of the server, or a price of its steps."""


def suspects(bench: Bench, belief: Belief) -> list[Suspect]:
    """All that may be different beside what is believed, settings first."""
    seen = bench.replay(belief)
    found = [*_seqs(bench, seen), *_blocks(bench, seen), *_cache(bench), *_choices(bench)]
    return [*found, *_factors(), *_constants(bench)]


def _seqs(bench: Bench, seen: Replay) -> Iterator[Suspect]:
    """`max_num_seqs`, where the most requests at once differ."""
    limit, told = (each.settings["max_num_seqs"] for each in (seen, bench.base))
    if seen.signs is None or limit is None:
        return
    ranks = bench.config.data_parallel_size
    real, ours = (-(-side.requests // ranks) for side in seen.signs)
    if abs(real - ours) <= _NEAR * ours or real < 2:
        return
    # Those whose first token is still to come are not seen; and memory may be the limit.
    rounded = (-(-real // step) * step for step in (8, 16, 32, 64))
    tried = {real, real + 1, *(each for each in rounded if each <= 1.1 * real)}
    # The limit was higher than was told, perhaps much: servers have powers of two.
    if real > limit:
        tried |= {2 ** real.bit_length(), 2 ** (real.bit_length() + 1)}
    yield Suspect(
        "max_num_seqs",
        lambda belief, seqs: belief.having(max_num_seqs=seqs),
        lambda seqs: f"max_num_seqs is {seqs}, not {told}",
        "take it from the server with --startup-log, or --max-num-seqs",
        tuple(sorted(tried - {limit})),
    )


def _blocks(bench: Bench, seen: Replay) -> Iterator[Suspect]:
    """The size of the pool, where it was full, or where the measured run held fewer tokens."""
    meta = bench.base.figures["meta"]
    blocks, block_size = meta["num_gpu_blocks"], meta["block_size"]
    longest = max(row.input_length + row.output_length for row in bench.trace.rows)
    least: int = -(-longest // block_size) + 1
    smaller = seen.held < 1 - _NEAR
    if not (smaller or seen.usage >= _FULL) or least >= blocks:
        return
    low = log(least / blocks)

    def number(x: float) -> int:
        wanted: int = round(blocks * exp(x))
        return max(least, wanted)

    def believe(belief: Belief, x: float) -> Belief:
        # The server took its max_model_len, so that fits.
        most, told = number(x) * block_size, seen.settings["max_model_len"]
        fits = min(told, most) if isinstance(told, int) else "auto"
        return belief.having(num_gpu_blocks_override=number(x), max_model_len=fits)

    def starts(balance: float) -> tuple[float, ...]:
        if not smaller:
            return (balance,)
        return (log(seen.held * max(seen.usage, 0.01)), -0.7, -1.4, -2.1)

    yield Suspect(
        "blocks",
        believe,
        lambda value: f"the pool has {value:,} blocks, not {blocks:,}",
        "take the count of the server with --startup-log or --num-gpu-blocks-override",
        starts=starts,
        low=low,
        value=number,
    )


def _cache(bench: Bench) -> Iterator[Suspect]:
    """The prefix cache: on or off, or shared prefixes that the trace cannot know."""
    trace, on = bench.trace, bench.base.figures["meta"]["prefix_caching"]
    if any(row.content for row in trace.rows):
        yield Suspect(
            "enable_prefix_caching",
            lambda belief, value: belief.having(enable_prefix_caching=value),
            lambda value: f"the prefix cache is {'on' if value else 'off'}",
            "give --enable-prefix-caching or --no-enable-prefix-caching, as the server has it",
            (not on,),
        )
    elif on:
        yield Suspect(
            "hits",
            lambda belief, share: belief._replace(hits=share),
            lambda share: f"{percent(share)} of the prompt tokens hit the prefix cache",
            "the file does not hold prompts; give a trace that does, and this one with --measured",
            starts=lambda balance: (min(balance, 0.5),),
            low=0.0,
            high=0.95,
        )


def _choices(bench: Bench) -> Iterator[Suspect]:
    """Settings with few values: the token budget, asynchronous scheduling, the release."""
    settings = bench.base.settings
    budget, ahead = settings["max_num_batched_tokens"], settings["async_scheduling"]
    yield Suspect(
        "max_num_batched_tokens",
        lambda belief, tokens: belief.having(max_num_batched_tokens=tokens),
        lambda tokens: f"max_num_batched_tokens is {tokens:,}, not {budget:,}",
        "take it from the server with --startup-log, or --max-num-batched-tokens",
        tuple(each for each in _BUDGETS if each != budget),
    )
    if bench.config.engine != "vllm-v1":
        return
    yield Suspect(
        "vllm_version",
        lambda belief, version: belief.having(vllm_version=version),
        lambda version: f"the server is vLLM {version} or similar",
        "give the release with --vllm-version",
        tuple(each for each in _RELEASES if each != settings["vllm_version"]),
    )
    yield Suspect(
        "async_scheduling",
        lambda belief, value: belief.having(async_scheduling=value),
        lambda value: f"asynchronous scheduling is {'on' if value else 'off'}",
        "give --async-scheduling or --no-async-scheduling, as the server has it",
        (not ahead,),
    )


def _factors() -> Iterator[Suspect]:
    """Factors of the times of steps."""

    def factor(name: str, prompts: bool, decodes: bool, which: str, remedy: str) -> Suspect:
        return Suspect(
            name,
            lambda belief, x: belief.slowed(*(exp(x) if it else 1.0 for it in (prompts, decodes))),
            lambda value: f"{which} takes {value:.3f} times as long",
            remedy,
            starts=lambda balance: (-balance,),
            value=exp,
            setting=False,
        )

    machine = "measure a profile of this machine with kvsim calibrate, or check GPU and dtype"
    prompts = "check the times of prompts in the profile"
    decodes = "check the times of decodes in the profile, and --enforce-eager"
    yield factor("step_times", True, True, "every step", machine)
    yield factor("prefill", True, False, "a step with prompts", prompts)
    yield factor("decode", False, True, "a step without prompts", decodes)


def _constants(bench: Bench) -> Iterator[Suspect]:
    """Times that come on top: of every step, and before every first token."""
    first_ms = 1e3 * float(bench.base.pairs.predicted_s["ttft"].mean())
    step_ms = bench.base.figures["mean_itl_ms"] or first_ms

    def host(belief: Belief, ms: float) -> Belief:
        change = belief.change
        return belief._replace(change=change._replace(step_ns=change.step_ns + ms * 1e6))

    yield Suspect(
        "host",
        host,
        lambda ms: f"every step takes {ms:.2f} ms longer",
        "host time: scheduling, sampling, detokenisation; none of it is in kernel times",
        starts=lambda balance: (-balance * step_ms,),
        low=0.0,
        high=3 * step_ms,
        setting=False,
    )
    yield Suspect(
        "first_token",
        lambda belief, ms: belief._replace(later_s=belief.later_s + ms / 1e3),
        lambda ms: f"every first token reaches the client {milliseconds(ms)} later",
        "network, tokenizer and front end of the server (cost.front_end says how long)",
        starts=lambda balance: (-balance * first_ms,),
        low=0.0,
        high=10 * first_ms,
        setting=False,
    )


class Found(NamedTuple):
    """A correction, fitted; or two together, with their names, words and remedies joined."""

    name: str
    value: Any
    """A setting, a factor, milliseconds, blocks, or a share; of two corrections, a list."""
    words: str
    remedy: str
    misfit: float
    """What is left with it."""


class _Tried(NamedTuple):
    suspect: Suspect
    x: Any
    belief: Belief
    found: Found

    @property
    def rank(self) -> float:
        """The misfit that counts in a comparison."""
        return self.found.misfit / (1.0 if self.suspect.setting else _CLEARLY)


def misfit(pairs: Matched) -> float:
    """The mean size of `errors`."""
    return _mean({key: abs(error) for key, error in errors(pairs).items()})


def corrections(bench: Bench) -> list[Found]:
    """Corrections that leave less misfit than the replay has, the best first."""
    tried = sorted(_all(bench, Belief()), key=lambda each: each.rank)
    found = [each.found for each in tried if each.found.misfit < misfit(bench.base.pairs)]
    if tried and tried[0].found.misfit > _ENOUGH:
        both = _pair(bench, tried)
        most = _EXPLAINS if tried[0].found.misfit > EXPLAINED else _REFINES
        if both is not None and both.misfit < most * tried[0].found.misfit:
            found.insert(0, both)
    return found


def _all(bench: Bench, belief: Belief, without: str = "", runs: int = _MOST_RUNS) -> list[_Tried]:
    """Each suspect at its best, on top of what is believed, but for one."""
    others = [each for each in suspects(bench, belief) if each.name != without]
    found = (_at_best(bench, each, belief, runs) for each in others)
    return [each for each in found if each is not None]


def _at_best(
    bench: Bench, suspect: Suspect, belief: Belief, runs: int = _MOST_RUNS
) -> _Tried | None:
    if suspect.values:
        left, x = _choose(bench, suspect, belief)
    else:
        left, x = _search(bench, suspect, belief, runs)
    if x is None:
        return None
    value = suspect.value(x)
    found = Found(suspect.name, value, suspect.words(value), suspect.remedy, left)
    return _Tried(suspect, x, suspect.believe(belief, x), found)


def _pair(bench: Bench, tried: list[_Tried]) -> Found | None:
    """The two corrections that leave least; the likeliest pairs are fitted together."""
    likely = sorted(_pairs(bench, tried), key=lambda pair: pair[1].rank)[:_KEPT]
    together = (_together(bench, *pair) for pair in likely)
    best = min(together, key=lambda pair: pair[1].rank, default=None)
    if best is None:
        return None
    first, second = (each.found for each in best)
    return Found(
        f"{first.name} and {second.name}",
        [first.value, second.value],
        f"{first.words}, and {second.words}",
        f"{first.remedy}; {second.remedy}",
        second.misfit,
    )


def _pairs(bench: Bench, tried: list[_Tried]) -> Collection[tuple[_Tried, _Tried]]:
    """Each setting, and the two best prices, with all others.

    A number that was fitted alone takes all blame. So less of it is tried as well.
    """
    settings = [each for each in tried if each.suspect.setting]
    prices = [each for each in tried if not each.suspect.setting][:2]
    # Of those that predict the same, one is enough.
    unlike = {each.found.misfit: each for each in reversed(settings)}.values()
    pairs: dict[frozenset[str], tuple[_Tried, _Tried]] = {}
    for each in [*unlike, *prices]:
        for one in _with_less(bench, each):
            for other in _all(bench, one.belief, one.suspect.name, _FEW_RUNS):
                names = frozenset((one.suspect.name, other.suspect.name))
                if names not in pairs or other.rank < pairs[names][1].rank:
                    pairs[names] = (one, other)
    return pairs.values()


def _with_less(bench: Bench, one: _Tried) -> list[_Tried]:
    """A correction, and some that change less, or what the measured times say."""
    suspect = one.suspect
    if suspect.values:
        return [one]
    said = suspect.starts(_balance(bench.base.pairs))[:1] if suspect.setting else ()
    return [one, *(_at(one, x) for x in {0.6 * one.x, *said} - {one.x})]


def _at(one: _Tried, x: float) -> _Tried:
    """A correction with another number; its misfit is not known."""
    value = one.suspect.value(x)
    found = one.found._replace(value=value, words=one.suspect.words(value))
    return _Tried(one.suspect, x, one.suspect.believe(Belief(), x), found)


def _together(bench: Bench, one: _Tried, other: _Tried) -> tuple[_Tried, _Tried]:
    """The pair with the number of the first that leaves least, if it has one."""
    best = (one, _at_best(bench, other.suspect, one.belief) or other)
    size = 0.0 if one.suspect.values else abs(one.x)
    step = size / 4
    while step > _FINEST * size:
        for x in (best[0].x - step, best[0].x + step):
            first = _at(one, min(max(x, one.suspect.low), one.suspect.high))
            second = _at_best(bench, other.suspect, first.belief, _FEW_RUNS)
            if second is not None and second.found.misfit < best[1].found.misfit:
                best = (first, second)
        step /= 2
    return best


def _choose(bench: Bench, suspect: Suspect, belief: Belief) -> tuple[float, Any]:
    """The least misfit of the values of a setting, and the value; None: no server takes any."""
    found = []
    for value in suspect.values:
        with suppress(ConfigError):  # as of a budget below max_num_seqs
            pairs = bench.replay(suspect.believe(belief, value)).pairs
            found.append((misfit(pairs), value))
    return min(found, key=itemgetter(0), default=(0.0, None))


def _search(
    bench: Bench, suspect: Suspect, belief: Belief, runs: int
) -> tuple[float, float | None]:
    """The number that leaves least, and what it leaves; None: any number is worse than none."""
    numbers = _Numbers(bench, suspect, belief)
    for x in suspect.starts(numbers.tried[0][2]):
        numbers.take(x)
    if len(numbers.tried) > 1:
        numbers.balance(runs - 1)
        if suspect.setting and runs > _FEW_RUNS:  # Its effect has steps, which secants miss.
            numbers.step_down()
    left, x, _ = min(numbers.tried)
    return left, x or None


class _Numbers:
    """The numbers of a suspect that were tried, from 0 on."""

    def __init__(self, bench: Bench, suspect: Suspect, belief: Belief) -> None:
        self._bench, self._suspect, self._belief = bench, suspect, belief
        base = bench.replay(belief).pairs
        self.tried = [(misfit(base), 0.0, _balance(base))]
        """What is left with a number, the number, and whether predictions are then too high."""

    def take(self, x: float) -> bool:
        """Tries a number. False: it was tried, or no server takes it."""
        x = min(max(x, self._suspect.low), self._suspect.high)
        if any(x == known for _, known, _ in self.tried):
            return False
        try:
            pairs = self._bench.replay(self._suspect.believe(self._belief, x)).pairs
        except ConfigError:  # as of a pool that is too small for a request
            return False
        self.tried.append((misfit(pairs), x, _balance(pairs)))
        return True

    def balance(self, runs: int) -> None:
        """Looks for the number with which predictions are balanced, by the secant method."""
        self.tried.sort(reverse=True)  # The last two are the best.
        for _ in range(runs):
            (_, x0, before), (_, x, after) = self.tried[-2:]
            if abs(after) < _BALANCED or after == before:
                break
            if not self.take(x - after * (x - x0) / (after - before)):
                break

    def step_down(self) -> None:
        """Tries the neighbours of the best number, until none is better."""
        for step in _STEPS:
            best = None
            while best != min(self.tried):
                best = min(self.tried)
                self.take(best[1] - step)
                self.take(best[1] + step)


def _balance(pairs: Matched) -> float:
    return _mean(errors(pairs))


def _mean(values: Mapping[str, float]) -> float:
    return fmean(values.values()) if values else 0.0
