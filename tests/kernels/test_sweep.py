"""Sweeps: every kind of sample can be built and run, rows survive a kill, limits are kept."""

import time
from collections import Counter
from pathlib import Path

import pytest
from batches import DEVICE, torch
from kvsim_kernels.forward import Decoder, Geometry
from kvsim_kernels.grid import Limits, Sample, anchors, plan
from kvsim_kernels.measure import Bench
from kvsim_kernels.rows import RowStore, read_rows
from kvsim_kernels.sweep import missing, sweep
from kvsim_kernels.timing import Call, CpuClock, Timing, make_clock

GEOMETRY = Geometry(
    "toy", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=64, ffn=48, vocab=101,
    dtype="float32", kv_dtype="float32", block_size=16, num_blocks=32,
)  # fmt: skip
LIMITS = Limits(False, 32, 4, 128, 32, 16, decode_kernels=("v1", "v2"))


class CountingClock:
    """Calls everything once and takes no time."""

    rounds, fewest, most, budget_s = 1, 1, 1, 0.0

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def alone(self, call: Call, *, cold: bool = True) -> Timing:
        return self._timed("alone" if cold else "warm", call)

    def difference(self, call: Call, without: Call) -> Timing:
        without()
        return self._timed("insitu", call)

    def whole(self, call: Call) -> Timing:
        return self._timed("whole", call)

    def once(self, call: Call) -> float:
        call()
        return 1.0

    def state(self) -> dict[str, float]:
        return {"sm_mhz": 1000.0}

    def _timed(self, method: str, call: Call) -> Timing:
        call()
        self.calls[method] += 1
        return Timing(8.0, 2.0, 1)


@pytest.fixture
def clock() -> CountingClock:
    return CountingClock()


@pytest.fixture
def bench(clock: CountingClock) -> Bench:
    decoder = Decoder(GEOMETRY, device=DEVICE, max_tokens=32, max_seqs=16, max_seq_len=128)
    return Bench(decoder, clock)


@pytest.fixture
def store(tmp_path: Path) -> RowStore:
    return RowStore(tmp_path / "toy.rows.jsonl", {"device": {"name": "none"}})


def nothing(done: int, of: int, what: str) -> None:
    pass


def test_every_sample_is_measured_once_and_in_its_way(
    bench: Bench, clock: CountingClock, store: RowStore
) -> None:
    samples = plan(LIMITS)
    assert sweep(bench, clock, store, samples, report=nothing, facts={"compile_s": 1.5})
    ends = [sample for split in ("start", "end") for sample in anchors(samples, split)]
    methods = Counter(sample.method for sample in [*samples, *ends])
    assert clock.calls == methods
    assert len({"alone", "warm", "insitu", "whole"} & set(methods)) == 4
    assert missing(store, samples) == []
    notes = [row for row in store.rows if row["kernel"] == "session"]
    assert [(n["split"], n.get("compile_s")) for n in notes] == [("start", 1.5), ("end", None)]
    assert notes[0]["state"] == {"sm_mhz": 1000.0}


def test_attention_counts_per_layer(bench: Bench) -> None:
    shape = {"n": 2, "ctx": 40}
    assert bench.time(Sample("decode_v2", "alone", "fit", shape)).us == 8.0 / 2
    assert bench.time(Sample("decode_v2", "insitu", "fit", shape)).us == 8.0 / 2
    assert bench.time(Sample("dense", "warm", "fit", {"tokens": 8})).us == 8.0


def test_a_killed_sweep_goes_on_where_it_was(
    bench: Bench, clock: CountingClock, store: RowStore
) -> None:
    samples = plan(LIMITS)[:40]

    def kill(done: int, of: int, what: str) -> None:
        if done == len(anchors(samples, "start")) + 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(bench, clock, store, samples, report=kill)
    again = RowStore(store._path, {"device": {"name": "none"}})
    assert len(missing(again, samples)) == 15
    before = sum(clock.calls.values())
    assert sweep(bench, clock, again, samples, report=nothing)
    assert sum(clock.calls.values()) - before == 15 + 2 * len(anchors(samples, "start"))
    assert missing(again, samples) == []
    assert {row["session"] for row in again.rows if row["split"] == "start"} == {0, 1}
    assert len(read_rows(store._path)[1]) == len(again.rows)


def test_a_deadline_stops_before_the_next_sample(
    bench: Bench, clock: CountingClock, store: RowStore
) -> None:
    samples = plan(LIMITS)
    assert not sweep(bench, clock, store, samples, report=nothing, deadline_s=time.monotonic())
    assert len(missing(store, samples)) == len(samples)
    assert any(row["split"] == "end" for row in store.rows)


def test_steps_use_the_kernel_of_the_engine(bench: Bench) -> None:
    shape = {"n": 2, "ctx": 20, "chunks": [[8, 16]]}
    bench.time(Sample("decode_v1", "alone", "fit", {"n": 2, "ctx": 20}))
    bench.time(Sample("step", "whole", "fit", shape))
    assert bench._decoder.decode_kernel == "v2"


def test_a_shape_becomes_distinct_blocks(bench: Bench) -> None:
    step = bench.step({"n": 3, "ctx": 50, "seed": 1, "chunks": [[8, 30], [20, 0]]})
    assert sum(step.lengths) == 150
    used = [block for table in [*step.tables, *(c.table for c in step.chunks)] for block in table]
    assert len(set(used)) == len(used)
    assert [len(table) for table in step.tables] == [-(-n // 16) for n in step.lengths]
    assert [(c.start, len(c.tokens)) for c in step.chunks] == [(30, 8), (0, 20)]


def test_a_clock_keeps_its_bounds_of_repeats() -> None:
    clock, calls = CpuClock(), []
    for time_it in (clock.alone, clock.whole):
        calls.clear()
        timing = time_it(lambda: calls.append(1))
        assert timing.reps == clock.most == len(calls) - 1
        assert timing.us >= 0 and timing.iqr_us >= 0
    calls.clear()
    slow = clock.whole(lambda: calls.append(torch.randn(600, 600) @ torch.randn(600, 600)))
    assert clock.fewest <= slow.reps <= clock.most
    assert clock.difference(lambda: calls.append(1), lambda: None).reps == clock.most


@pytest.mark.skipif(DEVICE == "cpu", reason="events and graphs need a GPU")
def test_twice_the_work_takes_twice_as_long_on_a_gpu() -> None:
    clock = make_clock("cuda")
    here = torch.randn(64 << 20, device="cuda")
    there = torch.empty_like(here)
    half = len(here) // 2
    whole = clock.alone(lambda: there.copy_(here)).us
    part = clock.alone(lambda: there[:half].copy_(here[:half])).us
    assert 1.5 < whole / part < 2.5
    rest = clock.difference(lambda: there.copy_(here), lambda: there[:half].copy_(here[:half])).us
    assert 0.6 * part < rest < 1.6 * part
