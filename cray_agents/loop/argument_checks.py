"""Checks of a loop's settings against each other, before anything runs. Called by loop.py.

Those of agent, rewards and keys are evaluation.py's, too.

The groups of settings check themselves: methods.py, settings.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cray_agents.agent.agent import Agent
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.errors import BadInput
from cray_agents.loop.hazards import Hazards
from cray_agents.loop.live.schedule import Live
from cray_agents.loop.methods import Instructions, PromptMethod, Scheduled
from cray_agents.loop.settings import Data, LoopSettings, Sampling
from cray_agents.loop.stop_rules import Stop
from cray_agents.loop.warmup import WarmUp
from cray_agents.loop.warmup import check as check_warm_up
from cray_agents.platform.client import Platform
from cray_agents.promotion.sequential_test import PromotionTest, choosing_tasks, deciding_tasks
from cray_agents.rewards.llm_judge import GroupJudge
from cray_agents.rewards.reward import check_names
from cray_agents.tasks.task_set import TaskSet
from cray_agents.training_jobs import FP8_NEEDS_CAP

KINDS: dict[str, tuple[type, ...]] = {
    "sampling": (Sampling,),
    "data": (Data,),
    "promotion": (PromotionTest,),
    "stop": (Stop,),
    "hazards": (Hazards, type(None)),
    "name": (str,),
    "warm_up": (WarmUp, type(None)),
    "live": (Live, type(None)),
    "platform": (Platform, type(None)),
}
CHOICES = {"changed": ("refuse", "accept"), "control": (None, "shuffled-rewards")}


def check_keywords(given: Sequence[str], known: Sequence[str]) -> None:
    """Refuse keywords that a Loop does not have. Raises BadInput."""
    for name in given:
        if name not in known:
            raise BadInput(f"a Loop has no {name}: give {', '.join(known)}", param=name)


def check_types(loop: Any) -> None:
    """Check the kinds of a loop's arguments. Raises BadInput."""
    agent, tasks = loop.agent, loop.tasks
    check_agent(agent, loop.rewards)
    if "@" in agent.model:
        name = agent.model.partition("@")[0]
        raise BadInput(
            f"the agent's model is {agent.model!r}, one version: a loop makes versions of a "
            f"name. Give the agent model={name!r}; to begin with that version, promote it",
            param="model",
        )
    if not isinstance(tasks, TaskSet):
        raise BadInput(
            f"tasks is a {type(tasks).__name__}: give a TaskSet, as in "
            "TaskSet.from_list(tasks, holdout=0.2)",
            param="tasks",
        )
    for name, kinds in KINDS.items():
        value = getattr(loop, name)
        if not isinstance(value, kinds):
            raise BadInput(f"{name}={value!r}: give a {kinds[0].__name__}", param=name)
    for name, values in CHOICES.items():
        value = getattr(loop, name)
        if not isinstance(value, str | None) or value not in values:
            choices = " or ".join(map(repr, values))
            raise BadInput(f"{name}={value!r}: give {choices}", param=name)
    if not callable(loop.on_progress):
        message = f"on_progress={loop.on_progress!r}: give a function"
        raise BadInput(message, param="on_progress")


def check_agent(agent: Any, rewards: Any) -> None:
    """Check the kinds of an agent and of the rewards of its runs. Raises BadInput."""
    if not isinstance(agent, Agent):
        raise BadInput(f"agent={agent!r}: give an Agent", param="agent")
    if not isinstance(rewards, Sequence) or isinstance(rewards, str):
        raise BadInput(f"rewards={rewards!r}: give a function or a list", param="rewards")
    for place, function in enumerate(rewards):
        if not callable(function):
            raise BadInput(f"rewards[{place}] is {function!r}: give a function", param="rewards")
    check_names(rewards)


