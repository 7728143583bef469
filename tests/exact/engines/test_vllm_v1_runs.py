"""V1's block tables in runs, beside the same tables block by block."""

import random
from collections import deque
from typing import Any

import pytest
from exact.engines.paired import Pair, hashed, paired, plant
from fuzz.draw import draw_pressure, draw_settings, draw_trace
from fuzz.equal import assert_equal_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.assembly import assemble
from kvsim.config import make_config
from kvsim.engine.batch import Batch
from kvsim.engine.plan import Plan
from kvsim.engine.request import Span
from kvsim.engine.runs import RunPool
from kvsim.engine.tables import Tables
from kvsim.engines.vllm_v1 import VllmV1
from kvsim.engines.vllm_v1_blocks import VllmV1PrefixTables
from kvsim.engines.vllm_v1_runs import VllmV1Runs
from kvsim.run import simulate
from kvsim.workload.trace import ParentContent, Row, Trace


def span_keys(spans: list[Span], size: int, number: int) -> list[int]:
    """The keys of the first `number` blocks."""
    return [
        block * size + offset
        for first, last, offset in spans
        for block in range(first, min(last, number))
    ]


class Twins:
    """Both kinds of tables over one trace, moved alike."""

    def __init__(self, trace: Trace, size: int, blocks: int, **rules: Any) -> None:
        self.size = size
        self.named = VllmV1PrefixTables(size, blocks + 1, **rules)
        self.runs = VllmV1Runs(size, blocks + 1, **rules)
        self.pairs = paired(trace)
        self.running: list[Pair] = []

    def both(self) -> list[Tables]:
        return [self.named, self.runs]

    def admit(self, pair: Pair, chunk: int) -> bool:
        """Admit a sequence, with slots for a chunk of its tokens, if there are blocks."""
        found = [tables.match(each) for tables, each in zip(self.both(), pair, strict=True)]
        assert len(found[0]) == len(found[1])
        upto = min(len(found[0]) * self.size + chunk, pair[0].length)
        tables_needs = zip(self.both(), pair, found, strict=True)
        needs = [tables.need(each, upto, hits) for tables, each, hits in tables_needs]
        assert needs[0] == needs[1]
        if needs[0] > self.named.gpu.free:
            return False
        for tables, each, hits in zip(self.both(), pair, found, strict=True):
            tables.hold(each, upto, hits)
            tables.publish(each, upto)
        self.running.append(pair)
        return True

    def grow(self, pair: Pair, tokens: int) -> bool:
        """One more chunk, of known tokens or of new ones."""
        fits = []
        for tables, each in zip(self.both(), pair, strict=True):
            upto = each.filled + tokens
            each.length = max(each.length, upto)
            fits.append(tables.extend(each, upto))
            if fits[-1] and (tables is self.named or tables.awaited(each)):
                tables.publish(each, upto)
        assert fits[0] == fits[1]
        return fits[0]

    def release(self, pair: Pair) -> None:
        """A sequence gives its blocks back; what nobody awaits gets its content only now."""
        for tables, each in zip(self.both(), pair, strict=True):
            tables.publish(each, each.filled)
            tables.free(each)
        self.running.remove(pair)

    def check(self) -> None:
        """Counts, hits, and the order in which content will be evicted are the same."""
        assert self.named.census() == self.runs.census()
        assert self.named.lookups == self.runs.lookups
        for one, other in self.running:
            assert self.named.own_blocks(one) == self.runs.own_blocks(other)
        alike: dict[int, int] = {}
        for one, other in self.pairs:
            number = one.length // self.size
            keys = one.block_keys(number, self.size)
            known = span_keys(other.block_spans(self.size), self.size, number)
            for key, its in zip(keys, known, strict=True):
                assert alike.setdefault(key, its) == its
        assert len(set(alike.values())) == len(alike), "two contents have one key"
        order = [alike[self.named.gpu.key_of[block]] for block in self.named.gpu.content]
        runs = [
            block * self.size + run.offset
            for run in self.runs.gpu.idle_runs()
            for block in reversed(range(run.start, run.end))
        ]
        assert runs == order
        for place, tables in enumerate(self.both()):
            tables.audit([pair[place].request for pair in self.running])


