"""Policies of outsiders: subclasses made from a seed.

`fuzz.outsiders:Scheduler7` names the class that seed 7 makes: a random built-in scheduler of which
some methods are overridden, with an equivalent body or with another one. Likewise `Manager7`,
`Cost7`, and the function `Victim7`.
"""

from __future__ import annotations

import functools
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from types import FunctionType
from typing import Any

from kvsim.core.batch import Batch
from kvsim.core.blocks import BlockManager
from kvsim.core.plan import Plan
from kvsim.core.request import Request
from kvsim.core.schema import BLOCKED
from kvsim.cost import ConstantCost
from kvsim.engines import BLOCK_MANAGERS, ENGINES

Body = Callable[..., Any]
"""An overriding method, called with the object, the inherited method and the arguments."""

SLOTS = BLOCKED.index("slots")
SCHEDULERS: dict[type, str] = {
    scheduler: name
    for name, engine in ENGINES.items()
    for scheduler in (engine.scheduler, engine.asynchronous)
    if scheduler is not None
}
"""Every scheduler that an engine uses -> the engine."""
BOUNDARIES = ("compose", "arrive", "settle", "step_ns")
"""Methods called at the same moments in every run of the same settings."""
VARIANTS = ("forward", "look", "look", "other", "other", "other")


def __getattr__(name: str) -> Any:
    found = re.fullmatch(r"(Scheduler|Manager|Cost|Victim)(\d+)", name)
    if found is None:
        raise AttributeError(name)
    return _MAKERS[found[1]](int(found[2]))


# -- what a curious policy looks at ------------------------------------------------------------


def look(*things: object) -> tuple[Any, ...]:
    """All that can be seen of a batch, a plan, requests, sequences and block tables."""
    return tuple(_look_at(thing) for thing in things)


def _look_at(thing: object) -> Any:
    if isinstance(thing, Batch):
        queues = (thing.waiting, thing.running, thing.swapped)
        seen = tuple(tuple(map(_look_at, queue)) for queue in queues)
        return seen, len(thing), thing.num_running, _look_at(thing.blocks)
    if isinstance(thing, Plan):
        entries = tuple((request.id, *rest) for request, *rest in thing.entries)
        decodes = tuple(map(_look_at, thing.decodes))
        return entries, decodes, thing.decode_seqs, thing.context_tokens, thing.samples
    if isinstance(thing, Request):
        done = thing.output_tokens, thing.num_preemptions, thing.first_token_ns
        known = [(e.state, e.length, e.computed, e.filled, len(e.table)) for e in thing.sequences]
        return thing.id, done, tuple(known)
    if isinstance(thing, BlockManager):
        pools: Any = thing
        return pools.gpu.free, pools.gpu.used, pools.cpu.used
    if isinstance(thing, (list, tuple, deque)):
        return tuple(map(_look_at, thing))
    return thing if isinstance(thing, int | str) else None


# -- subclasses --------------------------------------------------------------------------------


@functools.cache
def scheduler(seed: int) -> type:
    """A scheduler of `ENGINES` with some methods overridden."""
    rng = random.Random(f"scheduler {seed}")
    base = rng.choice(tuple(SCHEDULERS))
    return _subclass(f"Scheduler{seed}", base, rng, SCHEDULING, ("arrive",))


@functools.cache
def manager(seed: int) -> type:
    """A block manager with some methods overridden."""
    rng = random.Random(f"manager {seed}")
    # Tables of several groups of layers are chosen by the model, with a scheduler of their own.
    bases = [*BLOCK_MANAGERS.values()]
    return _subclass(f"Manager{seed}", rng.choice(bases), rng, MANAGING)


@functools.cache
def cost(seed: int) -> type:
    """A constant cost model with some methods overridden, or one that has but what it must."""
    rng = random.Random(f"cost {seed}")
    if rng.random() < 0.4:
        return type(f"Cost{seed}", (BareCost,), {"terms": rng.randrange(1, 8), "notes": []})
    return _subclass(f"Cost{seed}", ConstantCost, rng, PRICING)


