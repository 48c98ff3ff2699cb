"""Environments of TRL that fail in every way: as their row's `nasty` says, or by their tools."""

from typing import Any

from misbehaviour import FLOOD, misbehave
from trl_environments import Adder


class Nasty(Adder):
    """Adder that fails."""

    def reset(self, a: int = 0, b: int = 2, nasty: str = "", **row: Any) -> str:
        self.nasty = nasty
        misbehave(nasty)
        return super().reset(a, b) + (FLOOD if nasty == "floods first" else "")

    def submit(self, number: int) -> str:
        """
        Submit the sum.

        Args:
            number: the sum.
        """
        super().submit(number)
        return FLOOD if self.nasty == "floods" else "thanks"

    def get_reward(self) -> float:
        return float("nan") if self.nasty == "nan" else super().get_reward()


def _tool(self: Any) -> str:
    """Do nothing."""
    return ""


Crowded = type("Crowded", (Nasty,), {f"tool_{n}": _tool for n in range(1999)})
nasties = {"nasty": Nasty, "crowded": Crowded}
