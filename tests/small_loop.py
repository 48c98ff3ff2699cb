"""The cookbook's calculator loop, made small: what `cray-agents demo --book` runs in the tests."""

import importlib.util
from dataclasses import replace
from pathlib import Path

from cray_agents import Loop
from cray_agents.warmup import WarmUp
from cray_agents.warmup import warm_up as run_warm_up

path = Path(__file__).parents[1] / "cookbook" / "02_calculator_loop.py"
spec = importlib.util.spec_from_file_location("calculator_loop", path)
assert spec is not None and spec.loader is not None
book = importlib.util.module_from_spec(spec)
spec.loader.exec_module(book)
book.TRAIN, book.HOLDOUT, book.TEST, book.DEMONSTRATIONS = 240, 24, 24, 48

GENERATIONS = 2
make_model = book.make_model


def make_loop(seed: int = 0) -> Loop:
    """Everything is as in the cookbook, but less of it; it is not meant to get good."""
    loop: Loop = book.make_loop(seed)
    few = loop.hyperparameters.model_copy(update={"steps": 12, "warmup_steps": 2})
    return replace(loop, tasks_per_generation=32, hyperparameters=few, target=None)


def warm_up(loop: Loop) -> None:
    """One job; any success is enough."""
    steps = loop.hyperparameters.model_copy(update={"steps": 100, "schedule": "constant"})
    run_warm_up(loop, WarmUp(steps, steps, demonstrations=48, more=0, band=(0.0, 1.0)))
