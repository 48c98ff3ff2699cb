"""`runs reward` and `runs rescore`: rewards for stored runs, by a person or by a function."""

import asyncio
import inspect
import math
import types
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cray_agents.cli.options import given
from cray_agents.cli.runs import RunId, chunks, commands
from cray_agents.cli.screen import make_store, print_json, say, settings
from cray_agents.cli.user_files import find_function
from cray_agents.cli.where import WhereOption, parse_where
from cray_agents.errors import BadInput
from cray_agents.queries import RunQuery
from cray_agents.records import Reward

if TYPE_CHECKING:
    from cray_agents.config import Config
    from cray_agents.records import Reward, Run
    from cray_agents.rewards.reward import RewardFunction
    from cray_agents.runtime.store import Store
    from cray_agents.runtime.store.feedback import Feedback

SHOWN_FAILURES = 3


# otherwise typer takes a negative value for an option
@commands.command("reward", context_settings={"ignore_unknown_options": True})
def reward(
    run_id: RunId,
    value: Annotated[float, typer.Argument(help="The reward: a number, which may be negative.")],
    name: Annotated[str, typer.Option(help="The name of what is judged.")] = "feedback",
    who: Annotated[str, typer.Option(help="The source of the judgement.")] = "human",
    turn: Annotated[
        int | None,
        typer.Option(min=1, help="The turn that is judged, as `runs show` counts them."),
    ] = None,
    comment: Annotated[str | None, typer.Option(help="The reason, in words.")] = None,
) -> None:
    """Reward a run. A later reward of the same name, source and turn replaces it."""
    from cray_agents.runtime.store.feedback import Feedback

    if not math.isfinite(value):
        raise BadInput(f"{value} is no reward: give a finite number", param="value")
    if not (name and who):
        raise BadInput("--name and --who must not be empty", param="who" if name else "name")
    place = None if turn is None else turn - 1
    feedback = Feedback(value=value, name=name, source=who, turn=place, comment=comment)
    recorded = asyncio.run(_give(settings(), run_id, feedback))
    if given().json:
        print_json(recorded)
        return
    target = "" if turn is None else f" for turn {turn}"
    say(f"{run_id}: {name} = {value:g}{target}, by {who}")


async def _give(config: "Config", run_id: str, feedback: "Feedback") -> "Reward":
    from cray_agents.runtime.store.feedback import check_feedback, check_rewards, give_feedback

    check_rewards([Reward(**feedback.model_dump())], config.reward_limit)
    store = make_store(config)
    try:
        check_feedback(store, run_id, feedback)
        return await give_feedback(store, run_id, feedback)
    finally:
        await store.close()


@commands.command("rescore")
def rescore(
    function: Annotated[
        str,
        typer.Option(
            "--reward",
            help="The reward function: FILE.py:NAME, or MODULE:NAME of what is installed.",
        ),
    ],
    terms: WhereOption = None,
    source: Annotated[
        str,
        typer.Option(help="The source of the new rewards; `function` replaces the loop's own."),
    ] = "rescore",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compare the rewards, and record none.")
    ] = False,
) -> None:
    """Compute a reward of stored runs again, and record it beside the rewards that they have.

    All rewards of a run count in its sum; one of the same name, source and turn replaces the
    earlier one. Only a function that depends on nothing but the run can do this.
    """
    scorer = stateless_function(function)
    query = RunQuery(**parse_where(terms).model_dump(), order="id")
    config = settings()
    counts = asyncio.run(_rescore(make_store(config), query, scorer, source, dry_run, config))
    if given().json:
        print_json(counts)
        return
    recorded = "would be recorded" if dry_run else "were recorded"
    say(
        f"{counts['scored']} of {counts['runs']} runs scored: {counts['changed']} rewards"
        f" {recorded}, {counts['same']} are as they were"
    )
    if counts["scored"]:
        before, after = counts["mean_before"], counts["mean_after"]
        was = "none before" if before is None else f"{before:.4g} before"
        say(f"  mean of {counts['name']}: {after:.4g}, {was}")
    for name in ("redacted", "infrastructure"):
        if counts[name]:
            say(f"  {counts[name]} runs left out: {name}")
    for failure in counts["failures"][:SHOWN_FAILURES]:
        say(f"  failed: {failure}")
    if counts["failed"]:
        say(f"  {counts['failed']} runs without a new reward")


