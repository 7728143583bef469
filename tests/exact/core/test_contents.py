"""Numbers of contents are equal where tokens are."""

import random

from hypothesis import given
from hypothesis import strategies as st
from made import traces

from kvsim.core.contents import Numbering
from kvsim.core.request import Request
from kvsim.workload import Row, Trace
from kvsim.workload.keys import streams


class Keys:
    """A stream that tells its keys and nothing else."""

    def __init__(self, stream: object) -> None:
        self.keys = stream.keys  # type: ignore[attr-defined]


def numbered(trace: Trace, unit: int, ahead: bool, bare: bool, rng: random.Random) -> None:
    """Asserts that units of all requests are numbered as their keys are equal."""
    numbering = Numbering(unit, ahead)
    number_of: dict[int, int] = {}
    lengths = [row.input_length + row.output_length for row in trace.rows]
    requests = []
    for row, stream in zip(trace.rows, streams(trace), strict=True):
        given = Keys(stream) if bare else stream
        requests.append((Request(row.index, row.id, row.input_length, given), stream))
    order = [*range(len(requests))] * 2
    rng.shuffle(order)
    for at in order:
        request, stream = requests[at]
        units = rng.randint(0, max(0, (lengths[at] - ahead) // unit))
        numbering.extend(request, units)
        assert len(request.contents) >= units
        if ahead:
            keys = [
                stream.keys((place + 1) * unit, (place + 1) * unit + 1, 1)[0]
                for place in range(units)
            ]
        else:
            keys = stream.keys(0, units, unit)
        for key, number in zip(keys, request.contents, strict=False):
            assert number_of.setdefault(key, number) == number, "equal tokens, different numbers"
    numbers = list(number_of.values())
    assert len(set(numbers)) == len(numbers), "different tokens, equal numbers"
    assert all(number > 0 for number in numbers)


@given(
    trace=traces(),
    unit=st.sampled_from([1, 2, 3, 4, 7]),
    ahead=st.booleans(),
    bare=st.booleans(),
    seed=st.integers(0, 999),
)
def test_units_have_equal_numbers_where_they_have_equal_keys(
    trace: Trace, unit: int, ahead: bool, bare: bool, seed: int
) -> None:
    """However they are extended, and in whatever order; `ahead`: the token after a unit counts."""
    numbered(trace, unit, ahead, bare, random.Random(seed))


def test_samples_share_their_prompt_and_nothing_behind_it() -> None:
    trace = Trace("t", "native", "", [Row(index, str(index), 0, 0, 32, 16) for index in range(2)])
    one, other = (
        Request(index, str(index), 32, stream, n=3) for index, stream in enumerate(streams(trace))
    )
    numbering = Numbering(16)
    numbering.extend(one, 2)
    everyone = [one, one.child(0), one.child(1), other]
    for each in everyone:
        each.length = 48
        numbering.extend(each, 3)
    prompts = {tuple(each.contents)[:2] for each in everyone[:3]}
    assert len(prompts) == 1
    assert len({each.contents[2] for each in everyone}) == 4
