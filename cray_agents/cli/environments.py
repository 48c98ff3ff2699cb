"""`env-worker`: carries out a loop's runs in environments of other frameworks.

The command starts env_worker/launcher.py with the Python of the environment's own venv, and becomes
that process. Nothing of cray-agents needs to be installed there.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cray_agents.cli.options import Commands, given
from cray_agents.errors import BadInput, SetupError

LAUNCHER = Path(__file__).parents[1] / "env_worker" / "launcher.py"


commands = Commands()


@commands.command("env-worker", takes="url")
def work(
    adapter: Annotated[
        str, typer.Option(help="Its framework: trl, inspect, verifiers or openenv.")
    ],
    env: Annotated[
        str,
        typer.Option(
            help="The environment: FILE.py:CLASS (trl), FILE.py:TASK (inspect), "
            "a taskset's id (verifiers), a URL (openenv)."
        ),
    ],
    venv: Annotated[
        Path | None,
        typer.Option(help="The environment's own venv \\[default: the Python of this command]."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="The name in the loop's WorkerEnvironment(NAME) \\[default: adapter]."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="A KEY=VALUE for the adapter; repeatable.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="The number of runs at a time.")] = 4,
    lease: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds until a dead worker's run is lost.")
    ] = 60.0,
    tasks: Annotated[
        str | None,
        typer.Option(help="Write the environment's tasks to this file (- for stdout), and end."),
    ] = None,
) -> None:
    """Carry out a loop's runs in an environment of another framework.

    The platform is that of --url, else of $CRAY_AGENTS_URL, else on port 8000.
    """
    python = Path(sys.executable) if venv is None else venv / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise BadInput(f"--venv {venv}: there is no {python}", param="venv")
    words = ["--adapter", adapter, "--env", env, "--slots", str(slots), "--lease", str(lease)]
    chosen = {"--name": name, "--url": given().url, "--tasks": tasks}
    words += [word for key, value in chosen.items() if value for word in (key, value)]
    words += [word for each in option or () for word in ("--option", each)]
    try:
        os.execv(python, [str(python), str(LAUNCHER), *words])
    except OSError as error:
        raise SetupError(f"{python} cannot be started: {error.strerror}") from error
