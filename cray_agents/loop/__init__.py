"""The self-improving loop, from runs to promoted weights. Start at loop.py.

from cray_agents.loop import Budget, Curriculum, Live, WarmUp, warm_up
"""

from typing import TYPE_CHECKING

from cray_agents.lazy_names import lazy_names

if TYPE_CHECKING:
    from cray_agents.iteration import Iteration as Iteration
    from cray_agents.iteration import LoopProgress as LoopProgress
    from cray_agents.loop.curriculum import Curriculum as Curriculum
    from cray_agents.loop.hazards import Hazards as Hazards
    from cray_agents.loop.live.schedule import Daily as Daily
    from cray_agents.loop.live.schedule import Live as Live
    from cray_agents.loop.loop import Loop as Loop
    from cray_agents.loop.loop import warm_up as warm_up
    from cray_agents.loop.methods import DPO as DPO
    from cray_agents.loop.methods import GRPO as GRPO
    from cray_agents.loop.methods import KTO as KTO
    from cray_agents.loop.methods import RFT as RFT
    from cray_agents.loop.methods import SFT as SFT
    from cray_agents.loop.methods import Distill as Distill
    from cray_agents.loop.methods import Examples as Examples
    from cray_agents.loop.methods import Instructions as Instructions
    from cray_agents.loop.methods import Training as Training
    from cray_agents.loop.settings import Data as Data
    from cray_agents.loop.settings import Sampling as Sampling
    from cray_agents.loop.stop_rules import Budget as Budget
    from cray_agents.loop.stop_rules import Stop as Stop
    from cray_agents.loop.warmup import WarmUp as WarmUp
    from cray_agents.promotion.figures import Pair as Pair
    from cray_agents.promotion.sequential_test import Decision as Decision
    from cray_agents.promotion.sequential_test import PromotionTest as PromotionTest
    from cray_agents.promotion.sequential_test import decide as decide

__getattr__, __all__ = lazy_names(__name__, __file__)