def check(loop: LoopSettings) -> None:
    """Check a loop's settings. Raises BadInput for nonsense, and for what would have no effect."""
    methods = {one.method.name for one in loop.schedule}
    own = isinstance(loop.agent.environment, WorkerEnvironment)  # which gives rewards itself
    if not loop.rewards and not own and (loop.live is None or loop.tasks):
        raise BadInput("a loop needs at least one reward function", param="rewards")
    for split in ("train", "holdout"):
        if loop.live is None and not loop.tasks.split(split):
            raise BadInput(f"the task set has no {split} tasks", param="tasks")
    compares = any(isinstance(one, GroupJudge) for one in loop.rewards)
    if compares and (loop.live is not None or loop.sampling.straggler_quantile < 1):
        raise BadInput(
            "judge_group compares all attempts at a task: leave out live, and straggler_quantile",
            param="rewards",
        )
    if loop.live is not None:
        _check_live(loop, methods)
    _check_keys(loop)
    _check_choosing(loop)
    if loop.hazards is not None:
        if not loop.tasks.split("holdout"):
            problem = "hazards have no effect where a canary decides: give held-out tasks"
            raise BadInput(problem, param="hazards")
        if loop.agent.environment is not None:
            problem = "the agent's environment rewards runs, and so do hazards: leave one out"
            raise BadInput(problem, param="hazards")
        TaskSet([*loop.tasks, *loop.hazards.tasks])  # none of the prompts is trained on
    least, most = loop.promotion.low, loop.promotion.high
    target = loop.stop.target
    if target is not None and not least <= target <= most:
        raise BadInput(
            f"target={target!r}: no mean reward reaches it, for rewards are from {least:g} to "
            f"{most:g}; PromotionTest(high=...) says if they go further",
            param="target",
        )
    if loop.sampling.dynamic_sampling and not any(one.method.compares for one in loop.schedule):
        message = "dynamic_sampling has no effect without GRPO or DPO"
        raise BadInput(message, param="dynamic_sampling")
    _check_prompts(loop)
    if loop.data.history is not None and not methods & {"rft", "dpo", "kto"}:
        raise BadInput(f"history has no effect with {', '.join(methods)}", param="history")
    if "sft" in methods and not loop.data.demonstrations:
        raise BadInput("SFT trains on demonstrations: give some", param="demonstrations")
    if loop.control is not None:
        _check_control(loop, methods)
    for one in loop.schedule:
        if one.method.on_policy:
            _check_on_policy(loop, one)
    if loop.warm_up is not None:
        check_warm_up(loop)


def _check_prompts(loop: LoopSettings) -> None:
    """Refuse what no better prompt can be found for."""
    kinds = [one.method for one in loop.schedule if isinstance(one.method, PromptMethod)]
    for method in kinds:
        name = type(method).__name__
        if loop.live is not None:
            problem = f"{name} tries prompts by the loop's own runs: leave live out"
            raise BadInput(problem, param="method")
        if isinstance(loop.agent.environment, WorkerEnvironment):
            named = loop.agent.environment.name
            problem = f"{name}: the workers of {named!r} make the messages, and have no prompt"
            raise BadInput(f"{problem} that a loop could change", param="method")
        if loop.sampling.max_staleness:
            problem = f"{name}: leave max_staleness out: runs that begin early have no new prompt"
            raise BadInput(problem, param="max_staleness")
        if not isinstance(method, Instructions):
            continue
        if not isinstance(loop.agent.instructions, str):
            problem = "Instructions rewrites a text, and the agent's instructions are a function"
            raise BadInput(problem, param="method")
        if loop.control is not None:
            problem = "a control has no effect with Instructions, whose reflector reads all runs"
            raise BadInput(problem, param="control")
        if len(loop.tasks.split("train")) < 2:
            raise BadInput("Instructions needs two train tasks at least", param="tasks")


async def check_engine(platform: Platform, schedule: Sequence[Scheduled]) -> None:
    """Refuse replicas whose rounding no limit is known for, before the first run: BadInput."""
    engine = (await platform.info()).get("engine", {})
    flag = engine.get("quantized")
    corrected = [one.method for one in schedule if one.method.on_policy]
    caps = [getattr(method, "importance_cap", None) for method in corrected]
    if engine.get("rounding") == "fp8" and None in caps:
        raise BadInput(FP8_NEEDS_CAP, param="importance_cap")
    trained = [one for one in schedule if one.method.trains]
    open_ones = [one for one in trained if one.method.training.logprob_limit is None]
    if flag and any(one.method.name != "sft" for one in open_ones):
        raise BadInput(
            f"the replicas quantise (engine_args: {flag}): their log-probabilities differ from the"
            " trainer's by more than rounding, and no limit is known. Start the platform without"
            " that, or say how much is allowed, as in Training(logprob_limit=0.5)",
            param="logprob_limit",
        )


