"""Agents that train themselves: write an agent, give it tasks and rewards, run a loop.

    from cray_agents import Agent, tool, Task, TaskSet, reward, Loop

Names are loaded when first used, so that `import cray_agents` is quick and pulls in nothing heavy.
Read next: agent.py, then loop.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cray_agents.agent import Agent as Agent
    from cray_agents.cli.running import local_platform as local_platform
    from cray_agents.curriculum import Curriculum as Curriculum
    from cray_agents.generation import Generation as Generation
    from cray_agents.loop import Loop as Loop
    from cray_agents.openai_engine import OpenAIEngine as OpenAIEngine
    from cray_agents.platform import Platform as Platform
    from cray_agents.records import Run as Run
    from cray_agents.records import StopReason as StopReason
    from cray_agents.records import Task as Task
    from cray_agents.records import Trajectory as Trajectory
    from cray_agents.rewards import reward as reward
    from cray_agents.scripted import ScriptedEngine as ScriptedEngine
    from cray_agents.tasks import TaskSet as TaskSet
    from cray_agents.toolbox import tool as tool
    from cray_agents.training import Hyperparameters as Hyperparameters

_HOME = {
    "Agent": "agent",
    "Curriculum": "curriculum",
    "Generation": "generation",
    "Hyperparameters": "training",
    "Loop": "loop",
    "local_platform": "cli.running",
    "OpenAIEngine": "openai_engine",
    "Platform": "platform",
    "Run": "records",
    "ScriptedEngine": "scripted",
    "StopReason": "records",
    "Task": "records",
    "TaskSet": "tasks",
    "Trajectory": "records",
    "reward": "rewards",
    "tool": "toolbox",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'cray_agents' has no attribute {name!r}")
    value = getattr(import_module(f"cray_agents.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
