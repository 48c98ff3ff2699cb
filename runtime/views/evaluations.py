"""Evaluations: success, seconds and cost of the models that were evaluated, by their runs.

Called by gateway/routes/loops.py, for `eval` and the dashboard.
"""

import sys
from collections import defaultdict
from typing import Any

from cray_agents.config.settings import PriceSettings
from cray_agents.paths import Home
from cray_agents.promotion.figures import Estimate, estimate
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.records import EVALUATION, Record
from cray_agents.runtime.accounting.cost_account import account_of
from cray_agents.runtime.accounting.holdings import HOUR, read_holdings
from cray_agents.runtime.store import Store


class EvaluatedModel(Record):
    """A version of the pool, or a model elsewhere, in an evaluation; a request is a run of a task.

    `success`: the mean reward, with its interval. `seconds`: of a request. `cost`: of a request, in
    `currency`: by its price for a model elsewhere, else its share of what the replicas were held
    for. null: no price is known, or the account does not reach to its last run yet. Runs without a
    reward do not count.
    """

    loop: str
    model: str
    success: Estimate
    runs: int
    seconds: float
    cost: float | None
    currency: str


def evaluated_models(
    home: Home, store: Store, prices: PriceSettings, loop: str | None = None
) -> list[EvaluatedModel]:
    """Return the models of an evaluation, or of all of them."""
    which = RunFilter(loop=loop, tags=[EVALUATION], min_reward=-sys.float_info.max)  # scored ones
    keys = ("loop", "model")
    groups: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in store.stats(which, [*keys, "task"], percentiles=False):
        groups[row["loop"] or "", row["model"] or ""].append(row)
    ledger = read_holdings(home)
    reaches = max((line.time for line in ledger.served), default=0.0)
    account, spent = account_of(ledger, store, prices), defaultdict[tuple[str, str], float](float)
    for row in store.stats(which, keys, bucket=HOUR, percentiles=False):
        tokens = row["prompt_tokens"] or 0, row["sampled_tokens"] or 0
        money = account.spent_on(row["model"], row["time"], *tokens).money
        spent[row["loop"] or "", row["model"] or ""] += money
    models = []
    for (name, model), rows in sorted(groups.items()):
        sums = {key: sum(row[key] for row in rows) for key in ("runs", "seconds")}
        means = [row["mean_reward"] for row in rows]
        cost: float | None = None
        if "@" not in model:
            query = RunQuery(**which.model_dump() | {"loop": name, "model": model})
            cost = sum(run.cost or 0.0 for run in store.stream(query, "none"))
        elif prices.known and max(row["last"] for row in rows) < reaches:
            cost = spent[name, model]
        one = EvaluatedModel(
            loop=name,
            model=model,
            success=estimate(means, sums["runs"]),
            runs=sums["runs"],
            seconds=sums["seconds"] / sums["runs"],
            cost=None if cost is None else cost / sums["runs"],
            currency=prices.currency,
        )
        models.append(one)
    return models
