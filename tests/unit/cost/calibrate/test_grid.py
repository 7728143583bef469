"""Plans of a calibration: complete grids, rows held out, nothing beyond the limits."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsim_kernels.grid import MOST_CHUNKS, Limits, anchors, ladder, lengths, plan
from kvsim_kernels.rows import RowSet, identity
from kvsim_kernels.tables import grid
from marks import examples
from unit.cost.calibrate.sweeps import CPU, CUDA


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    cuda = draw(st.booleans())
    tile = draw(st.sampled_from([1, 16, 128])) if cuda else 1
    length = draw(st.sampled_from([512, 1024, 4096, 5000] if cuda else [128, 200, 1024]))
    seqs = draw(st.integers(2, 80))
    size = draw(st.sampled_from([8, 16, 32]))
    per_seq = -(-length // size)
    return Limits(
        cuda=cuda,
        max_tokens=draw(st.integers(max(32, 4 * tile), 3000)),
        max_seqs=seqs,
        max_seq_len=length,
        num_blocks=draw(st.integers(2 * per_seq, seqs * per_seq)),
        block_size=size,
        tile=tile,
        capture_sizes=tuple(sorted({1, 2, *range(8, seqs + 1, 8), seqs})) if cuda else (),
        decode_kernels=("v1", "v2") if cuda else ("v2",),
    )


@settings(max_examples=examples(25))
@given(limits())
def test_every_shape_fits_the_engine_and_the_pool(bounds: Limits) -> None:
    for sample in plan(bounds):
        if sample.kernel in ("ceiling", "swap"):
            continue
        shape = sample.shape
        chunks = [(shape["q"], shape["ctx"])] if "q" in shape else shape.get("chunks", [])
        n = shape.get("n", 0)
        tokens = n + sum(q for q, _ in chunks) if "tokens" not in shape else shape["tokens"]
        assert tokens <= max(bounds.max_tokens, bounds.max_seqs), sample
        assert len(chunks) <= MOST_CHUNKS and n <= bounds.max_seqs, sample
        wanted = [q + ctx for q, ctx in chunks]
        if n:
            wanted += lengths(shape, bounds.max_seq_len).tolist()
        assert max(wanted, default=0) <= bounds.max_seq_len, sample
        assert bounds.holds(wanted), sample


@settings(max_examples=examples(25))
@given(limits())
def test_grids_have_no_holes_and_nothing_is_measured_twice(bounds: Limits) -> None:
    samples = plan(bounds)
    assert len({identity(sample.row()) for sample in samples}) == len(samples)
    for kernel, axis in (("decode_v2", "n"), ("prefill", "q")):
        rows = RowSet(s.row() | {"us": 1.0} for s in samples)
        assert len(grid(rows.of(kernel, method="alone"), axis)["us"]) >= 2


@pytest.mark.parametrize("bounds", [CPU, CUDA], ids=["cpu", "cuda"])
def test_rows_held_out_are_not_fitted(bounds: Limits) -> None:
    samples = plan(bounds)
    fitted = {(s.kernel, str(s.shape)) for s in samples if s.split == "fit"}
    held = {(s.kernel, str(s.shape)) for s in samples if s.split == "held_out"}
    assert {kernel for kernel, _ in held} >= {"decode_v2", "prefill", "dense", "head", "step"}
    shared = {kernel for kernel, _ in fitted & held}
    assert len(fitted & held) <= 2, shared


@pytest.mark.parametrize("bounds", [CPU, CUDA], ids=["cpu", "cuda"])
def test_uneven_batches_have_few_long_sequences(bounds: Limits) -> None:
    rows = RowSet(sample.row() | {"us": 1.0} for sample in plan(bounds))
    fitted, held = (rows.uneven("decode_v2", split) for split in ("fit", "held_out"))
    assert len(fitted) >= 6
    assert len(held) >= 10
    assert all(row["shape"]["longer"] == 1 for row in fitted)
    for row in [*fitted, *held]:
        shape = row["shape"]
        found = lengths(shape, bounds.max_seq_len)
        assert len(found) == shape["n"]
        assert sorted(set(found.tolist())) == [shape["ctx"], shape["long"]]
        assert (found == shape["long"]).sum() == shape["longer"] < shape["n"]


def test_every_round_measures_everything_in_another_order() -> None:
    samples = plan(CPU, rounds=2)
    rounds = [[s for s in samples if s.round == number] for number in (0, 1)]
    first, second = ([(s.kernel, s.split, str(s.shape)) for s in each] for each in rounds)
    assert sorted(first) == sorted(second)
    assert first != second


def test_anchors_come_from_several_kernels_in_every_round() -> None:
    found = anchors(plan(CPU, rounds=3), "start")
    assert {s.split for s in found} == {"start"}
    assert len({s.kernel for s in found}) >= 3
    assert {s.round for s in found} == {0, 1, 2}


@given(st.integers(1, 64), st.integers(1, 5000), st.booleans())
def test_ladders_have_no_gap_above_two(low: int, high: int, fine: bool) -> None:
    points = ladder(low, high, fine)
    assert points == sorted(set(points)) and points[-1] == high
    assert points[0] == min(low, high)
    assert all(b <= 2 * a for a, b in pairwise(points))


@given(st.integers(2, 64), st.integers(1, 900), st.integers(0, 99))
def test_scattered_lengths_keep_their_mean(n: int, ctx: int, seed: int) -> None:
    found = lengths({"n": n, "ctx": ctx, "seed": seed}, 1024)
    assert found.sum() == n * ctx and len(found) == n
    assert found.min() >= 1 and found.max() <= 1024
    assert lengths({"n": n, "ctx": ctx}, 1024).tolist() == [ctx] * n