@functools.cache
def victim(seed: int) -> Callable[..., Request]:
    """A function that chooses by everything it can see."""
    rng = random.Random(f"victim {seed}")
    way = rng.randrange(4)

    def choose(candidates: Any, blocks: BlockManager) -> Request:
        seen = look(candidates, blocks)
        if way == 0:
            return max(candidates, key=_length)
        if way == 1:
            return min(
                candidates, key=lambda request: (len(request.sequences[0].table), request.id)
            )
        if way == 2:
            return candidates[len(candidates) // 2]
        return candidates[sum(_numbers(seen)) % len(candidates)]

    return choose


_MAKERS: dict[str, Callable[[int], Any]] = {
    "Scheduler": scheduler,
    "Manager": manager,
    "Cost": cost,
    "Victim": victim,
}


def _subclass(
    name: str,
    base: type,
    rng: random.Random,
    bodies: dict[str, tuple[Callable[[random.Random], Body], ...]],
    optional: tuple[str, ...] = (),
) -> type:
    """A class with one to three methods of `base` overridden.

    Its `variant` says how, `notes` is what was seen at `BOUNDARIES`, in order.
    """
    methods = sorted({*_methods_of(base), *optional})
    if rng.random() < 0.15:
        methods.append("__init__")
    variant = rng.choice(VARIANTS)
    if variant == "other":
        methods = [each for each in methods if each in bodies]
    chosen = rng.sample(methods, min(len(methods), rng.choice((1, 1, 2, 3))))
    made = type(name, (base,), {"__module__": __name__, "variant": variant, "notes": []})
    for method in chosen:
        body: Body = _forward
        if variant == "look":
            body = functools.partial(_looking, method)
        elif variant == "other":
            body = rng.choice(bodies[method])(rng)
        setattr(made, method, _overriding(made, method, body))
    made.overridden = tuple(chosen)  # type: ignore[attr-defined]
    return made


def _methods_of(base: type) -> Iterator[str]:
    for each in base.__mro__:
        if each.__module__.startswith("kvsim"):
            for name, value in vars(each).items():
                if isinstance(value, FunctionType) and not name.startswith("__"):
                    yield name


def _overriding(made: type, method: str, body: Body) -> Callable[..., Any]:
    inherited = getattr(made, method, None)

    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        usual = getattr(super(made, self), method, None)
        if usual is None:
            # A move of the batch, which no scheduler has to have.
            usual = getattr(Batch, method)
        return body(self, usual, *args, **kwargs)

    return override if inherited is None else functools.wraps(inherited)(override)


def _forward(self: Any, usual: Body, *args: Any, **kwargs: Any) -> Any:
    return usual(*args, **kwargs)


def _looking(method: str, self: Any, usual: Body, *args: Any, **kwargs: Any) -> Any:
    if method == "__init__":
        return usual(*args, **kwargs)
    seen = look(*args)
    if method in BOUNDARIES:
        type(self).notes.append((method, seen))
    return usual(*args, **kwargs)


# -- other bodies ------------------------------------------------------------------------------


def _length(request: Request) -> int:
    return request.sequences[0].length


def _numbers(seen: Any) -> Iterator[int]:
    if isinstance(seen, tuple):
        for each in seen:
            yield from _numbers(each)
    elif isinstance(seen, int):
        yield seen


def _every(self: Any, number: int) -> bool:
    """Whether this is one of every `number` calls."""
    self.calls = getattr(self, "calls", 0) + 1
    return self.calls % number == 0


def _reordering(rng: random.Random) -> Body:
    """A step that begins with the waiting queue in another order."""
    orders: dict[str, Callable[[Any], Any]] = {
        "shortest": lambda waiting: sorted(waiting, key=_length),
        "longest": lambda waiting: sorted(waiting, key=_length, reverse=True),
        "newest": lambda waiting: sorted(waiting, key=lambda request: -request.index),
    }
    order = orders[rng.choice(tuple(orders))]

    def compose(self: Any, usual: Body, batch: Batch, now_ns: int) -> Plan:
        batch.waiting = deque(order(batch.waiting))
        plan: Plan = usual(batch, now_ns)
        return plan

    return compose


def _refusing(rng: random.Random) -> Body:
    """Also refuses who could be admitted, now and then."""
    number = rng.randrange(2, 6)

    def refusal(self: Any, usual: Body, *args: Any) -> int:
        return usual(*args) or SLOTS * _every(self, number)

    return refusal


def _giving_up(rng: random.Random) -> Body:
    """Also gives up who asks for much."""
    most = rng.randrange(2, 60)

    def turns_away(self: Any, usual: Body, *args: Any) -> Any:
        usually = usual(*args)
        much = args[-1] > most
        return usually or (much if isinstance(usually, bool) else "too-long" * much)

    return turns_away


def _other_victim(rng: random.Random) -> Body:
    """Makes room by another choice of victim."""
    chosen = victim(rng.randrange(1_000))

    def make_room(self: Any, usual: Body, *args: Any) -> Any:
        own, self.victim = self.victim, chosen
        try:
            return usual(*args)
        finally:
            self.victim = own

    return make_room


def _taking(rng: random.Random) -> Body:
    """Takes the victim from another place of the running queue."""
    place = rng.choice((0, 1, 2))

    def take_victim(self: Any, usual: Body, batch: Batch) -> Request:
        running = batch.running
        found = running[min(place, len(running) - 1)]
        running.remove(found)
        return found

    return take_victim


def _settling(rng: random.Random) -> Body:
    """Looks after the step, too."""

    def settle(self: Any, usual: Body, batch: Batch, plan: Plan, now_ns: int) -> None:
        usual(batch, plan, now_ns)
        type(self).notes.append(look(batch))

    return settle


def _arriving(rng: random.Random) -> Body:
    """Puts those who arrive elsewhere, or turns the long ones away."""
    most = rng.randrange(2, 60)
    first = rng.random() < 0.5

    def arrive(self: Any, usual: Body, batch: Batch, request: Request) -> None:
        if request.input_length > most:
            batch.refuse(request, "too-long")
        elif first:
            batch.waiting.appendleft(request)
        else:
            usual(batch, request)

    return arrive


def _fewer_tokens(rng: random.Random) -> Body:
    """Takes on one prompt token less, where there are several."""

    def new_tokens(self: Any, usual: Body, *args: Any, **kwargs: Any) -> int:
        tokens: int = usual(*args, **kwargs)
        return tokens - (tokens > 2)

    return new_tokens


def _set_up(rng: random.Random) -> Body:
    """Changes what the constructor has set."""
    what = rng.choice(("victim", "requeue", "max_num_seqs", "watermark_blocks"))
    chosen = victim(rng.randrange(1_000))

    def init(self: Any, usual: Body, *args: Any, **kwargs: Any) -> None:
        usual(*args, **kwargs)
        if what == "victim":
            self.victim = chosen
        elif what == "requeue":
            self.requeue = lambda waiting, request: waiting.append(request)
        elif what == "max_num_seqs":
            self.max_num_seqs = max(1, self.max_num_seqs // 2)
        elif hasattr(self, what):
            self.watermark_blocks += 1

    return init


SCHEDULING = {
    "__init__": (_set_up,),
    "compose": (_reordering,),
    "arrive": (_arriving,),
    "settle": (_settling,),
    "refusal": (_refusing,),
    "_refusal": (_refusing,),
    "_hindrance": (_refusing,),
    "turns_away": (_giving_up,),
    "_never": (_giving_up,),
    "_take_victim": (_taking, _other_victim),
    "_make_room": (_other_victim,),
    "_prompts": (_other_victim,),
    "_running": (_other_victim,),
    "_new_tokens": (_fewer_tokens,),
}
"""Method of a scheduler -> what makes another body for it."""


def _more(rng: random.Random) -> Body:
    number = rng.choice((1, 1, 2))

    def need(self: Any, usual: Body, *args: Any) -> int:
        return int(usual(*args)) + number

    return need


def _fewer_hits(rng: random.Random) -> Body:
    def match(self: Any, usual: Body, sequence: Request) -> list[int]:
        return list(usual(sequence))[:-1]

    return match


def _spare_room(rng: random.Random) -> Body:
    """Leaves the last free block alone."""

    def extend(self: Any, usual: Body, sequence: Request, upto: int) -> bool:
        opens = upto > len(sequence.table) * self.block_size
        return not (opens and self.gpu.free < 2) and bool(usual(sequence, upto))

    return extend


def _publishing_late(rng: random.Random) -> Body:
    def publish(self: Any, usual: Body, sequence: Request, upto: int) -> None:
        usual(sequence, upto - self.block_size)

    return publish


MANAGING = {
    "admission_need": (_more,),
    "growth_need": (_more,),
    "need": (_more,),
    "swap_need": (_more,),
    "match": (_fewer_hits,),
    "extend": (_spare_room,),
    "publish": (_publishing_late,),
}
"""Method of a block manager -> what makes another body for it."""


def _pricing(rng: random.Random) -> Body:
    terms = rng.randrange(1, 8)

    def step_ns(self: Any, usual: Body, plan: Plan) -> int:
        type(self).notes.append(look(plan))
        return int(usual(plan)) + _price(plan, terms)

    return step_ns


PRICING = {"step_ns": (_pricing,)}


def _price(plan: Plan, terms: int) -> int:
    """A price of what a plan lists, `terms` being a set of three bits."""
    ns = 1_000 * len(plan.decodes) if terms & 1 else 0
    if terms & 2:
        ns += sum(sequence.length for request, *_ in plan.entries for sequence in request.sequences)
    return ns + 7 * sum(tokens for _, tokens, _ in plan.entries) if terms & 4 else ns


class BareCost:
    """A cost model that prices what a plan lists, and offers no more than `Cost` asks for."""

    kind = "constant"
    source = "what a plan lists"
    terms = 1
    notes: list[Any]

    def step_ns(self, plan: Plan) -> int:
        self.notes.append(look(plan))
        return 10_000_000 + _price(plan, self.terms)

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "source": self.source}


class Longest:
    """A cost model that prices sums and the three longest decoding sequences."""

    kind, source = "constant", "an outsider's"

    def step_ns(self, plan: Plan) -> int:
        prompts = sum(7_000 * new + before for new, before in plan.chunks)
        decodes = self._ns(plan.decode_seqs, plan.context_tokens, plan.longest(3))
        return decodes + prompts + 100 * plan.samples

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "source": self.source}

    def _ns(self, sequences: int, context_tokens: int, longest: Seq[int]) -> int:
        assert len(longest) == min(3, sequences), (sequences, longest)
        assert list(longest) == sorted(longest, reverse=True)
        assert sequences > 3 or sum(longest) == context_tokens, (context_tokens, longest)
        held_up = sum(weight * each for weight, each in zip((971, 53, 7), longest, strict=False))
        return 5_000_000 + 20_011 * sequences + 43 * context_tokens + held_up
