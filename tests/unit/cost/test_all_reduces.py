"""All-reduces of a step: two regimes, added to tables and rooflines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cost.experts import AllReduces
from kvsim.cost.kernels import Line
from kvsim.machine import AllReduce, load_hardware
from kvsim.machine.hardware import LargeMessages

LARGE = LargeMessages(from_bytes=1_000_000, latency_us=100, bandwidth_gb_s=20)
LINK = AllReduce(latency_us=10, bandwidth_gb_s=10, large=LARGE)


def test_each_size_has_its_regime() -> None:
    assert LINK.us(500_000, 2) == 10 + 50
    assert LINK.us(2_000_000, 2) == 100 + 100
    assert LINK.us(2_000_000, 4) == 100 + 150
    assert LINK.us(500_000, 1) == 0
    assert LINK.slowed(2).us(500_000, 2) == 2 * LINK.us(500_000, 2)
    assert LINK.slowed(2).us(2_000_000, 2) == 2 * LINK.us(2_000_000, 2)


@given(st.integers(1, 5000), st.sampled_from([1, 2, 8]), st.sampled_from([640, 8192, 2_000_000]))
def test_a_step_takes_as_many_as_it_has(tokens: int, gpus: int, token_bytes: int) -> None:
    reduces = AllReduces(LINK, gpus, 64, token_bytes)
    expected = 64 * LINK.us(tokens * token_bytes, gpus)
    assert reduces.us(tokens) == pytest.approx(expected)


@given(st.integers(1, 4096))
def test_a_line_gets_them_at_every_count(tokens: int) -> None:
    points = [1.0, 64.0, 512.0, 4096.0]
    line = Line(points, [100, 120, 300, 2000])
    reduces = AllReduces(LINK, 2, 64, 8192)
    both = line.plus(reduces.us, reduces.breaks)
    assert both.at(tokens) == pytest.approx(line.at(tokens) + reduces.us(tokens))
    assert (both.first, both.last) == (1, 4096)


def test_two_gpus_over_pcie_are_known() -> None:
    """17 us + bytes / 13.7 GB/s up to 8 MB, 115 us + bytes / 17.2 GB/s above."""
    link = load_hardware("rtx pro 6000").all_reduce
    assert link.us(4e6, 2) == pytest.approx(17 + 4e6 / 13.7e3)
    assert link.us(16e6, 2) == pytest.approx(115 + 16e6 / 17.2e3)
