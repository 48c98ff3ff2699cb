"""Recipe of an iteration's training set, and hyperparameters of its job. Called by loop.py.

queries.DatasetRecipe says how each method selects runs, training_jobs.Hyperparameters how it trains
on them.
"""

import math
from collections.abc import Mapping
from typing import Any

from cray_agents.loop.methods import Method, Scheduled
from cray_agents.loop.settings import Data, LoopSettings
from cray_agents.queries import DatasetRecipe
from cray_agents.training_jobs import Hyperparameters

EPOCHS = 3  # of a job whose steps are not given, as of a fine-tuning; 1 of GRPO and Distill
#: The least reward of a good run, unless the loop says.
GOOD_REWARD = {"rft": 1.0, "kto": 1.0, "examples": 1.0}


def min_reward_for(data: Data, method: Method) -> float | None:
    """The least reward of a good run; None: the method has no such bound, or any reward will do."""
    if method.name not in ("rft", "kto", "dpo", "examples"):
        return None
    return data.min_reward if data.min_reward is not None else GOOD_REWARD.get(method.name)


def iterations_in_window(loop: LoopSettings, scheduled: Scheduled, number: int) -> list[int]:
    """The iterations whose runs are considered for an iteration's training set.

    An iteration that may close before all its runs have ended is considered once more by the next
    one, for the late runs. A loop on live traffic trains on new runs alone, unless its history says
    more. Runs from before the prompt last changed are left out.
    """
    method, history = scheduled.method, _history(loop, scheduled.method)
    if not method.runs:
        return []
    earlier = [one for one in loop.schedule if not one.method.trains and one.first < number]
    start = max((one.last or 0 for one in earlier), default=0) + 1
    if history is None:
        return list(range(start, number + 1))
    late = 1 if loop.sampling.straggler_quantile < 1 else 0
    first = scheduled.first if method.on_policy else start  # not what another method has left over
    return list(range(max(first, number - history - late + 1), number + 1))


def max_uses_per_run(loop: LoopSettings, method: Method) -> int | None:
    """In how many training sets a run may be. A late run that was used is not used again."""
    history, most = _history(loop, method), loop.data.max_uses
    if loop.live is not None:
        return most or history
    if loop.sampling.straggler_quantile == 1 or history is None:
        return most
    return min(history, most or history)


def _history(loop: LoopSettings, method: Method) -> int | None:
    history = 1 if method.on_policy else loop.data.history
    return history or 1 if loop.live is not None else history


def recipe_of(
    loop: LoopSettings, scheduled: Scheduled, number: int, rewards: dict[str, float] | None
) -> DatasetRecipe:
    """The recipe of an iteration's training set; `rewards` override the recorded ones."""
    data, method = loop.data, scheduled.method
    given: dict[str, Any] = {}
    if method.trained_by == "sft" and loop.control is None:
        given = {
            "demonstrations": [messages for messages, _ in data.demonstrations],
            "demonstrations_metadata": [metadata for _, metadata in data.demonstrations],
            "tools": loop.agent.tool_schemas,
            "tokenizer": loop.agent.model,
        }
    if method.name == "grpo":
        given = {"discount": data.discount}
    return DatasetRecipe(
        method=method.trained_by,
        loop=loop.name,
        iterations=iterations_in_window(loop, scheduled, number),
        step=number,
        max_uses=max_uses_per_run(loop, method),
        min_reward=min_reward_for(data, method),
        balance_by=data.balance_by,
        balance_power=data.balance_power,
        rewards=None if method.name == "distill" else rewards,
        **given,
    )


def units_in(dataset: Mapping[str, Any]) -> int:
    """The number of samples in a dataset's summary, or of the pairs of dpo, as batches count."""
    samples: int = dataset["samples"]
    return math.ceil(samples / 2) if dataset["method"] == "dpo" else samples


def hyperparameters_of(
    method: Method, number: int, temperature: float, dataset: Mapping[str, Any]
) -> Hyperparameters:
    """The hyperparameters of an iteration's job.

    Each job has a seed of its own, else all would draw alike. `temperature`: that of the runs.
    `dataset`: the summary of its set, which the steps follow if they are not given.
    """
    training = method.training
    epochs = 1 if method.on_policy else EPOCHS
    steps = training.steps or math.ceil(epochs * units_in(dataset) / training.batch_size)
    return method.job(steps, training.seed + number, temperature)
