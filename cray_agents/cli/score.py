"""`runs score`: the tokens of a turn under another version, scored by an engine of a platform."""

import json
from typing import Annotated, Any

import typer

from cray_agents.cli.runs import RunId, runs
from cray_agents.cli.screen import (
    HomeOption,
    JsonOption,
    UrlOption,
    console,
    errors,
    one_line,
    show,
)
from cray_agents.platform.client import Platform
from cray_agents.server.platform_process import ask_once, platform_at


def add_to(app: typer.Typer) -> None:
    """Register the command, in the group `runs`."""
    runs.command("score")(score)


def score(
    run_id: RunId,
    model: Annotated[str, typer.Argument(help="A version, as support@3; a name: what it means.")],
    turn: Annotated[int, typer.Option(min=1, help="As `runs show` counts them.")] = 1,
    home: HomeOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how likely a turn's sampled tokens are under another version.

    If no replica holds that version, one loads it first: a spare one, where the platform has any.
    """

    async def ask(platform: Platform) -> tuple[dict[str, Any], list[str]]:
        replicas = await platform.pool(spares=True)
        if "@" in model and not any(model in replica["versions"] for replica in replicas):
            errors.print(f"a replica loads {model} first, and keeps it as long as it is asked for")
        scored = await platform.views.score(run_id, turn - 1, model)
        tokens = await platform.views.tokens(run_id, turn - 1, prompt=False)
        return scored, tokens["texts"]

    scored, tokens = ask_once(platform_at(home, url), ask)
    if as_json:
        print(json.dumps(scored, indent=2))
        return
    rows = [
        {
            "token": place,
            "text": repr(one_line(text) if text.strip() else text),
            scored["sampled_by"]: recorded,
            scored["model"]: logprob,
            "difference": None if None in (logprob, recorded) else logprob - recorded,
            "entropy": entropy,
        }
        for place, (text, recorded, logprob, entropy) in enumerate(
            zip(tokens, scored["recorded"], scored["logprobs"], scored["entropy"], strict=True)
        )
    ]
    columns = ["token", "text", scored["sampled_by"], scored["model"], "difference", "entropy"]
    show(rows, list(dict.fromkeys(columns)), as_json=False)
    known = [row["difference"] for row in rows if row["difference"] is not None]
    console.print(f"differences add up to {sum(known):.4f} nats", highlight=False)
