"""Amount: seconds of GPUs and cores with their measured energy and their price, to be added up."""

from dataclasses import dataclass, field

from cray_agents.config.price_section import PriceSettings
from cray_agents.runtime.scaling.holdings import Piece
from cray_agents.runtime.views.view_records import CostAmount

HOUR = 3600.0
KWH = 3.6e6  # joules


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


@dataclass
class Pricer:
    """Prices pieces of holdings. `unpriced`: what was held and has no price, though others have."""

    prices: PriceSettings
    unpriced: set[str] = field(default_factory=set)

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
