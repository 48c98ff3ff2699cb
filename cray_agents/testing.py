"""Helpers for tests of agents: scripted and recorded models, and a guard against real ones.

from cray_agents.testing import ScriptedEngine, no_real_models
"""

from cray_agents.engines.no_real_models import no_real_models
from cray_agents.engines.replay import RecordingEngine, ReplayEngine
from cray_agents.engines.scripted import ScriptedEngine, tool_call

__all__ = ["RecordingEngine", "ReplayEngine", "ScriptedEngine", "no_real_models", "tool_call"]
