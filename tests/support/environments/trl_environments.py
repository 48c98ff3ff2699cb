"""Environment as TRL's GRPOTrainer takes it."""

from typing import Any

import numpy as np


class Adder:
    """The sum of two numbers is to be told to a tool."""

    def reset(self, a: int, b: int, **row: Any) -> str:
        self.sum = a + b
        self.submitted: int | None = None
        return f" Add {a} and {b}."

    def submit(self, number: int) -> str:
        """
        Submit the sum.

        Args:
            number: the sum.
        """
        self.submitted = number
        if number < 0:
            raise ValueError("no negative numbers")
        return "thanks"

    def get_reward(self) -> float:
        return float(self.submitted == self.sum)


rows: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "Work."}], "a": a, "b": b}
    for a in range(6)
    for b in range(6)
]


def brevity(completions: list[Any], environments: list[Any], a: list[int], **row: Any) -> list[Any]:
    """A reward function of TRL's: half a point for two model calls; none where a is 5.

    It is a number of numpy's, as TRL takes it.
    """
    calls = [m for m in completions[0] if m["role"] == "assistant"]
    return [None if a[0] == 5 else np.float32(0.5 * (len(calls) == 2))]