def stateless_function(target: str) -> "RewardFunction":
    """Return the reward function that FILE.py:NAME or MODULE:NAME names.

    Raises BadInput for none, and for one that has state besides the run: a method, an object such
    as LLMJudge, a closure, a function of more than a run.
    """
    name = target.rpartition(":")[2]
    function = find_function(target, "reward")
    if not isinstance(function, types.FunctionType):
        kind = type(function).__name__
        raise BadInput(
            f"{name} is no plain function but a {kind}: it may have state beside the run",
            param="reward",
        )
    if function.__closure__:
        raise BadInput(
            f"{name} was made within another function and keeps its variables: rescoring takes"
            " functions that depend on the run alone",
            param="reward",
        )
    required = [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if len(required) != 1:
        raise BadInput(
            f"{name}({', '.join(required)}) does not take a run alone: what else it needs was not"
            " stored",
            param="reward",
        )
    return function


async def _rescore(
    store: "Store",
    query: RunQuery,
    function: "RewardFunction",
    source: str,
    dry_run: bool,
    config: "Config",
) -> dict[str, Any]:
    """Score the runs, record what changed, close the store, and return the counts."""
    report: dict[str, Any] = dict.fromkeys(
        ("runs", "scored", "changed", "same", "failed", "redacted", "infrastructure"), 0
    )
    report |= {"name": "", "failures": [], "mean_before": None, "mean_after": None}
    sums = {"before": [0.0, 0], "after": [0.0, 0]}
    try:
        for some in chunks(store.stream(query)):
            scored = await asyncio.gather(*(_score(run, function, source) for run in some))
            for run, (outcome, rewards) in zip(some, scored, strict=True):
                report["runs"] += 1
                if outcome:
                    report[outcome if outcome in report else "failed"] += 1
                    if outcome not in report:
                        report["failures"].append(f"{run.id}: {outcome}")
                    continue
                report["scored"] += 1
                await _take(store, run, rewards, report, sums, dry_run, config)
    finally:
        await store.close()
    for when, (total, count) in sums.items():
        report[f"mean_{when}"] = total / count if count else None
    return report


async def _take(
    store: "Store",
    run: "Run",
    rewards: "list[Reward]",
    report: dict[str, Any],
    sums: dict[str, list[Any]],
    dry_run: bool,
    config: "Config",
) -> None:
    """Count the new rewards of a run, and record those that differ."""
    from cray_agents.runtime.store.feedback import check_rewards, reward_event

    check_rewards(rewards, config.reward_limit, "--reward")
    known = {(r.name, r.source, r.turn): r.value for r in run.rewards}
    events = []
    for reward in rewards:
        report["name"] = reward.name
        if known.get((reward.name, reward.source, reward.turn)) == reward.value:
            report["same"] += 1
            continue
        report["changed"] += 1
        events.append(reward_event(run.id, reward))
    before = [r.value for r in run.rewards if r.name == report["name"]]
    for when, values in (("before", before), ("after", [r.value for r in rewards])):
        if values:
            sums[when][0] += sum(values)
            sums[when][1] += 1
    if events and not dry_run:
        await store.append(events, new=True)


async def _score(run: "Run", function: "RewardFunction", source: str) -> "tuple[str, list[Reward]]":
    """Return ("", the new rewards) of a run, or why it has none."""
    from cray_agents.rewards.reward import needs_scoring, score

    if run.redacted:
        return "redacted", []
    if run.error is not None and run.error.infrastructure and not needs_scoring(run):
        return "infrastructure", []
    rewards, error = await score(run.model_copy(update={"rewards": [], "error": None}), [function])
    if error is not None:
        return error.message, []
    return "", [reward.model_copy(update={"source": source}) for reward in rewards]
