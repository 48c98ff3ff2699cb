"""Gateway shares: how much of the engines' capacity, and of the wait queue, each gateway may use.

Several gateways must not let in more together than one would alone. Further gateways tell the
controller's gateway how many requests they have; each gets a share in proportion. A share is a
moment old, so the sum of what is let in may be off by the requests of that moment: vLLM queues
those. Called by routes/gateways.py and compose.py.
"""

import time

FORGOTTEN = 3.0  # seconds after which a gateway that says nothing has no share


class GatewayShares:
    """The demands of further gateways, in requests inside and waiting, as last reported."""

    def __init__(self) -> None:
        self._demands: dict[str, tuple[int, float]] = {}

    def note(self, gateway: str, demand: int) -> None:
        """Take a gateway's report."""
        self._demands[gateway] = (demand, time.monotonic())

    @property
    def gateways(self) -> list[str]:
        """The names of the further gateways that report."""
        self._forget()
        return sorted(self._demands)

    @property
    def demand(self) -> int:
        """The requests that further gateways have."""
        self._forget()
        return sum(demand for demand, _ in self._demands.values())

    def own(self, demand: int) -> float:
        """Return the share of the gateway that holds this object, in (0, 1]."""
        if not self._demands:
            return 1.0
        return self._share(demand, self.demand + demand, len(self._demands) + 1)

    def of(self, gateway: str, own_demand: int) -> float:
        """Return the share of a gateway that has reported; `own_demand`: that of this one."""
        demand = self._demands[gateway][0]
        return self._share(demand, self.demand + own_demand, len(self._demands) + 1)

    @staticmethod
    def _share(demand: int, total: int, gateways: int) -> float:
        return (demand + 1) / (total + gateways)  # so that an idle one may begin

    def _forget(self) -> None:
        old = time.monotonic() - FORGOTTEN
        for gateway in [g for g, (_, at) in self._demands.items() if at < old]:
            del self._demands[gateway]
