"""The law of uneven batches is the same where it is measured and where it is priced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsim_kernels.uneven import Law, longer_us

from kvsim.cost.profile import Tail
from kvsim.cost.tail import Uneven

SHARE_NS = 2.5


@given(st.lists(st.integers(1, 8192), min_size=1, max_size=40), st.integers(10, 150))
def test_both_sides_price_a_batch_alike(lengths: list[int], times_ten: int) -> None:
    alone_ns = SHARE_NS * times_ten / 10
    uneven = Uneven(Tail(alone_ns=alone_ns, share_ns=SHARE_NS, unsplit_seqs=1, tile=1, used=True))
    longest = sorted(lengths, reverse=True)[: uneven.longest]
    expected = uneven.decode_us(len(lengths), sum(lengths), longest)
    assert longer_us(lengths, alone_ns, SHARE_NS) == pytest.approx(expected, abs=1e-6)


def test_the_rates_are_those_of_one_long_sequence() -> None:
    """Two rows that say 40 ns a token, and one that was disturbed."""
    contexts, n = [16, 1024], [1, 32]
    even = [[size * ctx * SHARE_NS / 1000 for ctx in contexts] for size in n]
    table = {"n": n, "ctx": contexts, "us": even}
    rows = []
    for long, alone_ns in ((500, 40.0), (900, 40.0), (700, 90.0)):
        lengths = [long, *[20] * 31]
        us = sum(lengths) * SHARE_NS / 1000 + longer_us(lengths, alone_ns, SHARE_NS)
        rows.append({"us": us, "shape": {"n": 32, "ctx": 20, "longer": 1, "long": long}})
    law = Law.measured(table, rows, 1024)
    assert law.share_ns == pytest.approx(SHARE_NS)
    assert law.alone_ns == pytest.approx(40)
    assert law.us(rows[0]["shape"]) == pytest.approx(rows[0]["us"])
