"""Orders that hear of sessions, and a trace of ten requests that was worked out by hand."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsim.engines.vllm_v1.cpu_tier import Access, Lru
from kvsim.policies.sessions import SessionOrder
from kvsim.run.simulation import simulate
from kvsim.settings.config import make_config
from kvsim.workload import ParentContent, Row, Trace
from kvsim.workload.synthetic import synthesise

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples" / "agents"
ORDERS = (
    "ttl_hints:TtlHints",
    "ttl_hints:Bounded",
    "programmatic:Programmatic",
    "superseded:Superseded",
    "continuum:CacheTtl",
    "workload_aware:WorkloadAware",
)


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("ttl_hints", "programmatic", "superseded", "continuum", "workload_aware", "sae"):
        sys.modules.pop(name, None)


class ByLastUse(SessionOrder):
    """No rule of its own."""


def run(trace: Trace, order: str, **settings: Any) -> Any:
    given = {"model": "tiny", "hardware": "h100", "block_size": 16, **settings}
    args = {"eviction": order}
    return simulate(trace, make_config({**given, "block_manager_args": args}, "test"))


def a_second_apart(sessions: str, lengths: list[int], hints: dict[int, dict[str, Any]]) -> Trace:
    """Requests of one output token, one a second; a turn begins with the last of its session."""
    last: dict[str, int] = {}
    rows = []
    for place, (session, length) in enumerate(zip(sessions, lengths, strict=True)):
        before = last.get(session)
        keep = 0 if before is None else min(length, lengths[before]) // 16 * 16
        content = None if before is None else ParentContent(before, keep)
        rows.append(
            Row(
                *(place, str(place), place + 2, place * 1_000_000_000, length, 1, content),
                session=session,
                extra=hints.get(place),
            )
        )
        last[session] = place
    return Trace(path="ten", format="native", sha256="ten", rows=rows)


def cached(result: Any) -> list[int]:
    return [int(tokens) for tokens in result.requests["num_cached_tokens"]]


TEN = "ABACADBEFA"
LENGTHS = [64, 64, 80, 64, 96, 64, 80, 64, 64, 112]
"""4 to 7 blocks of 16 tokens. The pool has 14: for the 6 of A (0, 2, 4) and two others of 4."""


def test_ten_requests_by_hand() -> None:
    """LRU: when 6 (B) comes, the last used are D (5), A (4), C (3): 4 + 6 + 4 = 14 blocks fill the
    pool, so B (1) was evicted and nothing hits. B takes 5, those of C and one of A's tail; E (7)
    takes the other 5 of A but one; F (8) that one and D's. A (9) finds nothing.

    With A pinned for an hour at 4, C, D, B and E give way instead, and 9 finds all 6 blocks of A.

    A lasts from 0 to 9 s, B from 1 to 6 s, four sessions a moment. Of 752 prompt tokens, LRU finds
    144; 6 and 9 have lost 64 and 96.
    """
    plain = a_second_apart(TEN, LENGTHS, {})
    pinned = a_second_apart(TEN, LENGTHS, {4: {"ttl_s": 3600}})
    pool: dict[str, Any] = {"num_gpu_blocks_override": 15, "max_model_len": 128}
    lru = run(plain, "lru", **pool)
    assert cached(lru) == [0, 0, 64, 0, 80, 0, 0, 0, 0, 0]
    of = lru.summary["sessions"]
    assert of["mean_s"] == pytest.approx((9 + 5) / 6, abs=0.01)
    assert (of["lost_in_pauses_tokens"], of["computed_tokens"]) == (64 + 96, 752 - 144)
    assert cached(run(plain, "ttl_hints:TtlHints", **pool)) == [0, 0, 64, 0, 80, 0, 0, 0, 0, 0]
    assert cached(run(pinned, "ttl_hints:TtlHints", **pool)) == [0, 0, 64, 0, 80, 0, 0, 0, 0, 96]


def test_why_orders_by_frequency_lose_hits_of_agents_by_hand() -> None:
    """A ends after two turns, B and C go on; their last prompts, 7 blocks each, fill the pool.

    LRU: A goes first, so every turn finds all of the turn before. SLRU: what A used twice stays
    protected, and what goes first is what was used once: just the end of the other's last turn.
    6 (B) takes C's fifth block, so 7 (C) finds 4, takes B's sixth and one of A; 8 (B) finds 5 and
    takes C's fifth and sixth, so 9 (C) finds 4.
    """
    trace = a_second_apart("AABCBCBCBC", [64, 80, 64, 64, 80, 80, 96, 96, 112, 112], {})
    pool: dict[str, Any] = {"num_gpu_blocks_override": 15, "max_model_len": 128}
    assert cached(run(trace, "lru", **pool)) == [0, 64, 0, 0, 64, 64, 80, 80, 96, 96]
    assert cached(run(trace, "slru", **pool)) == [0, 64, 0, 0, 64, 64, 80, 64, 80, 64]


def test_programs_in_order_and_a_tier_by_hand() -> None:
    """Three sessions of three turns, 4 full blocks each; a request needs the whole pool of 5, one
    runs at a time, and the tier has room for two sessions. A turn is sent while another runs.

    First come, first served, the turns are A B C A B C A B C: the third session always takes the
    tier from the one that comes next, so nobody finds anything. Programs in order, they are A B A B
    A B C C C: alone, only C's turns, between which nobody runs, find theirs; with the tier, which
    has to hold A and B only, all do. C pays for it. Neither half is worth much without the other.
    """
    rows = []
    for i in range(9):
        before = (ParentContent(i - 3, 64), i - 3, 100_000) if i > 2 else (None, -1, 0)
        rows.append(Row(i, str(i), i + 2, i * 1000, 65 + i // 3, 1, *before, "ABC"[i % 3]))
    trace = Trace(path="nine", format="native", sha256="nine", rows=rows)
    given: dict[str, Any] = {"model": "tiny", "hardware": "h100", "block_size": 16}
    given |= {"max_model_len": 80, "max_num_seqs": 1, "num_gpu_blocks_override": 6}
    tier = {"kv_offloading_size": 8 * 4096 / 2**30}
    ordered = {"engine": "continuum:ProgramsInOrder"}
    plain, order, tiered, both = (
        simulate(trace, make_config(given | more, "test"))
        for more in ({}, ordered, tier, ordered | tier)
    )
    assert cached(plain) == cached(tiered) == [0] * 9
    assert cached(order) == [0, 0, 0, 0, 0, 64, 0, 0, 64]
    assert cached(both) == [0, 0, 0, 64, 64, 64, 64, 64, 64]
    assert both.requests["finish_ns"][2] > 2 * tiered.requests["finish_ns"][2]


def test_a_pool_that_is_all_pins_goes_on_and_says_so() -> None:
    """Whoever pins everything gets no more than the pool: wishes are refused or broken."""
    greedy = a_second_apart(
        TEN, LENGTHS, {place: {"ttl_s": 3600, "pin": 3600} for place in range(10)}
    )
    for order in ("ttl_hints:TtlHints", "ttl_hints:Bounded", "programmatic:Programmatic"):
        result = run(greedy, order, num_gpu_blocks_override=15, max_model_len=128)
        assert result.summary["completed"] == 10
        [said] = [note for note in result.meta["notes"] if note.startswith("hints")]
        assert "10 wishes to pin" in said
        assert "refused" in said or "broken" in said


def test_without_a_rule_it_is_lru() -> None:
    """On blocks, an order without a rule decides what vLLM's own decides."""
    trace = synthesise("agents", 3, requests=80)
    pool: dict[str, Any] = {"num_gpu_blocks_override": 3000, "max_model_len": 24_000}
    own = run(trace, f"{__name__}:ByLastUse", **pool)
    lru = run(trace, "lru", **pool)
    assert cached(own) == cached(lru)
    assert list(own.requests["finish_ns"]) == list(lru.requests["finish_ns"])
    assert sum(lru.requests["evicted_tokens"]) > 0


