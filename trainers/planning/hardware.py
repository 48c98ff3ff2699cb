"""GPUs by name: how fast, how large, at what price. Edit the table; nothing else knows these.

The trainer asks `peak_flops` for its MFU, `cray-agents plan` asks `find_gpu`. No torch.
"""

from dataclasses import dataclass

from cray_agents.errors import BadInput


@dataclass(frozen=True)
class Gpu:
    """`marks`: all of them are in the name that CUDA gives the device, whatever its case.

    `teraflops`: dense bfloat16 with float32 sums, from the vendor's data sheet; those print
    twice as much, with sparsity. `gib`: what nvidia-smi shows. `price`: dollars an hour, or None.
    """

    name: str
    marks: tuple[str, ...]
    teraflops: float
    gib: float
    price: float | None = None


# Prices: EC2 Capacity Blocks per accelerator, end of 2024. On demand it was 2.5 times as much then
# (p5.48xlarge, 8 x H100: about $100/h); others ask half. The more telling names come first.
GPUS = (
    Gpu("GB200", ("GB200",), 2500, 184),
    Gpu("B300", ("B300",), 2250, 268),
    Gpu("B200", ("B200",), 2250, 179),
    Gpu("GH200", ("GH200",), 989.4, 95),
    Gpu("H200", ("H200",), 989.4, 140, 5.41),
    Gpu("H100-NVL", ("H100", "NVL"), 835, 93),
    Gpu("H100-PCIe", ("H100", "PCIE"), 756, 79),
    Gpu("H100", ("H100",), 989.4, 79, 4.92),
    Gpu("H20", ("H20",), 148, 95),
    Gpu("A100-40GB", ("A100", "40GB"), 312, 40, 1.84),
    Gpu("A100", ("A100",), 312, 80),
    Gpu("L40S", ("L40S",), 362, 45),
    Gpu("L4", ("L4",), 121, 22),
    Gpu("A10G", ("A10G",), 70, 22),
    Gpu("RTX-4090", ("RTX", "4090"), 165, 24),
    Gpu("MI300X", ("MI300X",), 1307, 192),
)


def identify(device_name: str) -> Gpu | None:
    """The GPU that CUDA calls so ("NVIDIA H100 80GB HBM3"); None: not in the table."""
    words = device_name.upper().replace("-", " ").split()
    return next((gpu for gpu in GPUS if all(mark in words for mark in gpu.marks)), None)


def peak_flops(device_name: str) -> float | None:
    """Floating-point operations a second that a device does at most in bfloat16; None: unknown."""
    gpu = identify(device_name)
    return gpu.teraflops * 1e12 if gpu else None


def find_gpu(name: str) -> Gpu:
    """A GPU by its name here, or as CUDA calls it. Raises BadInput listing those known."""
    named = [gpu for gpu in GPUS if gpu.name.upper() == name.upper()]
    found = named[0] if named else identify(name)
    if found is None:
        raise BadInput(
            f"no GPU {name!r} is known; known are {', '.join(gpu.name for gpu in GPUS)}",
            param="gpu",
        )
    return found
