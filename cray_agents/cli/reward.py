"""`runs reward`: a person's reward for an ended run, with or without a platform."""

import asyncio
import math
from typing import TYPE_CHECKING, Annotated

import typer

from cray_agents.cli.root_access import open_root
from cray_agents.cli.runs import RunId, runs
from cray_agents.cli.screen import HomeOption, JsonOption, console
from cray_agents.config import load_config
from cray_agents.errors import BadInput

if TYPE_CHECKING:
    from cray_agents.config import Config
    from cray_agents.records import Reward
    from cray_agents.runtime.store.feedback import Feedback


def add_to(app: typer.Typer) -> None:
    """Register the command, in the group `runs`."""
    # otherwise typer takes a negative value for an option
    runs.command("reward", context_settings={"ignore_unknown_options": True})(reward)


def reward(
    run_id: RunId,
    value: Annotated[float, typer.Argument(help="A number; negative ones too.")],
    name: Annotated[str, typer.Option(help="What is judged.")] = "feedback",
    who: Annotated[str, typer.Option(help="Whose judgement it is.")] = "human",
    turn: Annotated[
        int | None, typer.Option(min=1, help="Only this turn's, as `runs show` counts them.")
    ] = None,
    comment: Annotated[str | None, typer.Option(help="Why.")] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reward a run. A later reward of the same name and giver replaces it."""
    from cray_agents.runtime.store.feedback import Feedback

    if not math.isfinite(value):
        raise BadInput(f"{value} is no reward: give a finite number", param="value")
    if not (name and who):
        raise BadInput("--name and --who must not be empty", param="who" if name else "name")
    place = None if turn is None else turn - 1
    given = Feedback(value=value, name=name, source=who, turn=place, comment=comment)
    reward = asyncio.run(_give(load_config({"home": home}), run_id, given))
    if as_json:
        print(reward.model_dump_json(indent=2))
        return
    target = "" if turn is None else f" for turn {turn}"
    console.print(f"{run_id}: {name} = {value:g}{target}, by {who}", highlight=False, markup=False)


async def _give(config: "Config", run_id: str, given: "Feedback") -> "Reward":
    from cray_agents.records import Reward
    from cray_agents.runtime.store import Store
    from cray_agents.runtime.store.feedback import check_feedback, check_rewards, give_feedback
    from cray_agents.runtime.store.redaction import Redactor

    check_rewards([Reward(**given.model_dump())], config.reward_limit)
    store = Store(open_root(config), redactor=Redactor.of(config))
    try:
        check_feedback(store, run_id, given)
        return await give_feedback(store, run_id, given)
    finally:
        await store.close()
