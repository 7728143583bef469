"""What is noted of a router's decisions changes nothing; its sums hold, its causes are right."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import make_trace
from marks import mostly_long
from places import ROOT

from kvsim.core.schema import CAUSES
from kvsim.errors import ConfigError
from kvsim.fleet import ROUTERS, FleetResult, find_bounds, simulate_fleet, summarise_fleet
from kvsim.fleet.figures import in_flight, load_imbalance
from kvsim.fleet.routers.router import Asked, Choice, Router
from kvsim.workload import SegmentContent, Trace, open_trace
from kvsim.workload.keys import streams
from kvsim.workload.reuse import ceiling_tokens

CHAT = str(ROOT / "traces" / "chat.jsonl")
BASE: dict[str, Any] = {
    "model": "llama-3-8b",
    "num_prompts": 60,
    "max_model_len": 4096,
    "num_gpu_blocks_override": 300,
}
WAYS: dict[str, dict[str, Any]] = {
    "vllm-v1": {},
    "closed loop": {"max_concurrency": 12},
    "pressure": {"num_gpu_blocks_override": 260, "request_rate": 60.0},
    "vllm-0.6.3": {"engine": "vllm-0.6.3", "enable_prefix_caching": True},
    "nano-vllm": {"engine": "nano-vllm", "block_size": 256, "num_gpu_blocks_override": 40},
    "sglang": {"engine": "sglang", "num_gpu_blocks_override": 4800},
    "no cache": {"enable_prefix_caching": False},
}
PUBLISHING = ("vllm-v1", "closed loop", "pressure", "sglang")
"""Ways with an engine that reports what its cache has."""
EVENTS = ("dynamo-kv", "llm-d-precise")
"""Routers that go by such reports."""
ROUTED = [
    (router, way)
    for router, way in product(ROUTERS, WAYS)
    if router not in EVENTS or way in PUBLISHING
]


def explained(router: str, replicas: int = 3, **settings: Any) -> FleetResult:
    return simulate_fleet(CHAT, [{**BASE, **settings}] * replicas, router, explain=True)


@pytest.mark.parametrize("number", mostly_long(12, quick=1))
def test_asking_changes_nothing(number: int) -> None:
    router, way = ROUTED[number * 11 % len(ROUTED)]
    asked = explained(router, **WAYS[way], seed=number)
    unasked = simulate_fleet(CHAT, [{**BASE, **WAYS[way], "seed": number}] * 3, router)
    assert asked.decisions is not None and unasked.decisions is None
    for one, other in zip(asked.replicas, unasked.replicas, strict=True):
        for name, column in one.requests.items():
            assert np.array_equal(column, other.requests[name]), f"{router}, {way}: {name}"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "pressure"])
def test_what_was_cached_is_what_a_request_finds_if_it_is_alone(way: str) -> None:
    fleet = explained("random", **{**WAYS[way], "max_concurrency": 1})
    noted = fleet.decisions
    assert noted is not None
    admitted = fleet.requests["first_scheduled_ns"] >= 0
    found = fleet.requests["num_cached_tokens"][admitted]
    assert noted["cached_tokens"][admitted].tolist() == found.tolist()
    assert found.any() == (way != "no cache")


@pytest.mark.parametrize("router", ROUTERS)
def test_sums_hold(router: str) -> None:
    fleet = explained(router, **WAYS["pressure"])
    figures = summarise_fleet(fleet)
    routing = figures["routing"]
    lost = routing["best_tokens"] - routing["cached_tokens"]
    assert sum(routing["regret_tokens"].values()) == lost >= 0
    assert routing["luck_tokens"] + routing["affinity_tokens"] == pytest.approx(
        routing["cached_tokens"]
    )
    assert routing["cached_tokens"] + routing["waiting_tokens"] == routing["hit_tokens"]
    assert routing["hit_tokens"] == figures["prefix_cache_hit_tokens"]
    assert routing["prompt_tokens"] == figures["prefix_cache_query_tokens"]
    assert 1 <= figures["load_imbalance"] <= 3
    noted = fleet.decisions
    assert noted is not None
    blind = ROUTERS[router].expected is Router.expected
    causes = {CAUSES[code] for code in noted["cause"]}
    assert causes <= ({"", "no_index"} if blind else set(CAUSES) - {"no_index"})
    assert ((noted["expected_tokens"] < 0) == blind).all()
    assert (noted["eligible"] == 3).all()
    assert (noted["least_in_flight"] <= noted["in_flight"]).all()


def prompts_alike(number: int, length: int = 640) -> Trace:
    """Requests a second apart with one and the same prompt."""
    return make_trace([(length, 2, SegmentContent((("same", length),)))] * number)


class Scripted(Router):
    """Sends the first request to worker 0 and the others to worker 1, for a reason that is told."""

    def __init__(
        self,
        workers: Sequence[str],
        seed: int = 0,
        *,
        knows: tuple[int, int] | None = None,
        draws: bool = False,
        limit: int | None = None,
    ) -> None:
        super().__init__(workers, seed)
        self._knows, self._draws, self._count = knows, draws, 0
        self.index_limit_tokens = limit

    def expected(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Mapping[int, int] | None:
        return None if self._knows is None else dict(enumerate(self._knows))

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        self._count += 1
        if self._count == 1:
            return Choice([0])
        return Choice([0, 1], [0.0, 1.0]) if self._draws else Choice([1])


@pytest.mark.parametrize(
    ("cause", "args"),
    [
        ("no_index", {}),
        ("stale_index", {"knows": [0, 0]}),
        ("stale_index", {"knows": [16, 32], "draws": True}),
        ("load", {"knows": [640, 0]}),
        ("tie", {"knows": [640, 0], "draws": True}),
        ("index_cap", {"knows": [512, 512], "limit": 512}),
        ("load", {"knows": [512, 256], "limit": 512}),
    ],
)
def test_every_loss_has_its_cause(cause: str, args: dict[str, Any]) -> None:
    base = {**BASE, "num_prompts": None}
    fleet = simulate_fleet(prompts_alike(3), [base] * 2, f"{__name__}:Scripted", args, explain=True)
    noted = fleet.decisions
    assert noted is not None
    assert noted["replica"].tolist() == [0, 1, 1]
    # The block of the last token never hits (vLLM 0.33.0, `v1/core/kv_cache_manager.py`).
    assert noted["best_tokens"].tolist() == [0, 624, 624]
    assert noted["cached_tokens"].tolist() == [0, 0, 624]
    assert noted["best_replica"].tolist() == [0, 0, 1]
    assert [CAUSES[code] for code in noted["cause"]] == ["", cause, ""]
    routing = summarise_fleet(fleet)["routing"]
    assert routing["regret_tokens"][cause] == 624
    assert routing["regret_decisions"][cause] == 1
    assert routing["luck_tokens"] == 624 / 2 + 624
    assert routing["duplicate_tokens"] == 624


def test_an_index_ends_where_it_says() -> None:
    """llm-d's index has 256 pieces of a block each: prompts that agree so far are equal to it."""
    base = {**BASE, "num_prompts": None, "max_model_len": 8192, "num_gpu_blocks_override": 2000}
    router = ROUTERS["llm-d-default"](("a", "b"), block_size=16)  # type: ignore[call-arg]
    assert router.index_limit_tokens == 4096
    fleet = simulate_fleet(prompts_alike(8, 6400), [base] * 2, "llm-d-default", explain=True)
    assert fleet.decisions is not None
    assert fleet.decisions["expected_tokens"].max() <= 4096