@pytest.mark.parametrize("order", ORDERS)
def test_every_proposal_serves_all_on_both_engines(order: str) -> None:
    trace = synthesise("agentx", 1, requests=40, rate=0.1)
    given: dict[str, Any] = {"num_gpu_blocks_override": 900, "max_model_len": 220_000}
    given |= {"model": "qwen3-30b-a3b-2507", "hardware": "h200"}
    result = run(trace, order, **{**given, "block_size": 256})
    assert result.summary["completed"] == 40
    args = {"radix_eviction_policy": order}
    sglang = {**given, "engine": "sglang", "block_size": 1, "num_gpu_blocks_override": 230_400}
    config = make_config({**sglang, "block_manager_args": args}, "test")
    assert simulate(trace, config).summary["completed"] == 40


def test_why_chains_of_requests_lose_hits_of_agents_by_hand() -> None:
    """A stores 1 2 3, B hits 1 and stores 4, A's next turn hits 1 2 3 and stores 5. LRU then gives
    up what only B used, and A's from its tail. In SAE, A's turns are two chains: the one that began
    the session goes before 5, which is worth nothing without it."""
    from sae import Sae

    for policy, order in ((Lru(10), [4, 5, 3, 2, 1]), (Sae(10), [4, 3, 2, 1, 5])):
        for prompt, stored in (([1, 2, 3], [1, 2, 3]), ([1, 4], [4]), ([1, 2, 3, 5], [5])):
            access = Access()
            access.position = {key: 16 * (place + 1) for place, key in enumerate(prompt)}
            access.seen = dict.fromkeys(prompt)
            policy.accessed(prompt, access)
            policy.inserted(stored, access)
            policy.ended(access)
        assert policy.evict(6, lambda key: True) is None
        assert [policy.evict(1, lambda key: True) for _ in range(5)] == [[key] for key in order]


def test_the_tier_takes_chains_of_an_outsider() -> None:
    trace = synthesise("agentx", 1, requests=40, rate=0.1)
    given = {"model": "qwen3-30b-a3b-2507", "hardware": "h200", "block_size": 256}
    given |= {"num_gpu_blocks_override": 900, "max_model_len": 220_000, "kv_offloading_size": 20}
    tier = {"kv_connector_extra_config": {"eviction_policy": "sae:Sae"}}
    result = simulate(trace, make_config({**given, **tier}, "test"))
    assert result.summary["completed"] == 40
    assert result.summary["tier1_hit_tokens"] > 0
