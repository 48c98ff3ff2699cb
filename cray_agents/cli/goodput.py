"""`goodput`: who held the nodes and GPUs of a root, and what came of it.

Reads the ledger on the shared root; no platform is needed. Read next: runtime/scaling/goodput.py.
"""

import re
import time
from typing import Annotated, get_args

import typer

from cray_agents.cli.screen import HomeOption, JsonOption, root, show
from cray_agents.errors import BadInput

COLUMNS = [
    "name",
    "held_hours",
    "goodput",
    "useful_hours",
    "idle_hours",
    "asleep_hours",
    "lost_hours",
    "other_hours",
    "tokens_served",
    "tokens_trained",
    "steps",
    "steps_lost",
]
UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(goodput)


def goodput(
    since: Annotated[
        str | None, typer.Option(help="Only the last 30m, 12h or 7d \\[default: all].")
    ] = None,
    by: Annotated[str, typer.Option(help="kind, holder or node.")] = "kind",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what came of the hours that replicas and jobs held GPUs, or nodes without any."""
    from cray_agents.runtime.scaling.goodput import GroupedBy
    from cray_agents.runtime.scaling.goodput import goodput as add_up

    groups: dict[str, GroupedBy] = {name: name for name in get_args(GroupedBy)}
    if by not in groups:
        raise BadInput(f"--by {by!r}: give {', '.join(groups)}", param="by")
    begin = 0.0 if since is None else time.time() - seconds_of(since)
    show(add_up(root(home), begin, by=groups[by]), COLUMNS, as_json=as_json)


def seconds_of(text: str, option: str = "--since") -> float:
    """Return the seconds of a time such as 30m, 12h or 7d. Raises BadInput."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhd])", text)
    if match is None:
        raise BadInput(f"{option} {text!r}: give a time such as 30m, 12h or 7d", param=option[2:])
    return float(match[1]) * UNITS[match[2]]
