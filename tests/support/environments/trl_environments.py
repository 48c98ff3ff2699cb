"""Environments as TRL's GRPOTrainer takes them: one that works, and ones that fail in every way."""

import os
import subprocess
import time
from typing import Any


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
    """A reward function of TRL's: half a point for two model calls; none where a is 5."""
    calls = [m for m in completions[0] if m["role"] == "assistant"]
    return [None if a[0] == 5 else 0.5 * (len(calls) == 2)]


class Nasty(Adder):
    """Fails as its row's `nasty` says."""

    def reset(self, a: int = 0, b: int = 2, nasty: str = "", **row: Any) -> str:
        self.nasty = nasty
        if nasty == "reset":
            raise RuntimeError("no world today")
        if nasty == "hangs":
            time.sleep(3600)
        if nasty == "dies":
            os.kill(os.getpid(), 9)
        if nasty == "leaks":
            for _ in range(70):
                subprocess.Popen(["sleep", "98765"], start_new_session=True)
        return super().reset(a, b)

    def submit(self, number: int) -> str:
        """
        Submit the sum.

        Args:
            number: the sum.
        """
        super().submit(number)
        return "x" * 50_000_000 if self.nasty == "floods" else "thanks"

    def get_reward(self) -> float:
        return float("nan") if self.nasty == "nan" else super().get_reward()


def _tool(self: Any) -> str:
    """Do nothing."""
    return ""


Crowded = type("Crowded", (Adder,), {f"tool_{n}": _tool for n in range(1500)})
