"""Measures of the tree's size: none is above its bound."""

from tests.measures import BOUNDS, measure


def test_no_measure_is_above_its_bound() -> None:
    assert {
        name: f"{value:,} of {BOUNDS[name]:,}"
        for name, value in measure().items()
        if value > BOUNDS[name]
    } == {}
