"""Load format: choose the reader of weights that vLLM is started with (`--load-format`).

server/compose.py calls `load_format` once, and vllm_replica.py puts the result on the command
line. Names and packages are those of vLLM 0.32, whose formats that cannot load again into a running
server are left out. The order of FAST follows their makers' figures; nothing was run on a GPU.
"""

from collections.abc import Callable
from importlib.util import find_spec

from cray_agents.errors import SetupError

AUTO = "auto"  # vLLM's own reader of safetensors
#: Readers for GPUs by their package, fastest first.
FAST = {
    "instanttensor": "instanttensor",
    "fastsafetensors": "fastsafetensors",
    "runai_streamer": "runai_model_streamer",
}
#: Readers that need CUDA; the other one streams to any device.
_CUDA = {"instanttensor", "fastsafetensors"}
PLAIN = (AUTO, "safetensors")


def _has_package(name: str) -> bool:
    return find_spec(name) is not None


def load_format(
    wanted: str, *, gpu: bool, has_package: Callable[[str], bool] = _has_package
) -> str:
    """Return the format to start vLLM with; "auto" is resolved to the fastest reader there is.

    Raises SetupError for an unknown format, and for one whose package or GPU is missing.
    """
    installed = [name for name, package in FAST.items() if has_package(package)]
    usable = [name for name in installed if gpu or name not in _CUDA]
    if wanted == AUTO:
        return usable[0] if gpu and usable else AUTO
    if wanted in PLAIN or wanted in usable:
        return wanted
    if wanted in installed:
        why = "reads to GPUs alone, and the installed vLLM computes on the CPU"
    elif wanted in FAST:
        why = f"needs the package {FAST[wanted]}, which is not installed: pip install it"
    else:
        why = f"is none of {', '.join((*PLAIN, *FAST))}"
    raise SetupError(f"load_format = {wanted!r} {why}. Usable here: {', '.join((*PLAIN, *usable))}")
