"""Recipe of a generation's training set, and hyperparameters of its job. Called by loop.py.

queries.DatasetRecipe says how each method selects runs, training_jobs.Hyperparameters how it trains
on them.
"""

import math
from collections.abc import Mapping
from typing import Any

from cray_agents.loop.settings import Asynchrony, LoopSettings, TrainingData
from cray_agents.loop.stages import TRAINED_BY, Planned
from cray_agents.queries import DatasetRecipe
from cray_agents.training_jobs import ON_POLICY, Hyperparameters

EPOCHS = 3  # of a job whose steps are not given, as of a fine-tuning; 1 of grpo and distill
GOOD_REWARD = {"rft": 1.0, "kto": 1.0}  # the least reward of a good run, unless the loop says


def min_reward_for(data: TrainingData, stage: Planned) -> float | None:
    """The least reward of a good run; None: the method has no such bound, or any reward will do."""
    if stage.method not in ("rft", "kto", "dpo"):
        return None
    return data.min_reward if data.min_reward is not None else GOOD_REWARD.get(stage.method)


def generations_in_window(
    data: TrainingData, asynchrony: Asynchrony, stage: Planned, number: int, *, live: bool
) -> list[int]:
    """The generations whose runs are considered for a generation's training set.

    A generation that may close before all its runs have ended is considered once more by the next
    one, for the late runs. A loop on live traffic trains on new runs alone, unless its history says
    more.
    """
    history = 1 if stage.method in ON_POLICY else data.history
    if live:
        history = history or 1
    if not stage.runs:
        return []
    if history is None:
        return list(range(1, number + 1))
    late = 1 if asynchrony.close_at < 1 else 0
    first = stage.first if stage.method in ON_POLICY else 1  # not what another method has left over
    return list(range(max(first, number - history - late + 1), number + 1))


def max_uses_per_run(
    data: TrainingData, asynchrony: Asynchrony, stage: Planned, *, live: bool
) -> int | None:
    """In how many training sets a run may be. A late run that was used is not used again."""
    history = 1 if stage.method in ON_POLICY else data.history
    if live:
        return data.max_uses or history or 1
    if asynchrony.close_at == 1 or history is None:
        return data.max_uses
    return min(history, data.max_uses or history)


def recipe_of(
    loop: LoopSettings, stage: Planned, number: int, rewards: dict[str, float] | None
) -> DatasetRecipe:
    """The recipe of a generation's training set; `rewards` override the recorded ones."""
    data, live = loop.data, loop.live
    given: dict[str, Any] = {}
    if stage.method in ("rft", "sft") and loop.sampling.control is None:
        given = {
            "demonstrations": [messages for messages, _ in data.demonstrations],
            "demonstrations_metadata": [metadata for _, metadata in data.demonstrations],
            "tools": loop.agent.tool_schemas,
            "tokenizer": loop.agent.model,
        }
    if stage.method == "grpo":
        given = {"discount": data.discount}
    return DatasetRecipe(
        method=TRAINED_BY[stage.method],
        loop=loop.name,
        generations=generations_in_window(data, loop.asynchrony, stage, number, live=live),
        step=number,
        max_uses=max_uses_per_run(data, loop.asynchrony, stage, live=live),
        min_reward=min_reward_for(data, stage),
        balance_by=data.balance_by,
        balance_power=data.balance_power,
        rewards=None if stage.method == "distill" else rewards,
        **given,
    )


def units_in(dataset: Mapping[str, Any]) -> int:
    """The number of samples in a dataset's summary, or of the pairs of dpo, as batches count."""
    samples: int = dataset["samples"]
    return math.ceil(samples / 2) if dataset["method"] == "dpo" else samples


def hyperparameters_of(
    stage: Planned, number: int, temperature: float, dataset: Mapping[str, Any]
) -> Hyperparameters:
    """The hyperparameters of a generation's job.

    Each job has a seed of its own, else all would draw alike. `temperature`: the runs of grpo and
    distill were sampled at it. `dataset`: the summary of its set, which the steps follow if they
    are not given.
    """
    hyper = stage.hyperparameters
    changes: dict[str, Any] = {"seed": hyper.seed + number}
    if "steps" not in hyper.model_fields_set:
        epochs = 1 if stage.method in ON_POLICY else EPOCHS
        changes["steps"] = math.ceil(epochs * units_in(dataset) / hyper.batch_size)
    if stage.method in ON_POLICY:
        changes["policy"] = hyper.policy.model_copy(update={"temperature": temperature})
    return hyper.model_copy(update=changes)
