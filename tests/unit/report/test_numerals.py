import pytest

from kvsim.results import numerals
from kvsim.results.metrics import METRICS
from kvsim.results.numerals import MISSING, UNITS, show, signed, signed_percent


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12031, "requests", "12,031"),
        (0.00123456, "", "0.00123"),
        (0.0000541, "requests/s", "<0.001 req/s"),
        (7.87e-9, "s", "<1 µs"),
        (0.5, "", "0.500"),
        (1.709, "", "1.71"),
        (21.46, "", "21.5"),
        (215.03, "", "215"),
        (3.0, "tokens/s", "3.00 tok/s"),
        (3, "", "3"),
        (0.0, "", "0"),
        (0.0, "s", "0 s"),
        (0.0000123, "s", "12.3 µs"),
        (0.0233, "s", "23.3 ms"),
        (1.414, "s", "1.41 s"),
        (69.65, "s", "69.7 s"),
        (119.0, "s", "119 s"),
        (724.9, "s", "12 min 4 s"),
        (12345.0, "s", "3 h 25 min"),
        (-724.9, "s", "−12 min 4 s"),
        (-0.0233, "s", "−23.3 ms"),
        (-7.87e-9, "s", "−<1 µs"),
        (23.3, "ms", "23.3 ms"),
        (0.1234, "share", "12.3 %"),
        (1.0, "share", "100 %"),
        (0.9996, "share", ">99.9 %"),
        (0.0, "share", "0 %"),
        (0.00001, "share", "<0.1 %"),
        (-0.0237, "share", "−2.4 %"),
        (-1.5, "share", "−150 %"),
        (-0.00001, "share", "−<0.1 %"),
        (512, "bytes", "512 B"),
        (55 * 2**30, "bytes", "55.0 GiB"),
        (None, "s", MISSING),
    ],
)
def test_numbers_are_written_for_people(value, unit, text):
    assert show(value, unit).replace(numerals.SPACE, " ") == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.206, "s", "+206 ms"),
        (-4.55, "tokens/s", "−4.55 tok/s"),
        (-0.0158, "share", "−1.58 points"),
        (-5e-5, "requests/s", "<0.001 req/s"),
        (-7.87e-9, "s", "<1 µs"),
        (0, "s", "0 s"),
    ],
)
def test_differences_carry_their_sign(value, unit, text):
    assert signed(value, unit).replace(numerals.SPACE, " ") == text


def test_relative_differences_carry_their_sign():
    assert signed_percent(-0.234).replace(numerals.SPACE, " ") == "−23.4 %"
    assert signed_percent(3.62).replace(numerals.SPACE, " ") == "+362 %"


def test_every_metric_has_a_unit_that_can_be_written():
    assert {metric.unit for metric in METRICS} <= UNITS.keys()
    assert len({metric.key for metric in METRICS}) == len(METRICS)
