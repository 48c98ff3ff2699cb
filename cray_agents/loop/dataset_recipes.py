"""What a generation trains on and how: its dataset's recipe, its job's hyperparameters.

Called by loop.py. What the methods make of runs is in recipes.DatasetRecipe, and what they do with
it in training.Hyperparameters.
"""

from typing import TYPE_CHECKING, Any

from cray_agents.loop.stages import TRAINED_BY, Planned
from cray_agents.queries import DatasetRecipe
from cray_agents.training_jobs import Hyperparameters

if TYPE_CHECKING:
    from cray_agents.loop.loop import Loop

ENOUGH = {"rft": 1.0, "kto": 1.0}  # from which reward on a run is good, unless the loop says


def least_reward(loop: "Loop", stage: Planned) -> float | None:
    """From which reward on a run is good; None: the method has no such thing, or any will do."""
    if stage.method not in ("rft", "kto", "dpo"):
        return None
    return loop.min_reward if loop.min_reward is not None else ENOUGH.get(stage.method)


def window(loop: "Loop", stage: Planned, number: int) -> list[int]:
    """The generations whose runs are considered for a generation's training set.

    Where a generation may close before all of its runs have ended, the one before it is looked
    through once more for what came late. A loop that watches trains on what is new, unless its
    history says more.
    """
    history = 1 if stage.method == "grpo" else loop.history
    if loop.watch is not None:
        history = history or 1
    if not stage.runs:
        return []
    if history is None:
        return list(range(1, number + 1))
    late = 1 if loop.close_at < 1 else 0
    first = stage.first if stage.method == "grpo" else 1  # not what another method has left over
    return list(range(max(first, number - history - late + 1), number + 1))


def uses(loop: "Loop", stage: Planned) -> int | None:
    """In how many training sets a run may be: what is looked through again is not used again."""
    history = 1 if stage.method == "grpo" else loop.history
    if loop.watch is not None:
        return loop.max_uses or history or 1
    if loop.close_at == 1 or history is None:
        return loop.max_uses
    return min(history, loop.max_uses or history)


def recipe_of(
    loop: "Loop", stage: Planned, number: int, rewards: dict[str, float] | None
) -> DatasetRecipe:
    """The recipe of a generation's training set; `rewards` override the recorded ones."""
    given: dict[str, Any] = {}
    if stage.method in ("rft", "sft"):
        given = {
            "demonstrations": [messages for messages, _ in loop.demonstrations],
            "demonstrations_metadata": [metadata for _, metadata in loop.demonstrations],
            "tools": loop.agent.tool_schemas,
            "tokenizer": loop.agent.model,
        }
    if stage.method == "grpo":
        given = {"discount": loop.discount}
    return DatasetRecipe(
        method=TRAINED_BY[stage.method],
        loop=loop.name,
        generations=window(loop, stage, number),
        step=number,
        max_uses=uses(loop, stage),
        min_reward=least_reward(loop, stage),
        balance_by=loop.balance_by,
        balance_power=loop.balance_power,
        rewards=rewards,
        **given,
    )


def hyperparameters_of(loop: "Loop", stage: Planned, number: int) -> Hyperparameters:
    """The job's: a seed of its own, else all jobs draw alike; grpo knows how it was sampled."""
    hyper = stage.hyperparameters
    changes: dict[str, Any] = {"seed": hyper.seed + number}
    if stage.method == "grpo":
        changes["policy"] = hyper.policy.model_copy(update={"temperature": loop.temperature})
    return hyper.model_copy(update=changes)
