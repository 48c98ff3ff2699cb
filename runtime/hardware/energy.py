"""Energy: the joules of GPUs since a holder got them, for its lines of the ledger.

A counter that went back, as after a reset of the GPU, counts from there on. Called by
scaling/ledger.py, and by replica_supervisor.py for a replica in a Slurm job.
"""

from collections.abc import Sequence

from cray_agents.runtime.hardware.nvml import Nvml, read_joules


class EnergyMeter:
    """The counters of some GPUs of this node."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus
        self._before: float | None = None

    def begin(self, driver: Nvml | None) -> float | None:
        """Begin to measure; return 0, or None if these GPUs have no counters."""
        self._before = read_joules(driver, self._gpus)
        return None if self._before is None else 0.0

    def take(self, driver: Nvml | None) -> float | None:
        """Return the joules since the last call of this or of `begin`; None if not known."""
        before, now = self._before, read_joules(driver, self._gpus)
        if before is None or now is None:
            return None
        self._before = now
        return now - before if now >= before else now


class EnergyTotal:
    """The joules of some GPUs of this node since this was made."""

    def __init__(self, driver: Nvml | None, gpus: Sequence[str]) -> None:
        self._driver, self._meter = driver, EnergyMeter(gpus)
        self._total = self._meter.begin(driver)

    def read(self) -> float | None:
        """Return them; None if these GPUs have no counters."""
        if self._total is not None:
            self._total += self._meter.take(self._driver) or 0.0
        return self._total
