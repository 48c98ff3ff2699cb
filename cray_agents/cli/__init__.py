"""The command line, `cray-agents`: the composition root, which may import every folder.

Commands that only look (models, runs, jobs) read the shared root directly. Commands that change
something talk to the running platform. Heavy imports wait until a command needs them.
"""

import importlib.metadata
import re
import sys
from typing import Annotated

import typer
from rich.markup import escape

from cray_agents.cli.agent import agents, mcp
from cray_agents.cli.data import batch, datasets, export, imports, upload
from cray_agents.cli.jobs import jobs, plan, why
from cray_agents.cli.loop import demo, loops
from cray_agents.cli.models import models
from cray_agents.cli.platform import doctor, goodput, keys, platform, simulate
from cray_agents.cli.runs import maintenance, reward, runs
from cray_agents.cli.screen import errors
from cray_agents.errors import (
    BadInput,
    CrayError,
    JobError,
    NotFound,
    RealModelCall,
    SetupError,
)

app = typer.Typer(
    name="cray-agents",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"cray-agents {importlib.metadata.version('cray-agents')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
]


@app.callback()
def take_options(version: Version = False) -> None:
    """LLM agents that train themselves: vLLM serves them, Megatron-core trains them."""


for module in (
    demo,
    platform,
    agents,
    loops,
    mcp,
    models,
    jobs,
    why,
    runs,
    maintenance,
    reward,
    datasets,
    plan,
    simulate,
    goodput,
    export,
    imports,
    batch,
    upload,
    keys,
    doctor,
):
    module.add_to(app)


#: Errors that the caller must fix: in the input, on this machine, or in a guard of their own.
_CALLER_ERRORS = (BadInput, NotFound, SetupError, RealModelCall)


def main() -> None:
    """Run a command. Exit code 2: the input or this machine must change; 1: something failed."""
    try:
        app()
    except (CrayError, RealModelCall) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        if isinstance(error, JobError) and error.log_tail:
            errors.print(escape(error.log_tail))
        sys.exit(2 if isinstance(error, _CALLER_ERRORS) else 1)
    except ModuleNotFoundError as error:
        if (advice := _install_advice(error)) is None:
            raise
        errors.print(f"[bold red]error:[/] {escape(advice)}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _install_advice(error: ModuleNotFoundError) -> str | None:
    """Return advice to install the extra that brings a module; None: no extra of ours does."""
    module = (error.name or "").partition(".")[0].replace("_", "-")
    extras = set()
    for requirement in importlib.metadata.requires("cray-agents") or ():
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == .(\w+)", requirement)
        if name and extra and (name[0] == module or name[0].startswith(f"{module}-")):
            extras.add(extra[1])
    smallest = next((extra for extra in ("export", "tools") if extra in extras), None)
    if not extras:
        return None
    wanted = f"'cray-agents[{smallest}]'" if smallest else "'cray-agents[cpu]' or '…[gpu]'"
    return f"this command needs {error.name}, which is not installed: pip install {wanted}"
