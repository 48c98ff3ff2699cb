"""Ports: what the kernel counts at InfiniBand, RoCE and EFA ports (/sys/class/infiniband).

The files are those of the kernel's ABI, sysfs-class-infiniband, and of the drivers mlx5 and efa.
Only fake trees were read. Called by sampler.py.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SYS = Path("/sys")
WORD = 4  # bytes that `port_xmit_data` and `port_rcv_data` count as one
#: What passed a port in each direction, and its size in bytes; the first file that exists counts.
SENT = [("counters/port_xmit_data", WORD), ("hw_counters/tx_bytes", 1)]
RECEIVED = [("counters/port_rcv_data", WORD), ("hw_counters/rx_bytes", 1)]
#: Further amounts, of which rates are made.
AMOUNTS = {
    "rdma_read_bytes": "hw_counters/rdma_read_bytes",
    "rdma_write_bytes": "hw_counters/rdma_write_bytes",
    "sent_packets": "hw_counters/tx_pkts",
    "received_packets": "hw_counters/rx_pkts",
    "wait_ticks": "counters/port_xmit_wait",
}
#: Errors, and signs of a crowded network (the last three).
ERRORS = {
    "counters": (
        "symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors",
        "port_xmit_discards", "local_link_integrity_errors", "excessive_buffer_overrun_errors",
    ),
    "hw_counters": (
        "out_of_sequence", "packet_seq_err", "rnr_nak_retry_err", "local_ack_timeout_err",
        "rx_drops", "retrans_timeout_events", "np_cnp_sent", "rp_cnp_handled",
        "np_ecn_marked_roce_packets",
    ),
}  # fmt: skip


def ports(sys: Path = SYS) -> Iterator[tuple[str, Path]]:
    """Yield all ports with their folders, named as in `mlx5_0:1`."""
    for folder in sorted((sys / "class" / "infiniband").glob("*/ports/*")):
        yield f"{folder.parents[1].name}:{folder.name}", folder


def is_up(folder: Path) -> bool:
    """Tell whether a port's link is up: its state is `4: ACTIVE`."""
    return "ACTIVE" in text_of(folder / "state")


def read_amounts(folder: Path) -> dict[str, int]:
    """Return what passed a port so far, as far as it counts that."""
    amounts: dict[str, int] = {}
    for name, sources in (("sent_bytes", SENT), ("received_bytes", RECEIVED)):
        for file, size in sources:
            if (value := number_in(folder / file)) is not None:
                amounts[name] = value * size
                break
    for name, file in AMOUNTS.items():
        if (value := number_in(folder / file)) is not None:
            amounts[name] = value
    return amounts


def read_errors(folder: Path) -> dict[str, int]:
    """Return a port's counters of errors, by the kernel's names."""
    read = {
        name: number_in(folder / kind / name) for kind, names in ERRORS.items() for name in names
    }
    return {name: value for name, value in read.items() if value is not None}


def text_of(path: Path) -> str:
    """Return a short text of sysfs; "" where it is missing or cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def number_in(path: Path) -> int | None:
    """Return a number of sysfs; None without one."""
    text = text_of(path)
    return int(text) if text.lstrip("-").isdecimal() else None
