"""Echo as a reward function of TRL's: the answer is to be the number that was asked for."""

from typing import Any

from echo import numbers, question


class Echo:
    def reset(self, **row: Any) -> None:
        return None


def exact(completions: list[Any], number: list[str], **row: Any) -> list[float]:
    """One where the answer is the number and nothing else."""
    return [float(completions[0][-1]["content"] == number[0])]


rows = [{"prompt": question(number), "number": number} for number in numbers()]
