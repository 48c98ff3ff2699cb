"""Agents that train themselves: write an agent, give it tasks and rewards, run a loop.

    from cray_agents import Agent, tool, Task, TaskSet, reward, Loop

Names are loaded when first used, so that `import cray_agents` is quick and pulls in nothing heavy.
Read next: agent/agent.py, then loop/loop.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cray_agents.agent.agent import Agent as Agent
    from cray_agents.agent.environment import Environment as Environment
    from cray_agents.agent.environment import WorkerEnvironment as WorkerEnvironment
    from cray_agents.agent.hooks import Hooks as Hooks
    from cray_agents.agent.run_context import RunContext as RunContext
    from cray_agents.agent.sessions import FileSession as FileSession
    from cray_agents.agent.sessions import MemorySession as MemorySession
    from cray_agents.agent.sessions import PlatformSession as PlatformSession
    from cray_agents.agent.tool import tool as tool
    from cray_agents.agent.trl_class import as_trl as as_trl
    from cray_agents.engines.json_tool_calls import ConstrainedEngine as ConstrainedEngine
    from cray_agents.engines.no_real_models import no_real_models as no_real_models
    from cray_agents.engines.openai_engine import OpenAIEngine as OpenAIEngine
    from cray_agents.engines.replay import RecordingEngine as RecordingEngine
    from cray_agents.engines.replay import ReplayEngine as ReplayEngine
    from cray_agents.engines.scripted import ScriptedEngine as ScriptedEngine
    from cray_agents.engines.scripted import tool_call as tool_call
    from cray_agents.errors import ToolError as ToolError
    from cray_agents.generation import Generation as Generation
    from cray_agents.loop.curriculum import Curriculum as Curriculum
    from cray_agents.loop.live.schedule import Watch as Watch
    from cray_agents.loop.loop import Loop as Loop
    from cray_agents.loop.loop import warm_up as warm_up
    from cray_agents.loop.stages import Stage as Stage
    from cray_agents.loop.stop_rules import Budget as Budget
    from cray_agents.loop.warmup import WarmUp as WarmUp
    from cray_agents.platform.client import Platform as Platform
    from cray_agents.platform.training_session import TrainingSession as TrainingSession
    from cray_agents.promotion.sequential_test import Pair as Pair
    from cray_agents.promotion.sequential_test import PromotionTest as PromotionTest
    from cray_agents.promotion.sequential_test import decide as decide
    from cray_agents.queries import DatasetRecipe as DatasetRecipe
    from cray_agents.queries import RunFilter as RunFilter
    from cray_agents.records import Message as Message
    from cray_agents.records import ModelVersion as ModelVersion
    from cray_agents.records import Run as Run
    from cray_agents.records import Split as Split
    from cray_agents.records import StopReason as StopReason
    from cray_agents.records import Task as Task
    from cray_agents.records import Trajectory as Trajectory
    from cray_agents.rewards.llm_judge import judge as judge
    from cray_agents.rewards.reward import reward as reward
    from cray_agents.rewards.scanner import scanner as scanner
    from cray_agents.server.platform_process import local_platform as local_platform
    from cray_agents.tasks.task_set import TaskSet as TaskSet
    from cray_agents.trainers.models.seed_model import make_tiny_model as make_tiny_model
    from cray_agents.training_commands import Datum as Datum
    from cray_agents.training_jobs import Hyperparameters as Hyperparameters
    from cray_agents.training_jobs import Lora as Lora
    from cray_agents.training_jobs import Policy as Policy
    from cray_agents.training_jobs import Preference as Preference

_MODULES = {
    "Agent": "agent.agent",
    "as_trl": "agent.trl_class",
    "Budget": "loop.stop_rules",
    "ConstrainedEngine": "engines.json_tool_calls",
    "Curriculum": "loop.curriculum",
    "decide": "promotion.sequential_test",
    "DatasetRecipe": "queries",
    "Datum": "training_commands",
    "Environment": "agent.environment",
    "FileSession": "agent.sessions",
    "Generation": "generation",
    "Hooks": "agent.hooks",
    "Hyperparameters": "training_jobs",
    "judge": "rewards.llm_judge",
    "local_platform": "server.platform_process",
    "Loop": "loop.loop",
    "Lora": "training_jobs",
    "make_tiny_model": "trainers.models.seed_model",
    "MemorySession": "agent.sessions",
    "Message": "records",
    "ModelVersion": "records",
    "no_real_models": "engines.no_real_models",
    "OpenAIEngine": "engines.openai_engine",
    "Pair": "promotion.sequential_test",
    "Platform": "platform.client",
    "PlatformSession": "agent.sessions",
    "Policy": "training_jobs",
    "Preference": "training_jobs",
    "PromotionTest": "promotion.sequential_test",
    "RecordingEngine": "engines.replay",
    "ReplayEngine": "engines.replay",
    "reward": "rewards.reward",
    "Run": "records",
    "RunContext": "agent.run_context",
    "RunFilter": "queries",
    "scanner": "rewards.scanner",
    "ScriptedEngine": "engines.scripted",
    "Split": "records",
    "Stage": "loop.stages",
    "StopReason": "records",
    "Task": "records",
    "TaskSet": "tasks.task_set",
    "tool": "agent.tool",
    "tool_call": "engines.scripted",
    "ToolError": "errors",
    "TrainingSession": "platform.training_session",
    "Trajectory": "records",
    "warm_up": "loop.loop",
    "WarmUp": "loop.warmup",
    "Watch": "loop.live.schedule",
    "WorkerEnvironment": "agent.environment",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cray_agents' has no attribute {name!r}")
    value = getattr(import_module(f"cray_agents.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
