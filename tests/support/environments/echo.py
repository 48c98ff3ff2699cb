"""Echo, a task that a tiny model can learn: say a number of four digits again."""

import random

COUNT = 1200


def numbers() -> list[str]:
    """The numbers of all tasks, always the same."""
    return [f"{n:04}" for n in random.Random(0).sample(range(10_000), COUNT)]


def question(number: str) -> str:
    """What the model reads."""
    return f"Say {number}."
