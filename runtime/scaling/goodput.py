"""Goodput: add up the ledger, by holder, kind or node.

Hours are of GPUs, or of nodes where a holder has none. They add up: what came of a row's hours
(holdings.py says what there is) is together what was held, also where the ledger says more.
Goodput is useful / held; useful is what served, and training that was kept.
"""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

from cray_agents.paths import Home
from cray_agents.runtime.scaling.holdings import (
    KeptSteps,
    LedgerAccount,
    Place,
    Use,
    read_holdings,
)
from cray_agents.runtime.scaling.ledger import LedgerLine

HOUR = 3600.0
GroupedBy = Literal["kind", "holder", "node"]


@dataclass
class Account:
    """The hours of one row by what came of them, in seconds, and the work."""

    spent: Counter[Use] = field(default_factory=Counter)
    tokens_served: int = 0
    tokens_trained: int = 0
    steps: int = 0
    steps_lost: int = 0

    def row(self, name: str) -> dict[str, Any]:
        """Return the row of a table; hours, and shares of them."""
        total, useful = self.spent.total(), self.spent["serving"] + self.spent["training"]
        return {
            "name": name,
            "held_hours": total / HOUR,
            "goodput": useful / total if total else None,
            "useful_hours": useful / HOUR,
            "idle_hours": self.spent["idle"] / HOUR,
            "asleep_hours": self.spent["asleep"] / HOUR,
            "lost_hours": self.spent["lost"] / HOUR,
            "other_hours": self.spent["other"] / HOUR,
            "tokens_served": self.tokens_served,
            "tokens_trained": self.tokens_trained,
            "steps": self.steps,
            "steps_lost": self.steps_lost,
        }


def goodput(
    home: Home, since: float = 0.0, until: float | None = None, by: GroupedBy = "kind"
) -> list[dict[str, Any]]:
    """Return a row for each kind, holder or node, and one of the total; times in unix seconds."""
    until = time.time() if until is None else until
    ledger = read_holdings(home)
    accounts: dict[str, Account] = defaultdict(Account)
    total = Account()
    for piece in ledger.pieces:
        seconds = piece.seconds * piece.share(since, until) * max(1, len(piece.line.gpus))
        if seconds:
            for account in (accounts[_key(piece.line, by)], total):
                account.spent[piece.use] += seconds  # type: ignore[assignment]
    for line in ledger.served:
        if since <= line.time < until:
            for account in (accounts["replica" if by == "kind" else "platform"], total):
                account.tokens_served += line.tokens
    keys = _keys_of_places(ledger, by)
    for each in ledger.steps:
        if since <= each.attempt.time < until:
            default = {"kind": "job", "holder": each.attempt.place[0], "node": "unknown"}[by]
            for account in (accounts[keys.get(each.attempt.place, default)], total):
                _add_steps(account, each)
    table = [accounts[key].row(key) for key in sorted(accounts)]
    return [*table, total.row("total")]


def _add_steps(account: Account, steps: KeptSteps) -> None:
    """Add the work of an attempt, which is counted once however many nodes it had."""
    account.steps += steps.kept
    account.steps_lost += steps.attempt.last - steps.attempt.first - steps.kept
    account.tokens_trained += steps.attempt.tokens


def _keys_of_places(ledger: LedgerAccount, by: GroupedBy) -> dict[Place, str]:
    """Return the row of the first node of each holder and attempt."""
    keys: dict[Place, str] = {}
    for piece in ledger.pieces:
        keys.setdefault((piece.line.holder, piece.line.attempt), _key(piece.line, by))
    return keys


def _key(line: LedgerLine, by: GroupedBy) -> str:
    return {"kind": line.kind, "holder": line.holder, "node": line.node}[by]
