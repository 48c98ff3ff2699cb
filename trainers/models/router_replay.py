"""Router replay: train each token of a mixture through the experts that the engine sent it to.

Trainer and engine round differently, and a router near a tie then chooses other experts: a large
difference in log-probability for a reason that no importance weight corrects. R3 (arXiv 2510.11370)
therefore records the engine's choice with the tokens, and replays it in training. The weights of
the chosen experts are still the trainer's router's, which so learns on. training/train_step.py
calls `replay` before each forward pass; job/job_inputs.py refuses what cannot be replayed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cray_agents.trainers.data.samples import Ints
from cray_agents.trainers.models.attention import send

TopK = tuple[torch.Tensor, torch.Tensor]


class EngineRoutes:
    """The engine's choices for one router; it stands for Megatron-core's own RouterReplay.

    `experts`: [tokens, experts of a token]; -1: the router chooses itself.
    """

    def __init__(self, experts: torch.Tensor) -> None:
        self.experts = experts

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., TopK],
    ) -> TopK:
        """Return the scores and the numbers of the chosen experts, both [tokens, topk]."""
        _, own = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = torch.where(self.experts >= 0, self.experts, own)
        return scores.gather(1, chosen), chosen


def replay(chunk: Any, routes: Ints | None, part: int, parts: int) -> None:
    """Let a chunk's routers choose as the engine did; None: as they would.

    `routes`: [tokens, layers * experts of a token]. Under sequence parallelism a router gets the
    `part`-th of `parts` equal pieces of the tokens.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    for router in (each for each in chunk.modules() if isinstance(each, TopKRouter)):
        if routes is None:
            router.router_replay = None
            continue
        router.config.moe_router_fusion = False  # the fused router asks nobody
        tokens, top = len(routes) // parts, router.topk
        first = (router.layer_number - 1) * top
        own = routes[part * tokens : (part + 1) * tokens, first : first + top]
        experts = send(np.ascontiguousarray(own, np.int64), next(router.parameters()).device)
        router.router_replay = EngineRoutes(experts)
