"""Surfaces: errors on unseen points against fits that really have not seen them."""

import numpy as np
import pytest

from kvsim.cost.calibrate.surface import Law, Scales, Surface, error

LAW = Law(us=lambda x, y: 5 + x * y / 100, work=lambda x, y: x * y)
SCALES = Scales(first=3, second=4, work=1, work_share=0.2, noise=0.003)
X, Y = (each.ravel() for each in np.meshgrid([1.0, 2, 4, 8, 16], [16.0, 64, 256, 1024]))


def kernel_us(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Faster than its roofline where there is little work, and a step where there is much."""
    return LAW.us(x, y) * (0.8 + 0.1 * np.log2(x) / 4) * np.where(x * y > 2000, 1.2, 1.0)


US = kernel_us(X, Y)


def test_an_unseen_point_is_as_if_it_had_never_been_there() -> None:
    unseen = Surface(X, Y, US, LAW, SCALES).unseen()
    for i in range(0, len(X), 3):
        keep = np.arange(len(X)) != i
        # The mean of the residuals is the only thing that still knows the point.
        without = Surface(X[keep], Y[keep], US[keep], LAW, SCALES)
        assert unseen[i] == pytest.approx(without.at([X[i]], [Y[i]])[0], rel=0.01)


def test_an_unseen_group_is_as_if_it_had_never_been_there() -> None:
    unseen = Surface(X, Y, US, LAW, SCALES).unseen(X)
    own = X == 4
    without = Surface(X[~own], Y[~own], US[~own], LAW, SCALES)
    assert unseen[own] == pytest.approx(without.at(X[own], Y[own]), rel=0.02)


def test_alone_each_point_is_its_own_group() -> None:
    surface = Surface(X, Y, US, LAW, SCALES)
    assert surface.unseen(np.arange(len(X))) == pytest.approx(surface.unseen())


def test_between_the_points_it_is_near_what_was_not_measured() -> None:
    x, y = np.array([3.0, 6, 12, 3]), np.array([100.0, 32, 100, 700])
    found = Surface(X, Y, US, LAW, SCALES).at(x, y)
    assert error(found, kernel_us(x, y))["max_percent"] < 6


def test_far_away_it_is_the_roofline_times_the_mean() -> None:
    surface = Surface(X, Y, US, LAW, SCALES)
    far = surface.at([1e30], [1e-9])[0] / LAW.us(1e30, 1e-9)
    assert far == pytest.approx(np.exp(np.log(US / LAW.us(X, Y)).mean()), rel=0.01)


def test_error_is_in_percent_of_what_was_measured() -> None:
    found = error(np.array([90.0, 100, 120]), np.array([100.0, 100, 100]))
    assert tuple(found.values()) == (3, 10.0, 19.0, 20.0, 0.0)