def _check_keys(loop: LoopSettings) -> None:
    """Refuse keys of metadata that no task has: they would group nothing."""
    of_tasks = [task.metadata for task in loop.tasks]
    of_demonstrations = [metadata for _, metadata in loop.data.demonstrations]
    for name, key, metadata in (
        ("balance_by", loop.data.balance_by, [*of_tasks, *of_demonstrations]),
        ("curriculum.key", loop.data.curriculum.key, of_tasks),
        ("promotion.guard", loop.promotion.guard, of_tasks),
    ):
        check_key(name, key, metadata)


def check_key(name: str, key: str | None, metadata: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a key, given as `name`, that none of the metadata has. Raises BadInput."""
    known = {key for one in metadata for key in one}
    if key is not None and metadata and key not in known:
        have = ", ".join(sorted(map(repr, known))) or "none at all"
        raise BadInput(
            f"{name}={key!r}: no task has that in its metadata; there is {have}",
            param=name.partition(".")[0],
        )


def _check_choosing(loop: LoopSettings) -> None:
    """Refuse a choice among a job's versions that cannot be made."""
    share, held_out = loop.promotion.choosing, loop.tasks.split("holdout")
    if not share:
        return
    if all(one.method.training.publish_every is None for one in loop.schedule):
        raise BadInput(
            f"choosing={share:g} has no effect, as the jobs publish their result alone: give a "
            "method training=Training(publish_every=50)",
            param="choosing",
        )
    for what, chosen in (("choose", choosing_tasks), ("decide", deciding_tasks)):
        if not chosen(held_out, loop.promotion):
            raise BadInput(
                f"choosing={share:g}: none of {len(held_out)} held-out tasks is left to {what}: "
                "give more of them, or another share",
                param="choosing",
            )


def _check_control(loop: LoopSettings, methods: set[str]) -> None:
    if loop.sampling.straggler_quantile < 1:
        raise BadInput(
            "a control needs all runs of an iteration: straggler_quantile=1",
            param="straggler_quantile",
        )
    if "sft" in methods or methods == {"distill"}:
        unused = min(methods & {"distill", "sft"})
        message = f"a control has no effect with {unused}, which uses no rewards"
        raise BadInput(message, param="control")


def _check_live(loop: LoopSettings, methods: set[str]) -> None:
    """Refuse settings of a loop's own runs: a loop on live traffic has none."""
    for name in ("max_staleness", "straggler_quantile", "dynamic_sampling"):
        if getattr(loop.sampling, name) != Sampling.model_fields[name].default:
            raise BadInput(f"{name} has no effect on live traffic", param=name)
    if loop.control is not None:
        raise BadInput("control has no effect on live traffic", param="control")
    if "sft" in methods:
        raise BadInput(
            "SFT learns from demonstrations alone: take RFT on live traffic, and give them to it",
            param="method",
        )
    if "distill" in methods:
        raise BadInput("Distill learns from the loop's own runs: leave live out", param="method")


def _check_on_policy(loop: LoopSettings, one: Scheduled) -> None:
    if loop.sampling.temperature <= 0:
        uses = "GRPO compares them" if one.method.compares else "Distill learns from draws"
        raise BadInput(
            f"temperature={loop.sampling.temperature!r}: greedy runs at a task are all the same, "
            f"and {uses}: give 1.0",
            param="temperature",
        )
    if loop.sampling.max_staleness and getattr(one.method, "importance_cap", None) is None:
        raise BadInput(
            f"max_staleness={loop.sampling.max_staleness} trains on what older versions sampled: "
            "importance_cap, which corrects that, must not be None",
            param="max_staleness",
        )
