"""Agents that train themselves: write an agent, give it tasks and rewards, run a loop.

    from cray_agents import Agent, tool, Task, TaskSet, reward, Loop, GRPO

More names are in cray_agents.agent, .loop, .training and .testing. Read next: agent/agent.py, then
loop/loop.py.
"""

from typing import TYPE_CHECKING

from cray_agents.lazy_names import lazy_names

if TYPE_CHECKING:
    from cray_agents.agent.agent import Agent as Agent
    from cray_agents.agent.environment import Environment as Environment
    from cray_agents.agent.run_context import RunContext as RunContext
    from cray_agents.agent.tool import tool as tool
    from cray_agents.errors import ToolError as ToolError
    from cray_agents.loop.evaluation import Evaluation as Evaluation
    from cray_agents.loop.evaluation import EvaluationResult as EvaluationResult
    from cray_agents.loop.evaluation import evaluate as evaluate
    from cray_agents.loop.evaluation import evaluate_sync as evaluate_sync
    from cray_agents.loop.loop import Loop as Loop
    from cray_agents.loop.methods import DPO as DPO
    from cray_agents.loop.methods import GRPO as GRPO
    from cray_agents.loop.methods import KTO as KTO
    from cray_agents.loop.methods import RFT as RFT
    from cray_agents.loop.methods import SFT as SFT
    from cray_agents.loop.methods import Distill as Distill
    from cray_agents.loop.methods import Examples as Examples
    from cray_agents.loop.methods import Instructions as Instructions
    from cray_agents.loop.methods import Training as Training
    from cray_agents.loop.outside_model import OutsideModel as OutsideModel
    from cray_agents.loop.settings import Data as Data
    from cray_agents.loop.settings import Sampling as Sampling
    from cray_agents.loop.stop_rules import Stop as Stop
    from cray_agents.platform.client import Platform as Platform
    from cray_agents.promotion.sequential_test import PromotionTest as PromotionTest
    from cray_agents.records import Message as Message
    from cray_agents.records import Run as Run
    from cray_agents.records import Task as Task
    from cray_agents.records import Trajectory as Trajectory
    from cray_agents.rewards.llm_judge import judge as judge
    from cray_agents.rewards.llm_judge import judge_group as judge_group
    from cray_agents.rewards.reward import Verdict as Verdict
    from cray_agents.rewards.reward import reward as reward
    from cray_agents.rewards.scanner import scanner as scanner
    from cray_agents.server.platform_process import local_platform as local_platform
    from cray_agents.tasks.task_set import TaskSet as TaskSet

__getattr__, __all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
