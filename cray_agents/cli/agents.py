"""`run` and `chat`: commands that take a Python file with an agent in it.

The file may lie anywhere; its folder is importable. `agent.py:name` picks one agent of several. An
agent talks to the platform at --url, else to its own engine, else to the platform on the shared
root, which is started if none runs. Read next: conversation_view.py, for the output.
"""

import asyncio
import importlib.util
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer

from cray_agents.agent.agent import Agent
from cray_agents.agent.sessions import FileSession, MemorySession, Session
from cray_agents.cli.conversation_view import (
    TerminalChat,
    answer,
    as_text,
    has_answer,
    report,
)
from cray_agents.cli.screen import HomeOption, disarm
from cray_agents.config import load_config
from cray_agents.engines.openai_engine import OpenAIEngine
from cray_agents.errors import BadInput
from cray_agents.loop.loop import Loop
from cray_agents.platform.client import Platform
from cray_agents.records import Task
from cray_agents.server.platform_process import client, serving
from cray_agents.tasks.task_set import TaskSet

AgentFile = Annotated[
    str, typer.Argument(help="A Python file that defines `agent`; FILE:NAME: another name.")
]
T = TypeVar("T")
TaskOption = Annotated[
    str | None,
    typer.Option("--task", help="A task of the file's tasks, by its id: what is asked, and where."),
]
MetadataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metadata", help="KEY=VALUE, or JSON, for an environment that reads it; repeatable."
    ),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="A platform, or any OpenAI-compatible server \\[default: the one on this root].",
    ),
]
SessionOption = Annotated[
    Path | None,
    typer.Option(
        "--session", help="A JSONL file that remembers the conversation; made if missing."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(name="run")(run_agent)
    app.command()(chat)


def run_agent(
    file: AgentFile,
    question: Annotated[
        str | None,
        typer.Argument(help="What to ask the agent; -: standard input \\[default: the task's]."),
    ] = None,
    task: TaskOption = None,
    metadata: MetadataOption = None,
    home: HomeOption = None,
    url: ServerOption = None,
    session: SessionOption = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show the text and tool calls as they come.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the whole run; with --stream its events, one a line."),
    ] = False,
) -> None:
    """Run an agent once and print its answer. Exit code 1: it came to none."""
    text = sys.stdin.read().strip() if question == "-" else question
    module = load(_split_target(file)[0])
    request = requested_task(module, task, metadata, text)
    if text is None and (request is None or task is None):
        raise BadInput("say what to ask, or name a task of the file with --task", param="question")
    memory = FileSession(session) if session else MemorySession()
    with with_engine(agent_in(module, file), home, url) as agent:
        if stream:
            run = asyncio.run(answer(agent, request or text or "", memory, as_json=as_json))
        else:
            run = agent.run_sync(request or text or "", session=memory)
    if as_json and not stream:
        print(disarm(run.model_dump_json(indent=2)))
    elif not stream and has_answer(run):
        output = as_text(run.output)
        print(disarm(output) if sys.stdout.isatty() else output)
    if not has_answer(run):
        report(run)
        raise typer.Exit(1)


def chat(
    file: AgentFile,
    task: TaskOption = None,
    metadata: MetadataOption = None,
    home: HomeOption = None,
    url: ServerOption = None,
    session: SessionOption = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Begin anew with each question: no history.")
    ] = False,
) -> None:
    """Talk with an agent: answers stream, tool calls are shown. /help tells more."""
    memory: Session = FileSession(session) if session else MemorySession()
    module = load(_split_target(file)[0])
    request = requested_task(module, task, metadata)
    with with_engine(agent_in(module, file), home, url) as agent:
        TerminalChat(agent, memory, task=request, forget=forget).run()


@contextmanager
def with_engine(agent: Agent, home: Path | None, url: str | None) -> Iterator[Agent]:
    """Yield the agent with an engine that answers it while the block lasts."""
    if url is not None:
        yield agent.override(engine=OpenAIEngine(url))
    elif home is None and (agent.engine or agent.base_url or os.environ.get("CRAY_AGENTS_URL")):
        yield agent
    else:
        with platform_at(home, None, agent.model) as platform:
            yield agent.override(engine=platform.engine())


@contextmanager
def platform_at(
    home: Path | None, url: str | None, name: str, model: Path | None = None
) -> Iterator[Platform]:
    """Yield the platform at a URL, else the one on the root, else one started for this command."""
    if url is not None:
        yield Platform(url)
        return
    with serving(load_config({"home": home}), model=model, name=name) as info:
        yield client(info)


