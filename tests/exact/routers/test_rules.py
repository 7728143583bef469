"""The structures of routers beside dull ones, and what each rule promises."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.against.conform.routers import Written
from kvsim.errors import ConfigError
from kvsim.fleet import ROUTERS
from kvsim.fleet.routers import make_router
from kvsim.fleet.routers.dynamo import DynamoKv, Tier
from kvsim.fleet.routers.llm_d import Default, Precise
from kvsim.fleet.routers.router import Asked, BoundedHash, PowerOfTwo, SessionAffinity
from kvsim.fleet.routers.sglang import Tree

FOUR = ("a", "b", "c", "d")
EVERYONE = range(4)


def asked(id: str, session: str | None = None, blocks: int = 0, of: str = "x") -> Asked:
    return Asked(id, 16 * blocks, Written(((of, 16 * blocks),)), session)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_chooses_who_is_alive_and_repeats_itself(name: str) -> None:
    def routed() -> list[int]:
        router, rng, chosen = (
            make_router(name, {}, FOUR, seed=3, block_size=16),
            random.Random(5),
            [],
        )
        for number in range(60):
            alive = rng.sample(EVERYONE, rng.randint(1, 4))
            request = asked(f"r{number}", f"s{number % 7}", 1 + number % 5, f"p{number % 3}")
            chosen.append(router.route(request, alive, number * 10**9).worker)
            assert chosen[-1] in alive
            if number % 2:
                router.first_token(f"r{number - 1}")
                router.ended(f"r{number - 1}")
        return chosen

    assert routed() == routed()


def test_an_outsider_names_a_class_and_gives_it_arguments() -> None:
    router = make_router(
        "kvsim.fleet.routers.router:BoundedHash", {"bound": 2.0}, FOUR, block_size=16
    )
    assert isinstance(router, BoundedHash)
    with pytest.raises(ConfigError, match="bound is"):
        make_router("bounded-hash", {"bound": 0.5}, FOUR, block_size=16)
    with pytest.raises(ConfigError, match="unknown 'least-load'; did you mean 'least-loaded'"):
        make_router("least-load", {}, FOUR, block_size=16)


@given(st.lists(st.text("ab", max_size=6), max_size=30), st.text("ab", max_size=6))
def test_the_tree_finds_the_longest_prefix_of_all_texts(texts: list[str], sought: str) -> None:
    tree = Tree(3)
    for number, text in enumerate(texts):
        tree.insert(text, number % 3)
    known = {text[:end] for text in texts for end in range(len(text) + 1)} | {""}
    assert tree.search(sought)[0] == max(n for n in range(len(sought) + 1) if sought[:n] in known)
    prefixes = [
        {text[:end] for text in texts[worker::3] for end in range(1, len(text) + 1)}
        for worker in range(3)
    ]
    assert tree.held == [len(each) for each in prefixes]


@given(st.lists(st.text("ab", min_size=1, max_size=8), max_size=30), st.integers(0, 20))
def test_an_eviction_ends_at_the_limit_and_counts_right(texts: list[str], most: int) -> None:
    tree = Tree(2)
    for number, text in enumerate(texts):
        tree.insert(text, number % 2)
    tree.evict(most)
    assert all(held <= most for held in tree.held)
    nodes, held = list(tree.root.children.values()), [0, 0]
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        assert node.holders or node.children
        for worker in node.holders:
            held[worker] += len(node.text)
    assert held == tree.held


MOVES = st.lists(
    st.tuples(st.sampled_from(["stored", "removed"]), st.integers(0, 3), st.integers(0, 6)),
    max_size=40,
)


@given(MOVES, st.integers(0, 3))
def test_a_tier_holds_what_a_list_of_prompts_holds(
    moves: list[tuple[str, int, int]], sought: int
) -> None:
    """Prompts share their first two blocks."""

    def keys(prompt: int) -> list[tuple[int, int]]:
        return [(prompt if i >= 2 else 0, i) for i in range(6)]

    tier, dull = Tier(), set[tuple[int, int]]()
    for move, prompt, at in moves:
        chain = keys(prompt)
        if move == "stored":
            parent = chain[at - 1] if at else None
            tier.stored(parent, chain[at:])
            if parent is None or parent in dull:
                dull |= set(chain[at:])
        elif at < len(chain):
            tier.removed([chain[at]])
            if chain[at] in dull:
                below = {chain[at], *chain[at:]} if at >= 2 else {k for k in dull if k[1] >= at}
                dull -= below
    assert len(tier) == len(dull)
    run = 0
    while run < 6 and keys(sought)[run] in dull:
        run += 1
    assert tier.run(keys(sought)) == run


def test_the_books_of_dynamo_are_those_of_the_requests_that_are_left() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        router, live = DynamoKv(("a", "b")), dict[str, tuple[int, Asked, int]]()
        for number in range(60):
            if live and rng.random() < 0.45:
                id = rng.choice(list(live))
                if rng.random() < 0.5:
                    router.output_block(id)
                    worker, request, outputs = live[id]
                    live[id] = worker, request, outputs + 1
                else:
                    router.ended(id)
                    del live[id]
            else:
                request = asked(f"r{number}", None, rng.randint(1, 6), f"p{rng.randint(0, 2)}")
                live[request.id] = (router.route(request, (0, 1), 0).worker, request, 0)
            for worker, books in enumerate(router.books):
                own = [(each, n) for where, each, n in live.values() if where == worker]
                distinct = {key for each, _ in own for key in each.content.keys(16)}
                assert books.requests == len(own), f"seed {seed}"
                assert books.blocks == len(distinct) + sum(n for _, n in own), f"seed {seed}"
                assert books.prefill_tokens == sum(e.input_length for e, _ in own), f"seed {seed}"


def test_without_events_dynamo_forgets_what_it_sent() -> None:
    router = DynamoKv(("a", "b"), use_kv_events=False, ttl_secs=1.0)
    first = router.route(asked("r0", None, 4), (0, 1), 0).worker
    router.ended("r0")
    assert router.choose(asked("r1", None, 4), (0, 1), 10**9 - 1).workers == [first]
    assert router.choose(asked("r1", None, 4), (0, 1), 10**9).workers == [0, 1]


def drawn(choose: Callable[[], int], times: int = 4000) -> Counter[int]:
    return Counter(choose() for _ in range(times))


def test_power_of_two_draws_as_often_as_pairs_say() -> None:
    router = PowerOfTwo(FOUR)
    router.load = [3, 1, 1, 0]
    wins: Counter[int] = Counter()
    for pair in combinations(EVERYONE, 2):
        for one, other in (pair, pair[::-1]):  # the first of equals wins
            wins[min(one, other, key=lambda worker: (router.load[worker], worker != one))] += 1
    choice = router.choose(asked("r"), EVERYONE, 0)
    assert choice.weights is not None
    assert {
        w: 2 * weight for w, weight in zip(choice.workers, choice.weights, strict=True) if weight
    } == wins


def test_a_bounded_hash_never_gives_a_worker_more_than_its_share() -> None:
    router = BoundedHash(FOUR)
    for number in range(200):
        worker = router.route(asked(f"r{number}", "one and the same"), EVERYONE, 0).worker
        assert router.load[worker] <= -(-(1.25 * (number + 1)) // 4)


def test_a_session_keeps_its_worker_while_it_lives() -> None:
    router = SessionAffinity(FOUR)
    assert len({router.route(asked(f"r{n}", "s"), EVERYONE, n).worker for n in range(20)}) == 1
    others = {router.route(asked("r", f"s{n}"), EVERYONE, 0).worker for n in range(100)}
    assert others == set(EVERYONE)


def test_llm_d_weighs_queues_caches_and_prefixes() -> None:
    router = Default(("a", "b"))
    request = Asked("r", 0, Written((("x", 640),)))
    assert router.choose(request, (0, 1), 0).workers == [0, 1]
    router.sent(request, 1, 0)
    assert router.choose(request, (0, 1), 0).workers == [1]
    router.snapshot([(0, 0, 0.0), (4, 0, 1.0)])  # 2 for the queue and 2 for the cache beat 3
    assert router.choose(request, (0, 1), 0).workers == [0]


def test_llm_d_cannot_tell_prompts_apart_behind_its_last_piece() -> None:
    router = Default(("a", "b"))
    router.sent(Asked("r", 0, Written((("x", 64 * 256), ("y", 64)))), 1, 0)
    other = Asked("s", 0, Written((("x", 64 * 256), ("z", 6400))))
    assert router.known(other, (0, 1)) == {0: 0.0, 1: 1.0}


def test_a_full_list_of_llm_d_loses_the_head_and_still_counts_the_tail() -> None:
    router = Default(("a", "b"), lru_capacity=3)
    long = Asked("r", 0, Written((("x", 64 * 4),)))
    router.sent(long, 0, 0)  # pieces 2, 3, 4 are left
    assert router.known(long, (0, 1)) == {0: 0.0, 1: 0.0}
    router.sent(Asked("s", 0, Written((("x", 64),))), 1, 0)  # another worker has piece 1
    assert router.known(long, (0, 1)) == {0: 0.75, 1: 0.25}


def test_the_precise_profile_believes_events() -> None:
    router = Precise(("a", "b"), block_size=16)
    request = asked("r", None, 4)
    keys = request.content.keys(16)
    router.stored(1, None, keys[:2])
    assert router.known(request, (0, 1)) == {0: 0.0, 1: 0.5}
    router.removed(1, keys[1:2])
    assert router.known(request, (0, 1)) == {0: 0.0, 1: 0.25}


def test_llm_d_counts_requests_that_have_not_ended() -> None:
    weights = {"prefix_weight": 0.0, "kv_cache_weight": 1.0, "queue_weight": 0.0}
    router = Default(("a", "b"), active_request_weight=1.0, **weights)
    for number, worker in enumerate((0, 0, 1)):
        router.sent(asked(f"r{number}"), worker, 0)
    assert router.choose(asked("s"), (0, 1), 0).workers == [1]
    router.snapshot([(0, 0, 0.0), (0, 0, 0.6)])  # 1 + 0 against 0.4 + 1/2
    assert router.choose(asked("s"), (0, 1), 0).workers == [0]
    router.ended("r2")
    assert router.choose(asked("s"), (0, 1), 0).workers == [1]
