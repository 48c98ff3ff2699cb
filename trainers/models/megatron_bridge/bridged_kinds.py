"""Bridged kinds: the kinds that are trained through Megatron-Bridge, and what it needs installed.

Nothing here imports Megatron-Bridge, which takes many seconds: models/architecture.py asks before a
job is started. Read next: bridged_model.py.
"""

import importlib.metadata
import platform
import sys
from importlib.util import find_spec

from cray_agents.errors import BadInput
from cray_agents.training_jobs import Hyperparameters

BRIDGE = "Megatron-Bridge 0.6"
TRIED = {"megatron-bridge": "0.6", "megatron-core": "0.19"}  # versions, by their first two numbers
# Of the kinds that Megatron-Bridge lists, those whose logits and losses were compared with
# transformers' (tests/trainers/megatron_bridge/). Others have layers or tables for GPUs alone.
BRIDGED = ("gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe")

# Experts with biases: Megatron-core and Megatron-Bridge keep each whole, and tensor ranks cut them.
WHOLE_EXPERTS = ("gpt_oss",)


def check_bridged(hyper: Hyperparameters) -> None:
    """Raise BadInput for what the megatron-bridge backend does not train."""
    if hyper.lora is not None:
        raise BadInput(
            "backend=megatron-bridge trains all weights, and the job asks for LoRA: train LoRA with"
            " backend=transformers, or with backend=megatron for its kinds",
            param="lora",
        )
    if hyper.fp8 is not None:
        raise BadInput(
            f"backend=megatron-bridge was not tried with fp8={hyper.fp8}: leave fp8 out, or ask for"
            " backend=megatron for its kinds",
            param="fp8",
        )


def why_not_bridged(kind: str) -> str | None:
    """Return why models of a kind cannot be trained through Megatron-Bridge here; None: they can.

    The sentence ends with what would work.
    """
    if kind not in BRIDGED:
        return f"{BRIDGE} was tried with {', '.join(BRIDGED)}, not with {kind}"
    return why_not_installed()


def why_not_installed() -> str | None:
    """Return why Megatron-Bridge cannot be imported, and what it needs; None if it can."""
    if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
        if sys.version_info < (3, 12):
            return (
                f"{BRIDGE} needs Python 3.12, and this is {platform.python_version()}: make an"
                " environment of Python 3.12 with `pip install 'cray-agents[bridge]'`"
            )
        return f"{BRIDGE} is not installed: pip install 'cray-agents[bridge]'"
    for package, tried in TRIED.items():
        installed = importlib.metadata.version(package)
        if installed.split(".")[:2] != tried.split("."):
            return (
                f"{package} {installed} is installed, and backend=megatron-bridge was tried with"
                f" {tried}: pip install '{package}=={tried}.*'"
            )
    return None
