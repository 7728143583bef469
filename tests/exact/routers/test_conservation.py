"""Over replicas nothing is lost and nothing counted twice, for any router and any engine."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from fuzz.draw import draw_clients, draw_trace
from fuzz.equal import difference, imbalance, limited
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import examples, long
from places import ROOT

from kvsim.errors import ConfigError
from kvsim.fleet import ROUTERS, FleetResult, simulate_fleet, summarise_fleet
from kvsim.fleet.routers.router import Uniform
from kvsim.results.ledger import PROMPT_PARTS, TIME_PARTS
from kvsim.workload import Trace

ENGINES = ("vllm-v1", "vllm-0.6.3", "vllm-0.3.3", "nano-vllm", "sglang")
LIMIT_S = 20.0
CHAT = str(ROOT / "traces" / "chat.jsonl")


class Listening(Uniform):
    """Heeds what it hears as little as the original, which does not say so."""

    def ended(self, id: str) -> None:
        pass


def load(seed: int, engine: str) -> tuple[Trace, dict[str, Any]]:
    """A random trace, and settings under which an engine serves it on few blocks."""
    rng = random.Random(seed)
    size = 256 if engine == "nano-vllm" else 16
    table = {
        "engine": engine,
        "block_size": 1 if engine == "sglang" else size,
        "num_gpu_blocks_override": rng.randrange(40, 120) * (16 if engine == "sglang" else 1),
        "max_model_len": 512,
        "max_num_seqs": rng.choice((2, 4, 16)),
        "cost": {"model": "constant", "step_us": rng.choice((1000, 20_000))},
        "seed": seed,
        **draw_clients(rng),
    }
    return draw_trace(rng), table


def fleet(trace: Trace, table: dict[str, Any], replicas: int, router: str) -> FleetResult | None:
    """What the replicas did; None if refused, as an engine that publishes no events may be."""
    try:
        with limited(LIMIT_S):
            return simulate_fleet(trace, [table] * replicas, router)
    except ConfigError:
        return None


@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 1 << 20),
    engine=st.sampled_from(ENGINES),
    router=st.sampled_from(sorted(ROUTERS)),
    replicas=st.integers(1, 5),
)
@example(seed=1, engine="vllm-v1", router="round-robin", replicas=64)
@example(seed=2, engine="vllm-v1", router="dynamo-kv", replicas=3)
@example(seed=3, engine="sglang", router="llm-d-precise", replicas=3)
def test_books_of_all_replicas_add_up(seed: int, engine: str, router: str, replicas: int) -> None:
    trace, table = load(seed, engine)
    result = fleet(trace, table, replicas, router)
    if result is None:
        return
    together, count = result.requests, len(trace.rows)
    assert together["index"].tolist() == list(range(count)), "each request once"
    assert list(together["id"]) == [row.id for row in trace.rows]
    figures = summarise_fleet(result)
    for key, whole in (("num_requests", count), ("completed", figures["completed"])):
        assert sum(each[key] for each in figures["replicas"]) == whole
    for key in ("total_input_tokens", "total_output_tokens"):
        assert sum(each[key] for each in figures["replicas"]) == figures[key]
    done = np.array(together["status"]) == "completed"
    asked = np.array([row.output_length for row in trace.rows])
    assert (together["output_tokens"] == asked * together["n"])[done].all()
    for replica in result.replicas:
        assert not imbalance(replica)
    for columns in (together, *(replica.requests for replica in result.replicas)):
        over = columns["finish_ns"] >= 0
        spent_ns = columns["finish_ns"] - columns["arrival_ns"]
        assert (sum(columns[name] for name in TIME_PARTS) == spent_ns)[over].all()
        if PROMPT_PARTS[1] in columns:
            tokens = sum(columns[name] for name in PROMPT_PARTS)
            assert (tokens == columns["input_length"])[columns["first_scheduled_ns"] >= 0].all()


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1 << 20), engine=st.sampled_from(ENGINES), replicas=st.integers(1, 4))
def test_replicas_apart_do_what_they_do_together(seed: int, engine: str, replicas: int) -> None:
    trace, table = load(seed, engine)
    apart, together = (
        fleet(trace, table, replicas, router) for router in ("random", f"{__name__}:Listening")
    )
    assert (apart is None) == (together is None)
    if apart is None or together is None:
        return
    assert apart.chosen == together.chosen
    for one, other in zip(apart.replicas, together.replicas, strict=True):
        assert not difference(one, other)
    for one, other in zip(apart.indexes, together.indexes, strict=True):
        assert one.tolist() == other.tolist()


@long
def test_any_number_of_processes_gives_the_same_bytes() -> None:
    table = {"model": "llama-3-8b", "request_rate": 40.0, "sessions": "recorded"}
    one, two = (simulate_fleet(CHAT, [table] * 3, "session-affinity", jobs=jobs) for jobs in (1, 2))
    assert one.chosen == two.chosen
    assert summarise_fleet(one) == summarise_fleet(two)
    for mine, other in zip(one.replicas, two.replicas, strict=True):
        assert mine.meta == other.meta
        assert not difference(mine, other)
