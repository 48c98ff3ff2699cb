"""Helpers for tests of agents: scripted, recorded and tiny models, no real ones.

from cray_agents.testing import ScriptedEngine, no_real_models
"""

from typing import TYPE_CHECKING

from cray_agents.lazy_names import lazy_names

if TYPE_CHECKING:
    from cray_agents.engines.no_real_models import no_real_models as no_real_models
    from cray_agents.engines.replay import RecordingEngine as RecordingEngine
    from cray_agents.engines.replay import ReplayEngine as ReplayEngine
    from cray_agents.engines.scripted import ScriptedEngine as ScriptedEngine
    from cray_agents.engines.scripted import tool_call as tool_call
    from cray_agents.runtime.registry.index_package import fetch_package as fetch_package
    from cray_agents.trainers.models.seed_model import make_tiny_model as make_tiny_model

__getattr__, __all__ = lazy_names(__name__, __file__)
