"""Plain model: transformers and torch alone on a parent, one sequence after the other.

What the transformers backend is compared with: losses of SFT by AdamW, and gradients of dpo and
grpo by their formulas. float32, eager attention, nothing packed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, logsigmoid

from cray_agents.trainers.data.packer import step_units
from cray_agents.training_jobs import Hyperparameters

Row = Sequence[int]
Gradients = dict[str, torch.Tensor]


def plain_network(parent: Path) -> Any:
    """Transformers' own network of a parent, with all parts, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    config = AutoConfig.from_pretrained(parent)
    known = type(config) in AutoModelForCausalLM._model_mapping
    text = known and config.get_text_config() is config
    auto = AutoModelForCausalLM if text else AutoModelForMultimodalLM
    network = auto.from_pretrained(parent, dtype=torch.float32, attn_implementation="eager")
    return network.eval()


def logprobs_of(network: Any, row: Row) -> torch.Tensor:
    """[len(row) - 1]: of each token after the first."""
    ids = torch.tensor(row)
    logits = network(ids[None, :-1], use_cache=False).logits[0].float()
    return -cross_entropy(logits, ids[1:], reduction="none")


def plain_losses(
    parent: Path,
    rows: Sequence[Row],
    hyper: Hyperparameters,
    noise: int | None = None,
    units: Sequence[Sequence[int]] | None = None,
) -> list[float]:
    """The losses of SFT; `noise` seeds relative changes of 1e-7 of the first weights.

    `units`: the rows that a step takes together, else each alone.
    """
    units = [[i] for i in range(len(rows))] if units is None else units
    network = plain_network(parent)
    named = dict(network.named_parameters())
    if noise is not None:
        random = torch.Generator().manual_seed(noise)
        with torch.no_grad():
            for parameter in named.values():
                parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=random))
    small = {n for n, p in named.items() if p.ndim == 1 or n.endswith(".bias")}
    groups = [
        {"params": [p for n, p in named.items() if (n in small) == still], "weight_decay": decay}
        for still, decay in ((True, 0.0), (False, hyper.weight_decay))
    ]
    betas = (hyper.adam_beta1, hyper.adam_beta2)
    adam = torch.optim.AdamW(groups, lr=hyper.learning_rate, betas=betas, eps=hyper.adam_eps)
    losses = []
    for step in range(hyper.steps):
        taken = step_units(hyper, step, np.ones(len(units)))
        chosen = [rows[place] for unit in taken for place in units[unit]]
        adam.zero_grad()
        total, count = 0.0, sum(len(row) - 1 for row in chosen)
        for row in chosen:
            loss = -logprobs_of(network, row).sum() / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(list(named.values()), hyper.clip_grad)
        adam.step()
        losses.append(total)
    return losses


def gradients_of(network: Any, loss: torch.Tensor) -> Gradients:
    """The gradient of a loss by parameter, without those that it does not reach."""
    network.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in network.named_parameters() if p.grad is not None}


def dpo_loss(
    network: Any, pairs: Sequence[tuple[Row, Row]], marked: slice, references: Any, beta: float
) -> torch.Tensor:
    """arXiv 2305.18290, equation 7. `references`: [tokens] of each row, in the pairs' order."""
    losses, given = [], iter(references)
    for pair in pairs:
        better, worse = (
            beta * (logprobs_of(network, row)[marked] - torch.tensor(next(given))).sum()
            for row in pair
        )
        losses.append(-logsigmoid(better - worse))
    return torch.stack(losses).mean()


def grpo_loss(
    network: Any,
    rows: Sequence[Row],
    marked: slice,
    before: Any,
    sampled: Any,
    advantages: Sequence[float],
    hyper: Hyperparameters,
) -> torch.Tensor:
    """PPO's clipped ratio, weighted by the capped ratio to the engine; the mean over tokens."""
    policy, values = hyper.policy, []
    for row, old, engine, advantage in zip(rows, before, sampled, advantages, strict=True):
        now, old, engine = (
            logprobs_of(network, row)[marked],
            torch.tensor(old),
            torch.tensor(engine),
        )
        ratio = (now - old).exp()
        bounded = ratio.clamp(1 - policy.clip_low, 1 + policy.clip_high)
        gain = torch.minimum(ratio * advantage, bounded * advantage)
        importance = torch.tensor(old - engine).exp().clamp(max=policy.importance_cap)
        values.append(-gain * importance)
    return torch.cat(values).mean()
