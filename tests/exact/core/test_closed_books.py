"""Policies of vLLM V1 know nothing of the future, and forge nothing of the past: whatever is public
is read, set, called and asked."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from worlds import MS, config

from kvsim.core.request import Request
from kvsim.engines.vllm_v1.scheduler import VllmV1, VllmV1Async
from kvsim.errors import PolicyError
from kvsim.run.simulation import simulate
from kvsim.workload import HashContent, Row, Trace

SCHEDULERS = (VllmV1, VllmV1Async)
PLAIN = (int, float, str, bytes, bool, type(None), type, range)
MOVES = ("take", "begin", "forget_hits")
"""Methods without arguments that change something."""


def traced(outputs: Sequence[int]) -> Trace:
    """Requests whose content is known, outputs included."""
    rows = []
    for i, output in enumerate(outputs):
        length = 5 + 3 * (i % 4)
        ids = HashContent(((100 * i, length // 4),), ((100 * i + 50, (length + output) // 4),))
        rows.append(Row(i, f"r{i}", i + 2, 7 * i * MS, length, output, ids))
    facts: dict[str, Any] = {"block_size": 4, "hash_kind": "prefix", "partial_hash": False}
    return Trace("in memory", "native", "0" * 64, rows, **facts)


OUTPUTS = [6, 14, 3, 17, 9, 12, 5, 16]
LONGER = [6, 14, 3, 20, 9, 12, 5, 19]
LOAD = traced(OUTPUTS)
SETTINGS = config(num_gpu_blocks_override=16, max_model_len=48, engine="vllm-v1")
del SETTINGS["disable_async_output_proc"]


def run(policy: type, trace: Trace = LOAD, **more: Any) -> Any:
    globals()[policy.__name__] = policy
    policy.__qualname__ = policy.__name__
    return simulate(trace, {**SETTINGS, "engine": f"{__name__}:{policy.__name__}", **more})


def usual(base: type) -> Any:
    return simulate(LOAD, {**SETTINGS, "async_scheduling": base is VllmV1Async})


def same(one: Any, other: Any) -> bool:
    tables = ((one.requests, other.requests), (one.steps, other.steps))
    return all(list(a[name]) == list(b[name]) for a, b in tables for name in b)


# -- no future -----------------------------------------------------------------------------------


def public(thing: Any) -> Iterator[tuple[str, Any]]:
    """What every public attribute, property and method without arguments says."""
    for name in dir(thing):
        if name.startswith("_") or name in MOVES:
            continue
        try:
            value = getattr(thing, name)
            if callable(value) and not isinstance(value, type):
                value = value()
        except Exception as error:
            value = type(error).__name__
        yield name, list(value) if isinstance(value, Iterator) else value


def seen(thing: Any, met: dict[int, Any]) -> Any:
    if isinstance(thing, PLAIN):
        return thing
    if id(thing) in met:
        return met[id(thing)][0]
    met[id(thing)] = f"object {len(met)}", thing
    if isinstance(thing, Mapping):
        return [(seen(key, met), seen(value, met)) for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        return sorted(thing)
    if isinstance(thing, Sequence | deque):
        return [seen(each, met) for each in thing]
    if not type(thing).__module__.startswith(("kvsim", __name__)):
        return type(thing).__name__
    return [(name, seen(value, met)) for name, value in public(thing)]


def watching(base: Any, least: Sequence[int]) -> Any:
    """A scheduler that looks at everything until one of the outputs has `least` tokens."""

    class Curious(base):
        _moments: list[str] = []  # noqa: RUF012

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self._all: list[Request] = []
            self._moments.clear()

        def _look(self, *things: Any) -> None:
            done = [each.output_tokens + each.placeholders for each in self._all]
            if all(map(int.__lt__, done, [least[each.index] for each in self._all])):
                self._moments.append(repr(seen([*things, self], {})))

        def arrive(self, batch: Any, request: Any) -> None:
            self._all.append(request)
            self._look(batch, request)
            super().arrive(batch, request)

        def compose(self, batch: Any, now_ns: int) -> Any:
            self._look(batch)
            plan = super().compose(batch, now_ns)
            self._look(batch, plan)
            return plan

        def before_admissions(self, batch: Any, now_ns: int) -> None:
            self._look(batch, now_ns)

        def choose_victim(self, batch: Any, request: Any) -> Any:
            self._look(batch, request)
            return super().choose_victim(batch, request)

        def settle(self, batch: Any, plan: Any, now_ns: int) -> None:
            self._look(batch, plan)
            super().settle(batch, plan, now_ns)

        def after_step(self, batch: Any, plan: Any, now_ns: int) -> None:
            self._look(batch, plan)

    return Curious


@pytest.mark.parametrize("base", SCHEDULERS)
def test_all_that_is_public_says_nothing_of_the_future(base: type) -> None:
    past = [most if most == least else least for least, most in zip(OUTPUTS, LONGER, strict=True)]
    past = [10**6 if OUTPUTS[i] == LONGER[i] else least for i, least in enumerate(past)]
    policy = watching(base, past)
    told = []
    results = []
    for outputs in (OUTPUTS, LONGER):
        results.append(run(policy, traced(outputs)))
        told.append([*policy._moments])
    assert told[0] == told[1]
    assert len(told[0]) > 60
    assert not same(*results)
    assert same(usual(base), results[0])


def asking(question: Callable[[Any, Any, Any], Any]) -> Any:
    """A scheduler that asks once."""

    class Asks(VllmV1):
        answers: list[Any] = []  # noqa: RUF012

        def before_admissions(self, batch: Any, now_ns: int) -> None:
            if batch.num_running > 1:
                self.answers.append(question(self, batch, batch.running[0]))

    return Asks


def until_the_last(ask: Callable[[Any], bool]) -> Callable[[Any, Any, Any], Any]:
    """Counts tokens of an invented request of the same index until `ask` says it is the last."""

    def search(policy: Any, batch: Any, request: Any) -> int:
        invented = Request(request.index, "invented", 1)
        batch.arriving = invented
        batch.arrive(invented)
        return next(number for number in range(10**3) if ask(batch)(invented))

    return search


QUESTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "ending": lambda policy, batch, request: batch.ending(request),
    "token": lambda policy, batch, request: batch.token(request),
    "further_token": lambda policy, batch, request: batch.further_token(request),
    "enter": lambda policy, batch, request: batch.enter(request),
    "_end": lambda policy, batch, request: request._end,
    "_output_length": lambda policy, batch, request: batch._output_length(0),
    "_stream": lambda policy, batch, request: request._stream,
    "_runs": lambda policy, batch, request: request._runs,
    "extend": lambda policy, batch, request: policy.blocks.numbering.extend(request, 9),
    "arriving": until_the_last(lambda batch: batch.token),
    "begin": lambda policy, batch, request: request.begin(None, 5),
    "set": lambda policy, batch, request: setattr(request, "length", 10**6),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_no_question_about_the_length_of_an_output_is_answered(name: str) -> None:
    policy = asking(QUESTIONS[name])
    with pytest.raises(PolicyError, match=f"{'length' if name == 'set' else name} is "):
        run(policy)
    assert not policy.answers


def test_an_invented_request_is_not_taken_in() -> None:
    def invent(policy: Any, batch: Any, request: Any) -> None:
        policy.arrive(batch, Request(request.index, "invented", 1))

    with pytest.raises(PolicyError, match="does not arrive just now"):
        run(asking(invent))


# -- no forgery ----------------------------------------------------------------------------------


def books(policy: Any, batch: Any) -> Iterator[Any]:
    request = batch.running[0]
    blocks = policy.blocks
    yield from (request, request.tables[0], batch, batch.plan, blocks.gpu)
    yield from (blocks, blocks.groups[0], blocks.layout, blocks.numbering)


OPEN = {"Request.extra", "Batch.waiting"}
SHARED = {"Request.extra", "KVCacheManager.groups", "KVCacheManager.kinds"}
"""Open to policies, and lists of what are books themselves."""
CHANGES = ("append", "pop", "update", "add", "__setitem__")


def forging(base: Any) -> Any:
    """A scheduler that tries to set everything to what it is, and to change every list."""

    class Forger(base):
        done: list[str] = []  # noqa: RUF012
        refused: set[str] = set()  # noqa: RUF012

        def before_admissions(self, batch: Any, now_ns: int) -> None:
            if batch.num_running < 2:
                return
            for book in books(self, batch):
                for name, value in vars_of(book):
                    place = f"{type(book).__name__}.{name}"
                    self.attempt(place, lambda: setattr(book, name, value))  # noqa: B023
                    if getattr(book, name) is value and place not in SHARED:
                        self.done += [f"{place}.{each}" for each in CHANGES if hasattr(value, each)]

        def attempt(self, place: str, act: Callable[[], Any]) -> None:
            try:
                act()
            except (AttributeError, TypeError):
                self.refused.add(place)
            else:
                if place not in OPEN:
                    self.done.append(place)

    return Forger


def vars_of(book: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(book):
        if not name.startswith("_"):
            try:
                value = getattr(book, name)
            except AttributeError:
                continue  # for kvsim alone
            if not callable(value) or isinstance(value, type):
                yield name, value


@pytest.mark.parametrize("base", SCHEDULERS)
def test_nothing_public_can_be_set_or_changed_in_place(base: type) -> None:
    policy = forging(base)
    result = run(policy)
    assert {*policy.done} == set()
    assert {"Request.length", "Request.computed", "Request.placeholders"} <= policy.refused
    assert {"Batch.tokens", "Batch.running", "Plan.decode_seqs", "Plan.requests"} <= policy.refused
    assert {"Pool.num_free", "Pool.fresh", "Table.blocks"} <= policy.refused
    assert {"KVCacheManager.num_hits", "Full.num_hits", "Layout.align"} <= policy.refused
    assert len(policy.refused) > 100
    assert same(usual(base), result)


ORDERS: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "loses": (lambda waiting: waiting[1:], "1 of . waiting requests are missing"),
    "doubles": (lambda waiting: [*waiting, waiting[0]], "1 are there twice"),
    "invents": (lambda waiting: [*waiting, Request(0, "x", 1)], "1 do not wait"),
    "is none": (lambda waiting: None, "NoneType"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_of_the_waiting_queue_has_each_request_once(name: str) -> None:
    order, told = ORDERS[name]

    def reorder(policy: Any, batch: Any, request: Any) -> None:
        if batch.waiting:
            batch.waiting = order(list(batch.waiting))

    with pytest.raises(PolicyError, match=told):
        run(asking(reorder), traced([9] * 20))


def test_another_order_of_the_waiting_queue_is_obeyed() -> None:
    class Reversed(VllmV1):
        def before_admissions(self, batch: Any, now_ns: int) -> None:
            batch.waiting = sorted(batch.waiting, key=lambda request: -request.index)

    at_once = traced([9] * 20)
    rows = [replace(row, arrival_ns=0) for row in at_once.rows]
    result = run(Reversed, replace(at_once, rows=rows), max_num_seqs=2)
    first = list(result.requests["first_token_ns"])
    assert first == sorted(first, reverse=True)


def test_a_manager_keeps_its_own_books() -> None:
    """Its methods set what it has inherited; those of others do not."""
    from kvsim.engines.vllm_v1.manager import KVCacheManager

    class Counting(KVCacheManager):
        def begin(self) -> None:
            super().begin()
            self.calls = getattr(self, "calls", 0) + 1
            self.num_hits += 1

    globals()["Counting"] = Counting
    settings = {**SETTINGS, "block_manager": f"{__name__}:Counting"}
    result = simulate(LOAD, {**settings, "async_scheduling": False})
    assert same(usual(VllmV1), result)
    other = asking(lambda policy, batch, request: setattr(policy.blocks, "num_hits", 0))
    with pytest.raises(PolicyError, match=r"num_hits is kept by kvsim.*test_closed_books\.py:"):
        run(other, block_manager=f"{__name__}:Counting")
