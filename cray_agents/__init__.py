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
    from cray_agents.constrained import ConstrainedEngine as ConstrainedEngine
    from cray_agents.context import RunContext as RunContext
    from cray_agents.curriculum import Curriculum as Curriculum
    from cray_agents.environment import Environment as Environment
    from cray_agents.generation import Generation as Generation
    from cray_agents.guard import no_real_models as no_real_models
    from cray_agents.hooks import Hooks as Hooks
    from cray_agents.hours import Watch as Watch
    from cray_agents.judges import judge as judge
    from cray_agents.loop import Loop as Loop
    from cray_agents.openai_engine import OpenAIEngine as OpenAIEngine
    from cray_agents.platform import Platform as Platform
    from cray_agents.promotion import PromotionTest as PromotionTest
    from cray_agents.records import Run as Run
    from cray_agents.records import StopReason as StopReason
    from cray_agents.records import Task as Task
    from cray_agents.records import Trajectory as Trajectory
    from cray_agents.replay import RecordingEngine as RecordingEngine
    from cray_agents.replay import ReplayEngine as ReplayEngine
    from cray_agents.rewards import reward as reward
    from cray_agents.schedule import Stage as Stage
    from cray_agents.scripted import ScriptedEngine as ScriptedEngine
    from cray_agents.sessions import FileSession as FileSession
    from cray_agents.sessions import MemorySession as MemorySession
    from cray_agents.sessions import PlatformSession as PlatformSession
    from cray_agents.stopping import Budget as Budget
    from cray_agents.tasks import TaskSet as TaskSet
    from cray_agents.toolbox import tool as tool
    from cray_agents.trainers.seed_model import make_tiny_model as make_tiny_model
    from cray_agents.training import Hyperparameters as Hyperparameters
    from cray_agents.warmup import WarmUp as WarmUp
    from cray_agents.warmup import warm_up as warm_up

_HOME = {
    "Agent": "agent",
    "Budget": "stopping",
    "ConstrainedEngine": "constrained",
    "Curriculum": "curriculum",
    "Environment": "environment",
    "FileSession": "sessions",
    "Generation": "generation",
    "Hooks": "hooks",
    "Hyperparameters": "training",
    "local_platform": "cli.running",
    "Loop": "loop",
    "make_tiny_model": "trainers.seed_model",
    "MemorySession": "sessions",
    "no_real_models": "guard",
    "OpenAIEngine": "openai_engine",
    "Platform": "platform",
    "PlatformSession": "sessions",
    "PromotionTest": "promotion",
    "RecordingEngine": "replay",
    "ReplayEngine": "replay",
    "judge": "judges",
    "reward": "rewards",
    "Run": "records",
    "RunContext": "context",
    "ScriptedEngine": "scripted",
    "Stage": "schedule",
    "StopReason": "records",
    "Task": "records",
    "TaskSet": "tasks",
    "tool": "toolbox",
    "Trajectory": "records",
    "warm_up": "warmup",
    "WarmUp": "warmup",
    "Watch": "hours",
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