@given(st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_runs_decide_what_blocks_decide(seed: int) -> None:
    rng = random.Random(seed)
    trace = draw_trace(rng)
    full_hit = rng.choice(("last-block", "last-token"))
    size = rng.choice((1, 2, 3, 4, 7, 16))
    twins = Twins(trace, size, rng.choice((4, 12, 40, 200)), full_hit=full_hit)
    for _ in range(60):
        idle = [pair for pair in twins.pairs if pair not in twins.running]
        move = rng.randrange(4)
        if move < 2 and idle:
            twins.admit(rng.choice(idle), rng.choice((1, 5, 1000)))
        elif move == 2 and twins.running:
            twins.grow(rng.choice(twins.running), rng.choice((1, 1, size, 20)))
        elif twins.running:
            twins.release(rng.choice(twins.running))
        twins.check()


def test_offsets_that_follow_each_other_by_chance_are_not_joined() -> None:
    """Neighbours in the queue of two tables: joined, the hits of the third prompt would be lost."""
    prompts = ((0, 3), (400, 401), (0, 3, 501, 1, 3))
    twins = Twins(hashed(*prompts, *prompts), 1, 40, full_hit="last-token")
    for pair in twins.pairs[:3]:
        assert twins.admit(pair, 100)
    twins.release(twins.pairs[2])
    twins.release(twins.pairs[1])
    twins.check()
    found = [len(twins.runs.match(other)) for _, other in twins.pairs[3:]]
    assert found == [2, 2, 5]


def test_a_hit_that_leaves_a_run_in_its_middle_cuts_it() -> None:
    twins = Twins(hashed((1, 2, 3, 4, 5), (1, 2, 3, 9), (1, 2, 3, 4, 5)), 1, 7)
    assert twins.admit(twins.pairs[0], 100)
    twins.release(twins.pairs[0])
    assert [run.end for run in twins.runs.gpu.idle_runs()] == [5]
    assert twins.admit(twins.pairs[1], 100)
    assert [(run.start, run.end) for run in twins.runs.gpu.idle_runs()] == [(3, 5)]
    assert len(twins.runs.match(twins.pairs[2][1])) == 4  # The last block is computed again.
    twins.check()


def test_the_copy_that_was_labelled_first_is_hit_until_it_is_evicted() -> None:
    """The same prompt twice at once, whose last block is withheld: two blocks with one content."""
    twins = Twins(hashed((1, 2, 3), (1, 2, 3), (1, 2, 3), (7, 8, 9)), 1, 6)
    first, second, third, other = twins.pairs
    assert twins.admit(first, 9) and twins.admit(second, 9)
    twins.release(first)
    twins.check()
    assert twins.admit(other, 2)
    twins.check()
    twins.release(second)
    twins.check()
    assert twins.admit(third, 9)
    twins.check()


def test_a_look_changes_nothing() -> None:
    """The admission may be refused: a hit that ends inside a run cuts it only when it is held."""
    twins = Twins(hashed((1, 2, 3, 4, 5), (1, 2, 9)), 1, 7)
    assert twins.admit(twins.pairs[0], 100)
    twins.release(twins.pairs[0])
    assert len(twins.runs.match(twins.pairs[1][1])) == 2
    assert [(run.start, run.end) for run in twins.runs.gpu.idle_runs()] == [(0, 5)]


def private(requests: int, gap_ns: int) -> Trace:
    """Requests of 70 and 40 tokens that share nothing, so far apart."""
    rows = [Row(each, f"r{each}", each, each * gap_ns, 70, 40) for each in range(requests)]
    return Trace("made", "native", "", rows)


def test_who_shares_nothing_is_a_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is labelled or looked up run by run, and the pool is full of content all the same."""

    def forbidden(*_: object) -> None:
        raise AssertionError("nobody can look for these blocks")

    for move in ("label", "hold", "release"):
        monkeypatch.setattr(RunPool, move, forbidden)
    settings = {"model": "tiny", "engine": "vllm-v1", "max_model_len": 128}
    settings |= {"num_gpu_blocks_override": 40, "cost": {"model": "constant"}}
    result = simulate(private(30, 100_000_000), settings)
    assert result.meta["outcome"]["kind"] == "finished"
    assert result.steps["cached_blocks"].max() > 20
    assert result.requests["num_preemptions"].sum() == 0


@pytest.mark.parametrize("clients", [None, 3])
def test_steps_that_are_alike_are_recorded_one_by_one(clients: int | None) -> None:
    """Clients that wait for an end take over after each of them, with a step under way that was
    composed as the last of several."""
    settings = {
        "model": "tiny",
        "engine": "vllm-v1",
        "max_model_len": 128,
        "num_gpu_blocks_override": 16,
        "max_concurrency": clients,
        "cost": {"model": "constant"},
    }
    result = assert_equal_runs(private(30, 50_000_000), settings, f"{clients} clients").result
    assert result is not None
    path = result.meta["fast_path"]
    assert path["repeated_steps"] > 0.8 * len(result.steps["start_ns"])
    assert path["stretches"] > (20 if clients else 0)
    assert result.requests["num_preemptions"].sum() > 0


def test_a_planted_fault_is_found() -> None:
    """The audit finds each kind of broken books."""
    for fault in ("refs", "end", "cached", "left", "at"):
        twins = Twins(hashed((1, 2, 3, 4, 5), (1, 2, 9, 9)), 1, 20)
        for pair in twins.pairs:
            twins.admit(pair, 100)
        twins.release(twins.pairs[0])
        plant(twins.runs.gpu, fault)
        with pytest.raises(AssertionError):
            twins.runs.audit([twins.pairs[1][1].request])


class Nameless(VllmV1):
    """A policy that looks at no block ids: short prompts go first."""

    names_blocks = False

    def compose(self, batch: Batch, now_ns: int) -> Plan:
        batch.waiting = deque(sorted(batch.waiting, key=lambda request: request.input_length))
        return super().compose(batch, now_ns)


@pytest.mark.parametrize("seed", range(8))
def test_a_policy_without_names_decides_the_same_in_runs(seed: int) -> None:
    rng = random.Random(seed)
    trace = draw_trace(rng)
    given = draw_pressure(rng, draw_settings(rng, "vllm-v1", "vllm-v1-prefix-caching"))
    given.pop("async_scheduling", None)
    given["engine"] = "exact.engines.test_vllm_v1_runs:Nameless"
    assert_equal_runs(trace, given, f"seed {seed}")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, VllmV1Runs),
        ({"async_scheduling": False, "watermark": 0.1}, VllmV1Runs),
        ({"victim": "cost-aware"}, VllmV1Runs),
        ({"block_manager_args": {"publish_at": "computed"}}, VllmV1Runs),
        ({"block_manager_args": {"eviction": "vllm-0.6.3"}}, VllmV1PrefixTables),
        ({"block_manager_args": {"eviction": "fuzz.outsiders:Order1"}}, None),
        ({"victim": "fuzz.outsiders:Victim1"}, VllmV1PrefixTables),
        ({"engine": "kvsim.engines.vllm_v1:VllmV1"}, VllmV1PrefixTables),
        ({"engine": "exact.engines.test_vllm_v1_runs:Nameless"}, VllmV1Runs),
    ],
)
def test_who_is_shown_blocks_finds_blocks(settings: dict[str, Any], expected: type | None) -> None:
    config = make_config({"model": "tiny", "engine": "vllm-v1", **settings})
    if expected is not None:
        assert type(assemble(config, named=False).blocks) is expected
        assert type(assemble(config).blocks) is VllmV1PrefixTables


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_block_that_fills_lets_in_who_looks_for_it(asynchronous: bool) -> None:
    """The prompt of r1, as large as the pool, is what r0 is about to say: r1 has to find as many
    blocks as are free whenever the last one of r0 has just become full."""
    let_in = 0
    for keep in (20, 40):
        for arrival_ms in range(10, 250, 20):
            rows = [
                Row(0, "r0", 1, 0, 8, 34),
                Row(1, "r1", 2, arrival_ms * 1_000_000, 42, 2, ParentContent(0, keep)),
            ]
            trace = Trace("made", "native", "", rows)
            settings = {
                "model": "tiny",
                "engine": "vllm-v1",
                "async_scheduling": asynchronous,
                "block_size": 4,
                "num_gpu_blocks_override": 12,
                "max_model_len": 44,
                "cost": {"model": "constant", "step_us": 10_000, "prefill_token_us": 0}
                | {"decode_seq_us": 0, "context_token_ns": 0},
            }
            where = f"{keep} tokens, {arrival_ms} ms"
            result = assert_equal_runs(trace, settings, where).result
            if result is not None:
                begins, ends = result.requests["first_scheduled_ns"], result.requests["finish_ns"]
                let_in += result.requests["blocked_steps"][1] > 0 and begins[1] < ends[0]
    # With a step in flight, a block is known to be full when the next one has been opened.
    assert let_in == 0 if asynchronous else let_in > 3


def test_a_default_run_makes_no_object_for_a_block() -> None:
    """One prompt of 64,000 blocks is one run."""
    trace = Trace("made", "native", "", [Row(0, "0", 1, 0, 64_000, 5)])
    made: list[RunPool] = []

    def parts_of(config: Any, named: bool) -> Any:
        parts = assemble(config, named)
        made.append(parts.blocks.gpu)
        return parts

    config = {"engine": "vllm-v1", "block_size": 1, "max_model_len": 70_000}
    settings = {**config, "num_gpu_blocks_override": 70_001, "cost": {"model": "constant"}}
    result = simulate(trace, settings, parts_of=parts_of)
    assert result.requests["status"] == ["completed"]
    assert [(run.start, run.end) for run in made[0].idle_runs()] == [(0, 64_004)]
