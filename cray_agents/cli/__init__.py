"""The command line, `cray-agents`: the composition root, which may import every folder.

Commands that only look (models, runs, jobs) read the shared root directly. Commands that change
something talk to the running platform. Only the modules of the command that is asked for are
imported, which halves its time, and heavy imports wait until it needs them. To add a command, write
a function in the module of its group, register it with `@commands.command` (options.py), and, for a
new group, name it in COMMANDS.
"""

import functools
import importlib
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from cray_agents.cli.options import Commands, RootGroup, split_root_options
from cray_agents.cli.screen import errors
from cray_agents.errors import (
    BadInput,
    CrayError,
    JobError,
    NewerFormat,
    NotFound,
    RealModelCall,
    SetupError,
)

if TYPE_CHECKING:
    app: Commands

#: Each command or group of commands, and the module whose `commands` has it.
COMMANDS = {
    "demo": "demo",
    "up": "platform",
    "down": "platform",
    "status": "platform",
    "dashboard": "dashboard",
    "doctor": "platform",
    "new": "agents",
    "run": "agents",
    "chat": "agents",
    "mcp": "agents",
    "env-worker": "environments",
    "loop": "loops",
    "eval": "loops",
    "models": "models",
    "jobs": "jobs",
    "plan": "plan",
    "why": "why",
    "runs": "rewards",
    "scan": "scan",
    "dataset": "datasets",
    "export": "export",
    "import": "imports",
    "batch": "batch",
    "usage": "usage",
    "keys": "keys",
    "maintain": "maintenance",
}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"cray-agents {importlib.metadata.version('cray-agents')}")
        raise typer.Exit


def take_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    home: Annotated[
        Path | None, typer.Option(help="The shared root \\[default: .cray-agents].")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The URL of a platform \\[default: the one on the root].")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """LLM agents that train themselves: vLLM serves them, Megatron-core trains them.

    The options below may also stand behind a command.
    """


@functools.cache
def make_app(*names: str) -> Commands:
    """Return the command line with these commands of COMMANDS, whose modules alone are imported."""
    made = Commands("cray-agents", cls=RootGroup, pretty_exceptions_enable=False)
    made.callback()(take_options)
    for module in dict.fromkeys(COMMANDS[name] for name in names):
        made.add_typer(importlib.import_module(f"{__name__}.{module}").commands)
    return made


def __getattr__(name: str) -> Commands:
    """Return `app`, the command line with all commands."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return make_app(*COMMANDS)


#: Errors that the caller must fix: in the input, on this machine, in a guard of their own, or by
#: another version of this package.
_CALLER_ERRORS = (BadInput, NotFound, SetupError, RealModelCall, NewerFormat)


def main() -> None:
    """Run a command. Exit code 2: the input or this machine must change; 1: something failed."""
    try:
        command = split_root_options(sys.argv[1:])[1][:1]
        make_app(*(command if command and command[0] in COMMANDS else COMMANDS))()
    except (CrayError, RealModelCall) as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        if isinstance(error, JobError) and error.log_tail:
            errors.print(escape(error.log_tail))
        sys.exit(2 if isinstance(error, _CALLER_ERRORS) else 1)
    except ModuleNotFoundError as error:
        if (advice := _install_advice(error)) is None:
            raise
        errors.print(f"[bold red]error:[/] {escape(advice)}", soft_wrap=True)
        sys.exit(2)
    except OSError as error:  # of a path that was named; without one, of a connection or the disk
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        errors.print(f"[bold red]error:[/] {escape(what)}", soft_wrap=True)
        sys.exit(2 if error.filename else 1)


def _install_advice(error: ModuleNotFoundError) -> str | None:
    """Return advice to install the extra that brings a module; None: no extra of ours does."""
    module = (error.name or "").partition(".")[0].replace("_", "-")
    extras = set()
    for requirement in importlib.metadata.requires("cray-agents") or ():
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"extra == .(\w+)", requirement)
        if name and extra and (name[0] == module or name[0].startswith(f"{module}-")):
            extras.add(extra[1])
    if "learning" in extras:  # a platform needs more than those which some tools have too
        extras.discard("tools")
    smallest = next((extra for extra in ("export", "tools") if extra in extras), None)
    if not extras:
        return None
    wanted = f"'cray-agents[{smallest}]'" if smallest else "'cray-agents[cpu]' or '…[gpu]'"
    wanted += "" if smallest else "; see `cray-agents doctor`"
    return f"this command needs {error.name}, which is not installed: pip install {wanted}"