def test_bounds_of_one_replica_are_one_number() -> None:
    trace = open_trace(CHAT)
    fleet = explained("random", 1)
    bounds = find_bounds(trace, fleet)
    assert bounds is not None
    assert bounds.as_sent == bounds.by_session == bounds.pooled
    assert bounds.pooled <= bounds.pooled_optimum <= bounds.unlimited
    admitted = np.flatnonzero(fleet.requests["first_scheduled_ns"] >= 0).tolist()
    rows, prompts = ([each[place] for place in admitted] for each in (trace.rows, streams(trace)))
    assert bounds.unlimited == ceiling_tokens(rows, prompts, 16, outputs=True)
    assert summarise_fleet(fleet, bounds)["routing"]["bounds"] == bounds.record()


def test_bounds_are_in_order() -> None:
    trace = open_trace(CHAT)
    bounds = find_bounds(trace, explained("round-robin"))
    assert bounds is not None
    others = bounds.as_sent, bounds.by_session, bounds.pooled
    # Caches apart are one way to use a pool, and the optimum is the best of all ways.
    assert 0 < max(others) <= bounds.pooled_optimum <= bounds.unlimited
    alike = prompts_alike(4)
    base = {**BASE, "num_prompts": None}
    fleet = simulate_fleet(alike, [base] * 2, "round-robin", explain=True)
    assert find_bounds(alike, fleet) == (2 * 624, 2 * 624, 3 * 624, 3 * 624, 3 * 624)


def test_no_bounds_without_caches_or_with_several_block_sizes() -> None:
    trace = open_trace(CHAT)
    assert find_bounds(trace, explained("random", **WAYS["no cache"])) is None
    sizes = [BASE, {**BASE, "block_size": 32, "num_gpu_blocks_override": 200}]
    mixed = simulate_fleet(CHAT, sizes, "random", explain=True)
    assert find_bounds(trace, mixed) is None
    assert mixed.decisions is not None
    assert mixed.decisions["cached_tokens"].any()
    assert find_bounds(trace, simulate_fleet(CHAT, [BASE] * 2, "random")) is None


TIMES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(0, 2)), min_size=1, max_size=12
)


@given(TIMES)
def test_load_is_counted_like_by_hand(times: list[tuple[int, int, int]]) -> None:
    requests = {
        "arrival_ns": np.array([begin for begin, _, _ in times]),
        "finish_ns": np.array([begin + spent for begin, spent, _ in times]),
        "replica": np.array([replica for _, _, replica in times]),
    }
    instants, counts = in_flight(requests, 3)
    by_hand = [
        [sum(b <= now < b + spent and r == replica for b, spent, r in times) for now in range(40)]
        for replica in range(3)
    ]
    for now, each in zip(instants.tolist(), counts.T.tolist(), strict=True):
        assert each == [row[now] for row in by_hand]
    most = sum(max(row[now] for row in by_hand) for now in range(40))
    mean = sum(sum(row[now] for row in by_hand) for now in range(40)) / 3
    found = load_imbalance(requests, 3)
    assert found == (pytest.approx(most / mean) if mean else None)


def test_a_router_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        simulate_fleet(CHAT, [], explain=True)
