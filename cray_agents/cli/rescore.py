"""`runs rescore`: rewards of stored runs by a changed reward function, beside those they have."""

import asyncio
import importlib
import inspect
import json
import sys
import types
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cray_agents.cli.filter_options import FilterOptions
from cray_agents.cli.option_groups import expand_groups
from cray_agents.cli.root_access import open_root
from cray_agents.cli.runs import runs
from cray_agents.cli.screen import HomeOption, JsonOption, console
from cray_agents.config import load_config
from cray_agents.errors import BadInput
from cray_agents.queries import RunQuery

if TYPE_CHECKING:
    from cray_agents.config import Config
    from cray_agents.records import Reward, Run
    from cray_agents.rewards.reward import RewardFunction
    from cray_agents.runtime.store import Store

TOGETHER = 64  # runs that are scored at once
SHOWN_FAILURES = 3


def add_to(app: typer.Typer) -> None:
    """Register the command, in the group `runs`."""
    runs.command("rescore")(rescore)


@expand_groups
def rescore(
    reward: Annotated[
        str, typer.Option(help="The function: FILE.py:NAME, or MODULE:NAME of what is installed.")
    ],
    home: HomeOption = None,
    *,
    filters: FilterOptions,
    source: Annotated[
        str, typer.Option(help="The source of the new rewards; `function` replaces the loop's own.")
    ] = "rescore",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compare the rewards only, record none.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compute a reward of stored runs again, and record it beside the rewards that they have.

    All rewards of a run count in its sum; one of the same name, source and turn replaces the
    earlier one. Only a function that depends on nothing but the run can do this.
    """
    from cray_agents.runtime.store import Store
    from cray_agents.runtime.store.redaction import Redactor

    function = stateless_function(reward)
    wanted = filters.run_filter()
    config = load_config({"home": home})
    store = Store(open_root(config), redactor=Redactor.of(config))
    query = RunQuery(**wanted.model_dump(), order="id")
    report = asyncio.run(_rescore(store, query, function, source, dry_run, config))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    recorded = "would be recorded" if dry_run else "were recorded"
    console.print(
        f"{report['scored']} of {report['runs']} runs scored: {report['changed']} rewards"
        f" {recorded}, {report['same']} are as they were",
        markup=False,
    )
    if report["scored"]:
        before, after = report["mean_before"], report["mean_after"]
        was = "none before" if before is None else f"{before:.4g} before"
        console.print(f"  mean of {report['name']}: {after:.4g}, {was}", markup=False)
    for name in ("redacted", "infrastructure"):
        if report[name]:
            console.print(f"  {report[name]} runs left out: {name}", markup=False)
    for failure in report["failures"][:SHOWN_FAILURES]:
        console.print(f"  failed: {failure}", markup=False)
    if report["failed"]:
        console.print(f"  {report['failed']} runs without a new reward", markup=False)


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


def find_function(target: str, param: str) -> Any:
    """Return what FILE.py:NAME or MODULE:NAME names, given as `param`. Raises BadInput."""
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise BadInput(f"{param} {target!r}: name it as FILE.py:NAME or MODULE:NAME", param=param)
    function = getattr(_module(place, param), name, None)
    if function is None:
        raise BadInput(f"{place} has no {name!r}", param=param)
    return function


def _module(place: str, param: str) -> types.ModuleType:
    if place.endswith(".py"):
        from cray_agents.cli.agents import load

        return load(Path(place))
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise BadInput(f"{param}: no module {error.name!r}", param=param) from error


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
        for some in _chunks(store.stream(query)):
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
    from cray_agents.records import Event, new_id
    from cray_agents.runtime.store.feedback import check_rewards

    check_rewards(rewards, config.reward_limit, "--reward")
    known = {(r.name, r.source, r.turn): r.value for r in run.rewards}
    events = []
    for reward in rewards:
        report["name"] = reward.name
        if known.get((reward.name, reward.source, reward.turn)) == reward.value:
            report["same"] += 1
            continue
        report["changed"] += 1
        body = reward.model_dump(mode="json")
        name = new_id("reward")
        events.append(Event(id=name, run_id=run.id, kind="reward", body=body, time=reward.time))
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


def _chunks(stored: "Iterator[Run]") -> "Iterator[Sequence[Run]]":
    while some := list(islice(stored, TOGETHER)):
        yield some
