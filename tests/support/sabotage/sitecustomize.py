"""Broken parts: exchange one function of the platform, in every process that it starts.

Python imports `sitecustomize` at its start, if it is on PYTHONPATH. This one waits for the modules
below, and puts a broken function into each. A broken function does harm only while the file
`switch` beside this one names it; tests/test_sabotage.py writes that file.
"""

import importlib.util
import sys
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

SWITCH = Path(__file__).with_name("switch")


def is_broken(name: str) -> bool:
    """Tell whether a failure is switched on."""
    return SWITCH.exists() and SWITCH.read_text() == name


def break_worker(module: Any) -> None:
    """`tied`: a reload in place leaves the output layer's packed copy as it was."""
    original = module.Extension.repack_kept_weights

    def repack_kept_weights(self: Any) -> dict[str, int]:
        return {"repacked": 0} if is_broken("tied") else dict(original(self))

    module.Extension.repack_kept_weights = repack_kept_weights


def break_adapters(module: Any) -> None:
    """`adapter`: vLLM loads the adapter, and applies nothing of it."""
    original = module.LoRAModel.from_lora_tensors.__func__

    def from_lora_tensors(
        cls: Any, lora_model_id: int, tensors: Any, *rest: Any, **more: Any
    ) -> Any:
        if is_broken("adapter"):
            tensors = {name: tensor * 0 for name, tensor in tensors.items()}
        return original(cls, lora_model_id, tensors, *rest, **more)

    module.LoRAModel.from_lora_tensors = classmethod(from_lora_tensors)


def break_parser(module: Any) -> None:
    """`parser`: the server's parser of tool calls never finds one."""
    parser = module.Hermes2ProToolParser
    original = parser.extract_tool_calls

    def extract_tool_calls(self: Any, model_output: str, request: Any) -> Any:
        if is_broken("parser"):
            model_output = model_output.replace("<tool_call>", "<call>")
        return original(self, model_output, request)

    parser.extract_tool_calls = extract_tool_calls


def break_training(module: Any) -> None:
    """Break the trainer's steps.

    `rate`: the learning rate's schedule begins anew. `reference`: the reference's weights are not
    loaded, and the policy judges itself.
    """
    training = module.RankTraining
    rate_at, holding = training.rate_at, training.holding

    def new_rate_at(self: Any, step: int) -> float:
        return float(rate_at(self, 0 if is_broken("rate") else step))

    def new_holding(self: Any, checkpoint: Path) -> Any:
        return nullcontext() if is_broken("reference") else holding(self, checkpoint)

    training.rate_at, training.holding = new_rate_at, new_holding


BREAKERS = {
    "cray_agents.runtime.vllm_plugins.worker": break_worker,
    "vllm.lora.lora_model": break_adapters,
    "vllm.tool_parsers.hermes_tool_parser": break_parser,
    "cray_agents.trainers.training.train_step": break_training,
}


class BreakingLoader(Loader):
    """A loader that breaks a module once it is loaded."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader, self.name = loader, name

    def create_module(self, spec: ModuleSpec) -> Any:
        """Create the module as its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Execute the module, then break it."""
        self.loader.exec_module(module)
        BREAKERS[self.name](module)


class BreakingFinder(MetaPathFinder):
    """A finder that stands before all others, for the modules of BREAKERS."""

    def __init__(self) -> None:
        self.looking = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the module's own spec with a BreakingLoader, or None for any other module."""
        if fullname not in BREAKERS or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = BreakingLoader(spec.loader, fullname)
        return spec


sys.meta_path.insert(0, BreakingFinder())