def requested_task(
    module: ModuleType, task: str | None, metadata: list[str] | None, text: str | None = None
) -> Task | None:
    """Return the task that `--task` and `--metadata` mean, with this input; None without either.

    Raises BadInput for a task that the file lacks, and metadata that cannot be read.
    """
    if task is None and not metadata:
        return None
    base = Task(input=text or "") if task is None else _task_of(module, task)
    more = dict(pair for option in metadata or () for pair in _metadata_pairs(option))
    changes = {"metadata": {**base.metadata, **more}}
    return base.model_copy(update=changes | ({"input": text} if text is not None else {}))


def _task_of(module: ModuleType, task: str) -> Task:
    """Return the task with this id, of a file's TaskSet or Loop. Raises BadInput."""
    sets = [value.tasks if isinstance(value, Loop) else value for value in vars(module).values()]
    known = {each.id: each for tasks in sets if isinstance(tasks, TaskSet) for each in tasks}
    if task in known:
        return known[task]
    ids = ", ".join([*known][:5]) + (", ..." if len(known) > 5 else "")
    instead = f"there is {ids}" if known else "it has no TaskSet"
    raise BadInput(f"{module.__file__} has no task {task!r}: {instead}", param="task")


def _metadata_pairs(given: str) -> list[tuple[str, Any]]:
    """Parse `KEY=VALUE`, whose value is JSON or else a text; or a JSON object. Raises BadInput."""
    if given.lstrip().startswith("{"):
        try:
            return [*json.loads(given).items()]
        except ValueError as error:
            raise BadInput(f"--metadata {given!r} is no JSON: {error}", param="metadata") from error
    key, equals, value = given.partition("=")
    if not (key and equals):
        raise BadInput(f"--metadata {given!r}: give KEY=VALUE, or JSON", param="metadata")
    try:
        return [(key, json.loads(value))]
    except ValueError:
        return [(key, value)]


def _split_target(given: str) -> tuple[Path, str]:
    """Return the file and the name that `FILE` or `FILE:NAME` means."""
    path, _, name = given.rpartition(":")
    return (Path(given), "") if not path or Path(given).is_file() else (Path(path), name)


def load_agent(given: str) -> Agent:
    """Return the agent that `FILE` or `FILE:NAME` means. Raises BadInput."""
    return agent_in(load(_split_target(given)[0]), given)


def agent_in(module: ModuleType, given: str) -> Agent:
    """Return the agent that `FILE` or `FILE:NAME` means, of its loaded module. Raises BadInput."""
    path, name = _split_target(given)
    agents = {key: value for key, value in vars(module).items() if isinstance(value, Agent)}
    if not name and len(agents) == 1:
        (name,) = agents
    name = name or "agent"
    if name in agents:
        return agents[name]
    if not agents:
        raise BadInput(f"{path} defines no agent; write: agent = Agent(...)", param="file")
    raise BadInput(
        f"{path} defines no agent {name!r}, but {', '.join(agents)}: say which, as in "
        f"{path}:{next(iter(agents))}",
        param="file",
    )


def load(file: Path) -> ModuleType:
    """Import a user's file from anywhere, with its own folder importable. Raises BadInput."""
    if not file.is_file():
        raise BadInput(f"{file}: no such file", param="file")
    sys.path.insert(0, str(file.resolve().parent))
    name = "user_" + "".join(c if c.isalnum() else "_" for c in file.stem)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BadInput(f"{file} is not a Python file", param="file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        place = f"{error.filename or file}:{error.lineno or 1}"
        raise BadInput(f"{place}: {error.msg}", param="file") from error
    except Exception as error:  # the edge to the author's code
        raise BadInput(_describe(error, file), param="file") from error
    return module


def _describe(error: Exception, file: Path) -> str:
    """Tell an error of the author's code, with the line that raised it and those that led there.

    Raises the error itself if it is a package that a module of ours lacks: the caller knows which.
    """
    ours = str(Path(__file__).parents[1])
    installed = (ours, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
    ]
    if isinstance(error, ModuleNotFoundError) and frames[-1].filename.startswith(ours):
        raise error
    own = [each for each in frames if not each.filename.startswith(installed)] or frames
    lines = "".join(traceback.format_list(own)).rstrip()
    return f"{own[-1].filename}:{own[-1].lineno}: {type(error).__name__}: {error}\n{lines}"


def find(module: ModuleType, name: str, kind: type[T], file: Path) -> T:
    """Return the module's object of that name and type. Raises BadInput."""
    value = getattr(module, name, None)
    if not isinstance(value, kind):
        raise BadInput(
            f"{file} defines no `{name}` ({kind.__name__}); write: {name} = {kind.__name__}(...)",
            param=name,
        )
    return value
