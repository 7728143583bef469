"""Eviction and idle orders of one's own, and other rules from outside: none breaks the books."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any

import pytest
import worlds
from exact.conformance.generate_prompts import make_arrivals, make_prompt
from exact.engines.mixes import CHUNKED, VARIANTS, make, play, rows
from librt.vecs import append
from orders import Uses

import kvsim
from kvsim.core.pool import Pool
from kvsim.core.vectors import EMPTY, numbers
from kvsim.engines.nano import NanoTables
from kvsim.errors import ConfigError
from kvsim.policies.eviction import EVICTIONS, make_eviction
from kvsim.policies.order import IDLE_ORDERS

OWN = "orders:AnyOrder"
WITHOUT_ORACLES = [name for name in EVICTIONS if name != "belady"]
EVERY = (*WITHOUT_ORACLES, OWN, "orders:TwoQueues")


def random_rules(rng: Random, engine: str) -> dict[str, Any]:
    """An eviction order, and for vLLM 0.6.3 an idle order, of the tables or from outside."""
    made = make_eviction(rng.choice(EVERY), seed=rng.randrange(9))
    if not engine.startswith("0.6.3"):
        return {"eviction": made}
    blank = rng.choice((*IDLE_ORDERS, make_eviction(OWN, seed=1)))
    return {"eviction": made, "idle_order": blank}


def test_any_order_keeps_the_books_and_every_request_ends() -> None:
    engines = sorted(set(VARIANTS) - {"nano 2025"})
    evicted = hits = 0
    for seed in range(250):
        rng = Random(seed)
        engine, blocks = rng.choice(engines), rng.choice([8, 9, 11, 20])
        budget = rng.choice([8, 16, 32]) if engine in CHUNKED else 60
        trace: list[dict[str, Any]] = []
        for arrival in make_arrivals(rng, rng.randint(4, 18)):
            prompt = make_prompt(rng, trace, rng.choice([1, 2, 40]), min(2 * blocks, 28))
            trace += rows((arrival, prompt, rng.randint(1, 12)), first=len(trace))
        made = make(engine, blocks, budget, **random_rules(rng, engine))
        log = list(play(made, trace))
        assert "error" not in log[-1], f"seed {seed}: {engine}"
        ended = sorted(name for step in log for name in step["finished"])
        assert ended == sorted(row["id"] for row in trace), f"seed {seed}: {engine}"
        pool = made[1].gpu
        assert pool.used == 0, f"seed {seed}: {engine}"
        evicted += pool.cached > blocks // 2
        hits += sum(each[2] > 0 for step in log for each in step.get("prefill", ()))
    assert min(evicted, hits) > 60


# -- what can be written ---------------------------------------------------------------------------


def hit_tokens(eviction: str, size: int, requests: list[list[int]], **given: Any) -> list[int]:
    """Leading keys that each request finds, one request at a time."""
    pool = Pool(size, make_eviction(eviction, **given))
    found = []
    for at, keys in enumerate(requests):
        if "future" in given:
            given["future"].now = at + 1
        known = [pool.find(key + 1) for key in keys]
        here = next((n for n, block in enumerate(known) if not block), len(keys))
        pool.hit(known[:here])
        table = [*known[:here], *pool.take_many(len(keys) - here)]
        held = EMPTY
        for place, (block, key) in enumerate(zip(table, keys, strict=True)):
            if place >= here:
                pool.keys[key + 1] = key
                pool.label(block, key + 1, 16 * (place + 1))
            held = append(held, block)
        pool.release(held, 0, len(held), at)
        pool.audit()
        found.append(here)
    return found


def two_queues(size: int, requests: list[list[int]]) -> list[int]:
    """2Q as its paper words it, on keys."""
    new: list[int] = []
    old: list[int] = []
    known: list[int] = []
    hits = []
    for (key,) in requests:
        hits.append(int(key in new or key in old))
        if key in old:
            old.remove(key)
            old.append(key)
        elif key not in new:
            if len(new) + len(old) == size:
                if len(new) > max(1, size // 4) or not old:
                    known.append(new.pop(0))
                    if len(known) > max(1, size // 2):
                        known.pop(0)
                else:
                    old.pop(0)
            if key in known:
                known.remove(key)
                old.append(key)
            else:
                new.append(key)
    return hits


@pytest.mark.parametrize("seed", range(60))
def test_2q_hits_what_its_paper_says(seed: int) -> None:
    rng = Random(seed)
    size = rng.randint(2, 12)
    requests = [[min(rng.randrange(30), rng.randrange(30))] for _ in range(300)]
    expected = two_queues(size, requests)
    assert hit_tokens("orders:TwoQueues", size, requests) == expected, f"seed {seed}"
    assert 0 < sum(expected) < 300


def prefix_requests(rng: Random, size: int) -> list[list[int]]:
    """Paths from the root of a small tree, at most `size` long; a key stands for its path."""
    keys: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(7):
        path = tuple(rng.randrange(2) for _ in range(rng.randint(1, size)))
        prefixes = [path[: depth + 1] for depth in range(len(path))]
        requests.append([keys.setdefault(prefix, len(keys)) for prefix in prefixes])
    return requests


def most_hits(size: int, requests: list[list[int]]) -> int:
    """The most leading keys that can be found, over everything that could be kept each time."""
    best = {frozenset[int](): 0}
    for keys in requests:
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            here = next((n for n, key in enumerate(keys) if key not in resident), len(keys))
            others = sorted(resident - set(keys))
            room = min(len(others), size - len(keys))
            for kept in combinations(others, room):
                state = frozenset({*kept, *keys})
                after[state] = max(after.get(state, 0), hits + here)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(60))
def test_belady_finds_as_much_as_can_be_found(seed: int) -> None:
    rng = Random(seed)
    size = rng.randint(2, 5)
    requests = prefix_requests(rng, size)
    found = hit_tokens("orders:Belady", size, requests, future=Uses(requests))
    assert sum(found) == most_hits(size, requests), f"seed {seed}"


# -- what nano-vllm does with blank blocks ---------------------------------------------------------


def test_with_an_order_of_its_own_nano_uses_up_blank_blocks_first() -> None:
    """A table of one full block and a part: the full one is first in the queue of the engine."""
    taken = {}
    for eviction in (None, "lru"):
        tables = NanoTables(4, 3, eviction=eviction)
        pool = tables.gpu
        full, part = pool.take(), pool.take()
        pool.keys[7] = 70
        tables.register(full, 7, 4)
        for block in (full, part):
            pool.release(numbers([block]), 0, 1, 0)
        pool.take()
        taken[eviction] = pool.take()
        pool.audit()
    assert taken == {None: full, "lru": part}


# -- what is refused -------------------------------------------------------------------------------

SAME = worlds.hashed(4, *((i * 5.0, 8, 9, [i, i + 50]) for i in range(30)))


def run(engine: str = "vllm-v1", vllm_version: str | None = None, **rules: str) -> Any:
    settings = worlds.config(
        engine=engine,
        vllm_version=vllm_version,
        disable_async_output_proc=None,
        enable_prefix_caching=True,
        num_gpu_blocks_override=18,
        block_manager_args=rules,
    )
    return kvsim.simulate(SAME, settings)


@pytest.mark.parametrize("version", ["0.10.0", "0.15.0"])
def test_an_order_of_its_own_leaves_blank_blocks_in_the_queue_of_old_releases(version: str) -> None:
    """Before 0.24, blocks without content wait behind those released before them."""
    summary = run(vllm_version=version, eviction="lfu").summary
    assert (summary["completed"], summary["failed"]) == (len(SAME.rows), 0)


@pytest.mark.parametrize("engine", ["vllm-0.6.3", "vllm-v1"])
@pytest.mark.parametrize(
    ("eviction", "words"),
    [
        ("lur", "eviction: unknown 'lur'; did you mean 'lru'. choose from .*, or give package"),
        (
            "orders:Lier",
            "eviction: module 'orders' has no 'Lier'; did you mean 'Liar'",
        ),
        ("orders:NoOrder", "eviction: orders:NoOrder is not a subclass of"),
        ("orders:Liar", "eviction: orders:Liar gave out -1, which is not idle"),
        ("orders:Needy", "eviction: orders:Needy needs 'wisdom'"),
    ],
)
def test_an_order_that_cannot_be_is_refused(engine: str, eviction: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(engine, eviction=eviction)


def test_the_seed_of_the_run_is_that_of_the_order() -> None:
    with pytest.raises(ConfigError, match="needs 'seed'"):
        make_eviction(OWN)(0, 4)
    assert run(eviction=OWN).meta["outcome"]["kind"] == "finished"


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("growth", "orders:cautious"),
        ("growth", "orders:Patient"),
        ("idle_order", OWN),
        ("publish_at", "orders:COMPUTED"),
        ("hits_save", "orders:CHARGE"),
        ("full_hit", "orders:TWO_TOKENS"),
    ],
)
def test_every_rule_can_come_from_outside(rule: str, name: str) -> None:
    assert run("vllm-0.6.3", **{rule: name}).meta["outcome"]["kind"] == "finished"


def test_a_growth_from_outside_decides_what_the_same_rule_of_the_table_does() -> None:
    own, table = (run("vllm-0.6.3", growth=name) for name in ("orders:Patient", "when-needed"))
    assert list(own.requests["finish_ns"]) == list(table.requests["finish_ns"])
    assert list(own.steps["free_blocks"]) == list(table.steps["free_blocks"])


@pytest.mark.parametrize(
    ("rule", "name", "words"),
    [
        ("growth", "owing", "growth: orders:owing returned -1; return a whole number of blocks"),
        (
            "growth",
            "unasked",
            "growth: orders:unasked is not called as .sequence, block_siz",
        ),
        ("publish_at", "cautious", "publish_at: orders:cautious is not a PublishAt"),
        (
            "full_hit",
            "NEGATIVE",
            "full_hit: orders:NEGATIVE: a number of tokens is below 0",
        ),
    ],
)
def test_a_rule_that_cannot_be_is_refused(rule: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run("vllm-0.6.3", **{rule: f"orders:{name}"})
