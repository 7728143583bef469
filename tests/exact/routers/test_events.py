"""What routers hear of replicas: cache events as the caches change, and measurements, in time."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from places import ROOT

from kvsim.core.blocks import CacheEvents, Stored
from kvsim.core.pool import Pool
from kvsim.fleet import simulate_fleet
from kvsim.fleet.routers.router import Asked, Choice, Router
from kvsim.run.assembly import Parts, assemble
from kvsim.run.simulation import simulate
from kvsim.settings.config import RunConfig
from kvsim.workload import Row, SegmentContent, Trace

CHAT = str(ROOT / "traces" / "chat.jsonl")
MS = 1_000_000
BASE: dict[str, Any] = {
    "model": "llama-3-8b",
    "num_prompts": 80,
    "max_model_len": 4096,
    "num_gpu_blocks_override": 260,
    "request_rate": 60.0,
}


def held(blocks: Any) -> Counter[int]:
    """What a cache holds: how often each key."""
    pool = blocks.gpu
    if not isinstance(pool, Pool):
        return Counter(key for node in pool.tree.nodes.values() for key in node.list_keys())
    contents = map(pool.content, range(1, pool.fresh))
    return Counter(pool.keys[content] for content in contents if content)


@pytest.mark.parametrize(
    "settings", [{}, {"engine": "sglang", "num_gpu_blocks_override": 4200}], ids=["v1", "sglang"]
)
def test_events_add_up_to_what_is_cached(settings: dict[str, Any]) -> None:
    events, made = CacheEvents(), list[Parts]()

    def watched(config: RunConfig) -> Parts:
        made.append(assemble(config))
        assert made[-1].blocks.report(events)
        return made[-1]

    simulate(CHAT, {**BASE, **settings}, parts_of=watched)
    told: Counter[int] = Counter()
    lost = 0
    for event in events.take():
        if isinstance(event, Stored):
            assert event.parent is None or told[event.parent] > 0
            told.update(event.keys)
        else:
            assert all(told[key] > 0 for key in event.keys)
            told.subtract(event.keys)
            lost += len(event.keys)
    assert lost
    assert +told == held(made[-1].blocks)
    assert events.take() == []


class Listener(Router):
    """Counts the blocks that it believes to be cached when a request comes."""

    heeds_events = True
    heard: list[tuple[int, int]]
    """When a request came, in milliseconds, and how many blocks were known."""

    def __init__(self, workers: Sequence[str], seed: int = 0, *, delay_ms: int = 0) -> None:
        super().__init__(workers, seed)
        self.event_delay_ns = delay_ms * MS
        self._known: Counter[Hashable] = Counter()
        Listener.heard = []

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        self.heard.append((now_ns // MS, sum(self._known.values())))
        return Choice([alive[0]])

    def stored(
        self,
        worker: int,
        parent: Hashable | None,
        keys: Sequence[Hashable],
        tier: str = "device",
    ) -> None:
        self._known.update(keys)


def every(milliseconds: Sequence[int]) -> Trace:
    """Requests with equal prompts of four blocks and one token to generate."""
    content = SegmentContent((("all", 64),))
    rows = [
        Row(index, str(index), index, at * MS, 64, 1, content)
        for index, at in enumerate(milliseconds)
    ]
    return Trace("made", "made", "", rows)


STEP: dict[str, Any] = {
    "model": "llama-3-8b",
    "max_model_len": 1024,
    "num_gpu_blocks_override": 100,
    "cost": {"model": "constant", "step_us": 10_000, "prefill_token_us": 0},
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("delay_ms", "known_ms"), [(0, 11), (25, 36)])
def test_events_come_when_the_step_is_over(
    asynchronous: bool, delay_ms: int, known_ms: int
) -> None:
    config = {**STEP, "async_scheduling": asynchronous}
    times = [0, 5, 10, 11, 34, 36]
    simulate_fleet(every(times), [config], f"{__name__}:Listener", {"delay_ms": delay_ms})
    assert [at for at, _ in Listener.heard] == times
    assert [known > 0 for _, known in Listener.heard] == [at >= known_ms for at in times]


class Measurer(Router):
    """Notes each measurement and the number of requests that were sent before."""

    scrape_ns = 20 * MS
    seen: list[tuple[int, tuple[int, int, float]]]

    def __init__(self, workers: Sequence[str], seed: int = 0, *, delay_ms: int = 0) -> None:
        super().__init__(workers, seed)
        self.scrape_delay_ns = delay_ms * MS
        self._sent = 0
        Measurer.seen = []

    def choose(self, asked: Asked, alive: Sequence[int], now_ns: int) -> Choice:
        self._sent += 1
        return Choice([alive[0]])

    def snapshot(self, loads: Sequence[tuple[int, int, float]]) -> None:
        self.seen.append((self._sent, loads[0]))


@pytest.mark.parametrize(("delay_ms", "sent"), [(0, 2), (5, 3), (65, 3)])
def test_what_was_measured_may_be_old_when_it_comes(delay_ms: int, sent: int) -> None:
    config = {**STEP, "async_scheduling": False}
    args = {"delay_ms": delay_ms}
    simulate_fleet(every([0, 15, 22, 90]), [config], f"{__name__}:Measurer", args)
    # At 20 ms the second request waits while nothing runs since 10: it came at 15, and runs.
    assert Measurer.seen[0] == (sent, (0, 1, pytest.approx(4 / 99)))


def test_what_comes_at_one_instant_is_routed_by_the_same_measurement() -> None:
    """Three requests come at 100 ms, which is a time to measure, too."""
    simulate_fleet(every([0, 100, 100, 100]), [STEP], f"{__name__}:Measurer")
    assert {sent for sent, _ in Measurer.seen} == {1, 4}


@pytest.mark.parametrize("router", ["dynamo-kv", "llm-d-precise"])
def test_a_prompt_follows_its_prefix_once_it_is_reported(router: str) -> None:
    # All replicas are idle whenever a request comes, so only the prefix decides.
    times = range(0, 2000, 100)
    fleet = simulate_fleet(every(times), [STEP] * 4, router)
    assert len(set(fleet.chosen)) == 1
    late = simulate_fleet(every(times), [STEP] * 4, router, {"kv_event_delay_ms": 1e6})
    assert len(set(late.chosen)) > 1
