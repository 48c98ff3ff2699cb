"""`new`, `run`, `chat` and `mcp`: write a Python file with an agent in it, and take one.

The file may lie anywhere; its folder is importable. `agent.py:name` picks one agent of several. An
agent talks to the platform at --url, else to its own engine, else to the platform on the shared
root, which is started if none runs. Read next: conversation_view.py, for the output;
tools/mcp_server.py.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from cray_agents.agent.agent import Agent
from cray_agents.agent.sessions import FileSession, MemorySession, Session
from cray_agents.cli.conversation_view import TerminalChat, answer, as_text, has_answer, report
from cray_agents.cli.options import Commands, given, key_value
from cray_agents.cli.screen import disarm, note, print_json, say, settings
from cray_agents.cli.user_files import load
from cray_agents.engines.openai_engine import OpenAIEngine
from cray_agents.errors import BadInput, StoreError
from cray_agents.loop.loop import Loop
from cray_agents.platform.client import Platform
from cray_agents.records import Task
from cray_agents.server.platform_process import client, serving
from cray_agents.tasks.task_set import TaskSet

AgentFile = Annotated[
    str, typer.Argument(help="A Python file that defines `agent`; FILE:NAME for another name.")
]
TaskOption = Annotated[
    str | None,
    typer.Option(
        "--task", help="The id of one of the file's tasks: its input and its metadata are used."
    ),
]
MetadataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metadata", help="KEY=VALUE, or JSON, for an environment that reads it; repeatable."
    ),
]
SessionOption = Annotated[
    Path | None,
    typer.Option(
        "--session", help="A JSONL file that remembers the conversation; made if missing."
    ),
]


commands = Commands()


@commands.command("new", takes="")
def new(
    name: Annotated[
        str, typer.Argument(help="The agent's name, of letters, digits and _: NAME.py is written.")
    ],
) -> None:
    """Write a file with an agent, its tool, tasks, reward and loop, to run and to change."""
    file = Path(f"{name}.py")
    if not (name.isascii() and name.isidentifier()):
        raise BadInput(
            f"{name!r} is no name of letters, digits and _, as in my_agent", param="name"
        )
    text = Path(__file__).with_name("new_agent.py").read_text().replace("shop", name)
    try:
        with file.open("x") as written:
            written.write(text)
    except FileExistsError:
        raise BadInput(f"{file} is there already: choose another name", param="name") from None
    except OSError as error:
        raise StoreError(f"{file} cannot be written here: {error.strerror}") from error
    say(f"wrote {file}. Serve a small model, and ask the agent:\n")
    for words in ("up --model smollm2 --detach", f'run {file} "What do a dozen pears cost?"'):
        say(f"  cray-agents {words}{given().words}")


@commands.command("run", takes="json url")
def run_agent(
    file: AgentFile,
    question: Annotated[
        str | None,
        typer.Argument(
            help="The input for the agent; - reads standard input \\[default: the task's]."
        ),
    ] = None,
    task: TaskOption = None,
    metadata: MetadataOption = None,
    session: SessionOption = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show the text and tool calls as they come.")
    ] = False,
) -> None:
    """Run an agent once and print its answer. The exit code is 1 if it has none.

    With --json the whole run is printed, with --stream also its events, one a line.
    """
    text = sys.stdin.read().strip() if question == "-" else question
    module = load(split_target(file)[0])
    request = requested_task(module, task, metadata, text)
    if text is None and (request is None or task is None):
        raise BadInput("say what to ask, or name a task of the file with --task", param="question")
    memory = FileSession(session) if session else MemorySession()
    with with_engine(agent_in(module, file)) as agent:
        if stream:
            answered = answer(agent, request or text or "", memory, as_json=given().json)
            run = asyncio.run(answered)
        else:
            run = agent.run_sync(request or text or "", session=memory)
    if given().json and not stream:
        print_json(run)
    elif not stream and has_answer(run):
        output = as_text(run.output)
        print(disarm(output) if sys.stdout.isatty() else output)
    if not has_answer(run):
        report(run)
        raise typer.Exit(1)


@commands.command("chat", takes="url")
def chat(
    file: AgentFile,
    task: TaskOption = None,
    metadata: MetadataOption = None,
    session: SessionOption = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Begin anew with each question: no history.")
    ] = False,
) -> None:
    """Talk with an agent: answers stream, tool calls are shown. /help lists what else it takes."""
    memory: Session = FileSession(session) if session else MemorySession()
    module = load(split_target(file)[0])
    request = requested_task(module, task, metadata)
    with with_engine(agent_in(module, file)) as agent:
        TerminalChat(agent, memory, task=request, forget=forget).run()


@commands.command("mcp", takes="url")
def serve_mcp(
    file: AgentFile,
    http: Annotated[
        bool, typer.Option("--http", help="Serve HTTP on loopback instead of stdin and stdout.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="The port with --http \\[default: a free one]."),
    ] = None,
) -> None:
    """Serve an agent to MCP clients, as a tool ask_NAME; its runs are recorded.

    Over stdio an MCP client starts this command itself; --http serves until Ctrl-C.
    """
    from cray_agents.tools.mcp_server import agent_server, serve_http, serve_stdio

    if port is not None and not http:
        raise BadInput("--port is for --http: over stdio there is none", param="port")
    with ExitStack() as stack:
        with redirect_stdout(sys.stderr):  # a print in the file would break the protocol on stdout
            agent = stack.enter_context(with_engine(load_agent(file)))
            server = agent_server(agent)
        if http:
            serve_http(server, port or 0, lambda at: note(f"MCP server: {at}"))
        else:
            serve_stdio(server)


@contextmanager
def with_engine(agent: Agent) -> Iterator[Agent]:
    """Yield the agent with an engine that answers it while the block lasts.

    `--url` may name a platform, or any OpenAI-compatible server.
    """
    own = agent.engine or agent.base_url or os.environ.get("CRAY_AGENTS_URL")
    if (url := given().url) is not None:
        yield agent.override(engine=OpenAIEngine(url))
    elif given().home is None and own:
        yield agent
    else:
        with platform_for(agent.model) as platform:
            yield agent.override(engine=platform.engine())


@contextmanager
def platform_for(name: str, model: Path | None = None) -> Iterator[Platform]:
    """Yield the platform at `--url`, else the one on the root, else one started for this command.

    One that is started serves `name`, from a checkpoint `model` on a root that has none.
    """
    if (url := given().url) is not None:
        yield Platform(url)
        return
    with serving(settings(), model=model, name=name) as info:
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


def _metadata_pairs(text: str) -> list[tuple[str, Any]]:
    """Parse `KEY=VALUE`, whose value is JSON or else a text; or a JSON object. Raises BadInput."""
    if text.lstrip().startswith("{"):
        try:
            return [*json.loads(text).items()]
        except ValueError as error:
            raise BadInput(f"--metadata {text!r} is no JSON: {error}", param="metadata") from error
    return [key_value(text, "metadata")]


def split_target(text: str) -> tuple[Path, str]:
    """Return the file and the name that `FILE` or `FILE:NAME` means."""
    path, _, name = text.rpartition(":")
    return (Path(text), "") if not path or Path(text).is_file() else (Path(path), name)


def load_agent(text: str) -> Agent:
    """Return the agent that `FILE` or `FILE:NAME` means. Raises BadInput."""
    return agent_in(load(split_target(text)[0]), text)


def agent_in(module: ModuleType, text: str) -> Agent:
    """Return the agent that `FILE` or `FILE:NAME` means, of its loaded module. Raises BadInput."""
    path, name = split_target(text)
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
