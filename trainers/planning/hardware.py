"""Hardware: a table of GPUs with speed, memory and price; edit it to add a GPU.

The trainer calls `peak_flops` for its MFU, `cray-agents plan` calls `find_gpu`. No torch.
"""

from dataclasses import dataclass

from cray_agents.errors import BadInput


@dataclass(frozen=True)
class Gpu:
    """A GPU model. All `marks` are in CUDA's name of the device, in any case.

    `teraflops`: dense bfloat16 with float32 sums, from the vendor's data sheet, which prints twice
    as much for sparsity. `gib`: as nvidia-smi shows it. `link`: GB/s each way to the node's other
    GPUs. `network`: GB/s each way to other nodes, of usual machines. `price`: dollars an hour, or
    None.
    """

    name: str
    marks: tuple[str, ...]
    teraflops: float
    gib: float
    price: float | None = None
    link: float = 450
    network: float = 50


# Prices: EC2 Capacity Blocks per accelerator, end of 2024. On demand cost 2.5 times as much then
# (p5.48xlarge, 8 x H100: about $100/h); other clouds ask half. More specific names come first.
GPUS = (
    Gpu("GB200", ("GB200",), 2500, 184, link=900),
    Gpu("B300", ("B300",), 2250, 268, link=900, network=100),
    Gpu("B200", ("B200",), 2250, 179, link=900),
    Gpu("GH200", ("GH200",), 989.4, 95),
    Gpu("H200", ("H200",), 989.4, 140, 5.41),
    Gpu("H100-NVL", ("H100", "NVL"), 835, 93, link=64),
    Gpu("H100-PCIe", ("H100", "PCIE"), 756, 79, link=64),
    Gpu("H100", ("H100",), 989.4, 79, 4.92),
    Gpu("H800", ("H800",), 989.4, 79, link=200),
    Gpu("H20", ("H20",), 148, 95),
    Gpu("A100-40GB", ("A100", "40GB"), 312, 40, 1.84, 300, 25),
    Gpu("A100", ("A100",), 312, 80, None, 300, 25),
    Gpu("L40S", ("L40S",), 362, 45, None, 32, 25),
    Gpu("L4", ("L4",), 121, 22, None, 32, 12),
    Gpu("A10G", ("A10G",), 70, 22, None, 32, 12),
    Gpu("RTX-4090", ("RTX", "4090"), 165, 24, None, 32, 12),
    Gpu("MI300X", ("MI300X",), 1307, 192),
)


def identify(device_name: str) -> Gpu | None:
    """Return the GPU with CUDA's device name ("NVIDIA H100 80GB HBM3"), if the table has it."""
    words = device_name.upper().replace("-", " ").split()
    return next((gpu for gpu in GPUS if all(mark in words for mark in gpu.marks)), None)


def peak_flops(device_name: str) -> float | None:
    """Return a device's peak bfloat16 operations per second; None if it is unknown."""
    gpu = identify(device_name)
    return gpu.teraflops * 1e12 if gpu else None


def find_gpu(name: str) -> Gpu:
    """Return a GPU by the table's or CUDA's name. Raises BadInput with a list of known GPUs."""
    named = [gpu for gpu in GPUS if gpu.name.upper() == name.upper()]
    gpu = named[0] if named else identify(name)
    if gpu is None:
        raise BadInput(
            f"no GPU {name!r} is known; known are {', '.join(gpu.name for gpu in GPUS)}",
            param="gpu",
        )
    return gpu
