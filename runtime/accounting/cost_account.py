"""Cost account: all that was held in a time, by what came of it, with prices of tokens and jobs.

The time of replicas is given to requests by tokens. In each hour (UTC) and for each model name,

    spent(run) = spent(replicas that answered) x w(run) / sum of w over the hour's runs
    w = prompt tokens + SAMPLED x sampled tokens

A run counts in the hour in which it began, with its last version, as in /v1/usage. A prompt token
is computed with many others at once, a sampled one with those of the other requests under way:
reading the weights costs as much as computing some 300 tokens on an H100 (990 TFLOP/s of bfloat16,
3.35 TB/s: H100 SXM data sheet), shared by some 64 requests, so SAMPLED is 4.

Training is given to jobs by their steps that were kept. What else was held is a line of its own and
given to nobody: idle, asleep, lost, other, and time in which replicas answered what is no stored
run (probes, forgotten runs). The lines add up to what was held. Called by cost_table.py.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from cray_agents.config.settings import PriceSettings
from cray_agents.queries import RunFilter
from cray_agents.records import Record
from cray_agents.runtime.accounting.holdings import HOUR, LedgerAccount, Piece
from cray_agents.runtime.store import Store

KWH = 3.6e6  # joules
CostUse = Literal["requests", "unattributed", "idle", "asleep", "training", "lost", "other"]


class CostAmount(Record):
    """Devices that were held, with their energy and price.

    `gpu_seconds`, `core_seconds`: seconds times GPUs, and times cores, of the holders. `joules`:
    where the GPUs measured them, which is `measured_share` of the holders' time; null: nowhere.
    `cost` is in the table's currency, without what it lists as `unpriced`; null: without prices.
    """

    gpu_seconds: float
    core_seconds: float
    joules: float | None
    measured_share: float | None
    cost: float | None


@dataclass
class Amount:
    """A sum of pieces of holdings, or of shares of them.

    `gpu_seconds`, `core_seconds`: a holder's seconds times its GPUs, and times its cores. A node
    with GPUs counts in both. `seconds`: of holders, whatever they have; `measured`: those of them
    for which `joules` are known. `money`: by the prices that are given.
    """

    gpu_seconds: float = 0.0
    core_seconds: float = 0.0
    joules: float = 0.0
    money: float = 0.0
    seconds: float = 0.0
    measured: float = 0.0

    def add(self, other: "Amount", share: float = 1.0) -> None:
        """Add a share of another amount."""
        self.gpu_seconds += other.gpu_seconds * share
        self.core_seconds += other.core_seconds * share
        self.joules += other.joules * share
        self.money += other.money * share
        self.seconds += other.seconds * share
        self.measured += other.measured * share

    def to_record(self, prices: PriceSettings, share: float = 1.0) -> CostAmount:
        """Return a share of it for people: energy that nobody measured, and no price, are None."""
        return CostAmount(
            gpu_seconds=self.gpu_seconds * share,
            core_seconds=self.core_seconds * share,
            joules=self.joules * share if self.measured else None,
            measured_share=self.measured / self.seconds if self.seconds else None,
            cost=self.money * share if prices.known else None,
        )


def sum_of(amounts: "list[Amount]") -> Amount:
    """Return the sum of amounts."""
    result = Amount()
    for amount in amounts:
        result.add(amount)
    return result


SAMPLED = 4.0  # prompt tokens that a sampled one counts as
COST_USES: tuple[CostUse, ...] = get_args(CostUse)
ModelHour = tuple[float, str]  # the hour's beginning, the model's name without its version


@dataclass
class CostAccount:
    """All that was held from `since` to `until`.

    `lines`: by kind of holder and use. `trained`: by job. `rates`: of an hour and a model name what
    one weighted token took. `unpriced`: what was held and has no price, though others have.
    """

    since: float
    until: float
    prices: PriceSettings
    lines: dict[tuple[str, CostUse], Amount] = field(default_factory=lambda: defaultdict(Amount))
    trained: dict[str, Amount] = field(default_factory=lambda: defaultdict(Amount))
    rates: dict[ModelHour, Amount] = field(default_factory=dict)
    unpriced: set[str] = field(default_factory=set)

    @property
    def total(self) -> Amount:
        """All that was held."""
        return sum_of(list(self.lines.values()))

    def uses(self) -> dict[CostUse, Amount]:
        """Return what was held by its use, of all kinds of holders."""
        return {
            use: sum_of([amount for (_, each), amount in self.lines.items() if each == use])
            for use in COST_USES
        }

    def price(self, piece: Piece, share: float) -> Amount:
        """Return the amount of a share of a piece.

        GPU-hours x price of their type + core-hours x `core_hour` + measured kWh x `kwh`.
        """
        line, seconds = piece.line, piece.seconds * share
        joules = piece.joules * share
        gpus, cores = seconds * len(line.gpus), seconds * line.cores
        gpu_hour = self.prices.of_gpu(line.gpu_type)
        if self.prices.known:
            if line.gpus and gpu_hour is None:
                self.unpriced.add(line.gpu_type or "gpu")
            if not line.gpus and self.prices.core_hour is None:
                self.unpriced.add("cores")
        hours = gpus * (gpu_hour or 0.0) + cores * (self.prices.core_hour or 0.0)
        return Amount(
            gpu_seconds=gpus,
            core_seconds=cores,
            joules=joules,
            money=hours / HOUR + joules / KWH * (self.prices.kwh or 0.0),
            seconds=seconds,
            measured=piece.measured * share,
        )

    def spent_on(self, model: str | None, began: float, prompt: int, sampled: int) -> Amount:
        """Return what tokens took: of runs that began in an hour and ended with this version."""
        amount, rate = Amount(), self.rates.get(model_hour(model, began))
        if rate is not None:
            amount.add(rate, weight(prompt, sampled))
        return amount


def weight(prompt: int, sampled: int) -> float:
    """Return how much tokens count: see the formula at the top."""
    return prompt + SAMPLED * sampled


def model_hour(model: str | None, began: float) -> ModelHour:
    """Return the hour of a time, and the name of a version."""
    return began // HOUR * HOUR, (model or "").partition("@")[0]


def account_of(
    ledger: LedgerAccount,
    store: Store,
    prices: PriceSettings,
    since: float = 0.0,
    until: float | None = None,
) -> CostAccount:
    """Return the account of a time, in whole hours: `since` down, `until` up, at most until now."""
    now = time.time()
    since = since // HOUR * HOUR
    until = now if until is None else min(now, -(-until // HOUR) * HOUR)
    account = CostAccount(since, until, prices)
    served: dict[ModelHour, Amount] = defaultdict(Amount)
    for piece in ledger.pieces:
        if (share := piece.share(since, until)) <= 0:
            continue
        if piece.use == "serving":
            begin, end = max(since, piece.begin), min(until, piece.end)
            while begin < end:
                hour = model_hour(piece.line.what, begin)
                until_hour = min(end, hour[0] + HOUR)
                served[hour].add(account.price(piece, piece.share(begin, until_hour)))
                begin = until_hour
            continue
        amount = account.price(piece, share)
        account.lines[piece.line.kind, piece.use].add(amount)
        if piece.use == "training":
            account.trained[piece.job].add(amount)
    weights: dict[ModelHour, float] = defaultdict(float)
    for row in token_rows(store, RunFilter(since=since, until=until), []) if served else ():
        weights[model_hour(row["model"], row["time"])] += row["weight"]
    for hour, amount in served.items():
        if whole := weights.get(hour):
            account.rates[hour] = Amount()
            account.rates[hour].add(amount, 1.0 / whole)
        account.lines["replica", "requests" if whole else "unattributed"].add(amount)
    return account


def token_rows(
    store: Store, runs: RunFilter, by: Sequence[str], owner: str | None = None
) -> list[dict[str, Any]]:
    """Return statistics of runs by some fields, version and hour, with `weight` and `succeeded`."""
    groups = list(dict.fromkeys([*by, "model"]))
    rows = store.stats(runs, groups, bucket=HOUR, percentiles=False, owner=owner)
    for row in rows:
        row["weight"] = weight(row["prompt_tokens"] or 0, row["sampled_tokens"] or 0)
        row["succeeded"] = round((row["success"] or 0.0) * row["rewarded"])
    return rows
