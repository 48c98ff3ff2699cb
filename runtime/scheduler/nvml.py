"""NVML: what NVIDIA's driver says of this node's GPUs, by ctypes on its own library.

A figure that a GPU does not have is left out, never 0. Names and units of the functions are those
of the NVML API Reference. No GPU was seen. Called by scheduler/sampler.py.

The meters count the joules of GPUs since a holder got them, for its lines of the ledger
(accounting/ledger.py). A counter that went back, as after a reset of the GPU, counts from there on.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SLOWED = {  # bits of nvmlDeviceGetCurrentClocksThrottleReasons that say that a GPU is held back
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
_SM, _MEMORY = 1, 2  # clocks
_CORRECTED, _UNCORRECTED = 0, 1  # errors of memory, since the driver's start: counter type 0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _MemoryInfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class Nvml:
    """The open library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def read(self, function: str, kind: Any, *arguments: Any) -> Any:
        """Return what a function writes to its last argument, a ctypes `kind`; None if it fails."""
        value = kind()
        try:
            code = self._library[function](*arguments, ctypes.byref(value))
        except AttributeError:  # an older driver
            return None
        return None if code else value

    def name(self, gpu: ctypes.c_void_p) -> str:
        """Return a GPU's model."""
        name = ctypes.create_string_buffer(96)
        self._library.nvmlDeviceGetName(gpu, name, len(name))
        return name.value.decode()

    def gpu(self, name: str) -> ctypes.c_void_p | None:
        """Return the handle of a GPU as CUDA_VISIBLE_DEVICES names it; None if there is none."""
        if name.isdecimal():
            index = ctypes.c_uint(int(name))
            handle = self.read("nvmlDeviceGetHandleByIndex_v2", ctypes.c_void_p, index)
        else:
            handle = self.read("nvmlDeviceGetHandleByUUID", ctypes.c_void_p, name.encode())
        return handle if isinstance(handle, ctypes.c_void_p) else None


@contextmanager
def nvml(library: str = LIBRARY) -> Iterator[Nvml | None]:
    """Open NVML within the context; None without a driver."""
    try:
        opened = ctypes.CDLL(library)
        works = opened.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        works = False
    if not works:
        yield None
        return
    try:
        yield Nvml(opened)
    finally:
        opened.nvmlShutdown()


def describe_gpus(driver: Nvml, gpus: Sequence[str]) -> list[dict[str, str]]:
    """Return the names of GPUs."""
    handles = [(gpu, driver.gpu(gpu)) for gpu in gpus]
    return [{"gpu": gpu, "name": driver.name(handle)} for gpu, handle in handles if handle]


def read_load(driver: Nvml, gpu: str) -> dict[str, float | str]:
    """Return the figures of a GPU. `slowed_by`: why its clocks are held back, in words."""
    if (handle := driver.gpu(gpu)) is None:
        return {}
    figures: dict[str, float | str] = {}
    if (use := driver.read("nvmlDeviceGetUtilizationRates", _Utilization, handle)) is not None:
        figures["utilization"] = use.gpu / 100
    if (memory := driver.read("nvmlDeviceGetMemoryInfo", _MemoryInfo, handle)) is not None:
        figures |= {"memory_bytes": memory.used, "memory_total_bytes": memory.total}
    uint, ulong = ctypes.c_uint, ctypes.c_ulonglong
    for name, function, kind, arguments, unit in (
        ("power_watts", "nvmlDeviceGetPowerUsage", uint, (), 1000),
        ("temperature_celsius", "nvmlDeviceGetTemperature", uint, (0,), 1),
        ("sm_clock_mhz", "nvmlDeviceGetClockInfo", uint, (_SM,), 1),
        ("memory_clock_mhz", "nvmlDeviceGetClockInfo", uint, (_MEMORY,), 1),
        ("ecc_corrected", "nvmlDeviceGetTotalEccErrors", ulong, (_CORRECTED, 0), 1),
        ("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", ulong, (_UNCORRECTED, 0), 1),
    ):
        if (value := driver.read(function, kind, handle, *arguments)) is not None:
            figures[name] = value.value / unit if unit > 1 else value.value
    if (
        mask := driver.read("nvmlDeviceGetCurrentClocksThrottleReasons", ulong, handle)
    ) is not None:
        reasons = [word for bit, word in SLOWED.items() if mask.value & bit]
        figures["slowed"] = int(bool(reasons))
        if reasons:
            figures["slowed_by"] = ", ".join(reasons)
    return figures


def read_joules(driver: Nvml | None, gpus: Sequence[str]) -> float | None:
    """Return the energy of GPUs since their driver's start; None if one of them has no counter."""
    total, kind = 0.0, ctypes.c_ulonglong
    for gpu in gpus:
        if driver is None or (handle := driver.gpu(gpu)) is None:
            return None
        spent = driver.read("nvmlDeviceGetTotalEnergyConsumption", kind, handle)
        if spent is None:
            return None
        total += spent.value / 1000
    return total if gpus else None


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
