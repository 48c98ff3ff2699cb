"""Topology: which GPUs and network ports are at which NUMA node and PCI switch, from sysfs.

Called by sampler.py, whose first line has it.
"""

from pathlib import Path
from typing import Any

from cray_agents.runtime.hardware.ports import SYS, is_up, number_in, ports, text_of


def read_topology(gpus: list[dict[str, str]], sys: Path = SYS) -> dict[str, Any]:
    """Return NUMA nodes with their cores, and GPUs and ports with NUMA node and PCI switch.

    `gpus`: of `nvml.describe_gpus`. A port's `near`: GPUs at its own PCI switch. A NUMA node of
    None: the machine names none.
    """
    nodes = [
        {"numa": int(path.name.removeprefix("node")), "cores": text_of(path / "cpulist")}
        for path in sorted((sys / "devices/system/node").glob("node[0-9]*"))
    ]
    placed = [{**gpu, **_place(sys / "bus/pci/devices" / gpu["pci"])} for gpu in gpus]
    links = []
    for name, folder in ports(sys):
        device = folder.parents[1] / "device"
        place = _place(device)
        near = [gpu["gpu"] for gpu in placed if gpu["switch"] and gpu["switch"] == place["switch"]]
        links.append(
            {
                "port": name,
                "pci": device.resolve().name if device.exists() else "",
                **place,
                "rate": text_of(folder / "rate"),
                "link": text_of(folder / "link_layer"),
                "up": is_up(folder),
                "near": near,
            }
        )
    return {"numa_nodes": nodes, "gpus": placed, "ports": links}


def _place(device: Path) -> dict[str, Any]:
    """Return the NUMA node of a PCI device, and the address of the switch above its own port.

    A device hangs at a downstream port of a switch: devices of one switch share the port above.
    """
    numa = number_in(device / "numa_node")
    above = device.resolve().parents[1].name if device.exists() else ""
    return {"numa": None if numa is None or numa < 0 else numa,
            "switch": above if above.count(":") == 2 else ""}  # fmt: skip
