"""An agent and one run of it: turns, tools, hooks, handoffs, sessions. Start at agent.py.

from cray_agents.agent import Hooks, MemorySession, OpenAIEngine
"""

from typing import TYPE_CHECKING

from cray_agents.lazy_names import lazy_names

if TYPE_CHECKING:
    from cray_agents.agent.agent import Agent as Agent
    from cray_agents.agent.environment import Environment as Environment
    from cray_agents.agent.environment import WorkerEnvironment as WorkerEnvironment
    from cray_agents.agent.hooks import Hooks as Hooks
    from cray_agents.agent.run_context import RunContext as RunContext
    from cray_agents.agent.sessions import FileSession as FileSession
    from cray_agents.agent.sessions import MemorySession as MemorySession
    from cray_agents.agent.sessions import PlatformSession as PlatformSession
    from cray_agents.agent.stream_events import AgentEvent as AgentEvent
    from cray_agents.agent.stream_events import Handoff as Handoff
    from cray_agents.agent.stream_events import LimitReached as LimitReached
    from cray_agents.agent.stream_events import ModelFinished as ModelFinished
    from cray_agents.agent.stream_events import ModelStarted as ModelStarted
    from cray_agents.agent.stream_events import RunEnded as RunEnded
    from cray_agents.agent.stream_events import TextDelta as TextDelta
    from cray_agents.agent.stream_events import ToolFinished as ToolFinished
    from cray_agents.agent.stream_events import ToolStarted as ToolStarted
    from cray_agents.agent.trl_class import as_trl as as_trl
    from cray_agents.engines.openai_engine import OpenAIEngine as OpenAIEngine
    from cray_agents.engines.tool_calls import ConstrainedEngine as ConstrainedEngine
    from cray_agents.records import StopReason as StopReason

__getattr__, __all__ = lazy_names(__name__, __file__)
