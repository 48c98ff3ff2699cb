"""Cost metrics: what was held, by what came of it, and what loops and keys took, for Prometheus.

Labels are bounded: the loops are those that file_metrics.py lists, and of keys the largest have
series of their own, under the hash of their id.
"""

from collections.abc import Collection, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from cray_agents.config.price_section import PriceSettings
from cray_agents.paths import Home
from cray_agents.runtime.cost.amount import Amount
from cray_agents.runtime.cost.cost_account import CostAccount, account_of
from cray_agents.runtime.cost.cost_table import CostQuery, cost_rows
from cray_agents.runtime.observability.call_metrics import OTHER, key_label
from cray_agents.runtime.scaling.holdings import read_holdings
from cray_agents.runtime.store import Store
from cray_agents.runtime.views.view_records import CostAmount, CostRow

MOST_KEYS = 50
ABOUT = "Seconds of GPUs and of cores that were held, by holder and what came of them"


def cost_families(
    home: Home, store: Store, prices: PriceSettings, loops: Collection[str]
) -> Iterator[Metric]:
    """Yield the families, of all time. `loops`: those that get series. Raises CrayError."""
    account = account_of(read_holdings(home), store, prices)
    yield from _held_families(account)
    rows = cost_rows(home, store, account, CostQuery(by="loop"), {})
    yield from _loop_families([row for row in rows if row.loop in loops])
    yield from _key_families(cost_rows(home, store, account, CostQuery(by="key"), {}))


def _held_families(account: CostAccount) -> Iterator[Metric]:
    seconds = GaugeMetricFamily("cray_held_seconds", ABOUT, labels=["kind", "use", "unit"])
    energy = GaugeMetricFamily(
        "cray_energy_joules", "Energy that GPUs measured themselves", labels=["kind", "use"]
    )
    money = GaugeMetricFamily(
        "cray_cost", "Price of what was held, by [prices]", labels=["kind", "use"]
    )
    for (kind, use), amount in account.lines.items():
        _add_seconds(seconds, [kind, use], amount)
        record = amount.to_record(account.prices)
        if record.joules is not None:
            energy.add_metric([kind, use], record.joules)
        if record.cost is not None:
            money.add_metric([kind, use], record.cost)
    yield from (seconds, energy, money)


def _loop_families(rows: list[CostRow]) -> Iterator[Metric]:
    seconds = GaugeMetricFamily(
        "cray_loop_device_seconds",
        "Seconds of GPUs and of cores for a loop's runs and for its training",
        labels=["loop", "use", "unit"],
    )
    money = {
        name: GaugeMetricFamily(f"cray_loop_{name}", about, labels=["loop"])
        for name, about in (
            ("cost", "Price of a loop's runs and training"),
            ("cost_per_success", "... for each run with a reward of 1 or more"),
            ("cost_per_point", "... for each hundredth of held-out success that was gained"),
        )
    }
    for row in rows:
        loop = str(row.loop)
        _add_seconds(seconds, [loop, "serving"], row.serving)
        _add_seconds(seconds, [loop, "training"], row.training)
        for name, amount in zip(money, (row.spent, row.per_success, row.per_point), strict=True):
            if amount is not None and amount.cost is not None:
                money[name].add_metric([loop], amount.cost)
    yield from (seconds, *money.values())


def _key_families(rows: list[CostRow]) -> Iterator[Metric]:
    seconds = GaugeMetricFamily(
        "cray_key_device_seconds",
        "Seconds of GPUs and of cores in which replicas answered a key",
        labels=["key", "unit"],
    )
    money = GaugeMetricFamily("cray_key_cost", "Price of these", labels=["key"])
    rest = Amount()
    for row in rows[:MOST_KEYS]:
        _add_seconds(seconds, [key_label(row.key or "")], row.spent)
        if row.spent.cost is not None:
            money.add_metric([key_label(row.key or "")], row.spent.cost)
    for row in rows[MOST_KEYS:]:
        rest.gpu_seconds += row.spent.gpu_seconds
        rest.core_seconds += row.spent.core_seconds
        rest.money += row.spent.cost or 0.0
    if rows[MOST_KEYS:]:
        _add_seconds(seconds, [OTHER], rest)
        if rows[0].spent.cost is not None:
            money.add_metric([OTHER], rest.money)
    yield from (seconds, money)


def _add_seconds(family: GaugeMetricFamily, labels: list[str], amount: Amount | CostAmount) -> None:
    family.add_metric([*labels, "gpu"], amount.gpu_seconds)
    family.add_metric([*labels, "core"], amount.core_seconds)
