"""Rounds of measurements taken in turn, and the row of a table that they become."""

import statistics
from collections.abc import Awaitable, Callable, Mapping

ROUNDS = 5
Measure = Callable[[], Awaitable[float]]


async def side_by_side(what: str, unit: str, measures: Mapping[str, Measure]) -> None:
    """Measure all in turn, ROUNDS times, and print a row: medians, and ratios to the last one.

    A ratio is the median of the rounds' ratios: what slows one round slows both sides of it.
    """
    rounds = [{name: await measure() for name, measure in measures.items()} for _ in range(ROUNDS)]
    *others, base = measures
    figures = " / ".join(f"{statistics.median(r[name] for r in rounds):,.2f}" for name in measures)
    ratios = " / ".join(
        f"{statistics.median(r[name] / r[base] for r in rounds):.2f}" for name in others
    )
    print(f"| {what} | {' / '.join(measures)} | {figures} {unit} | {ratios} |", flush=True)


def row(what: str, of: str, figure: str) -> None:
    """A row for something that stands alone."""
    print(f"| {what} | {of} | {figure} | |", flush=True)
