"""`run` and `chat`: through a real gateway around a scripted engine, or with an agent's own."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Platform
from cray_agents.cli.agents import load_agent
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import BadInput
from cray_agents.testing import ScriptedEngine
from tests.support.command_line import cli as command
from tests.support.command_line import refused
from tests.support.scripted_platform import platform

AGENT = """
from words import GREETING
from cray_agents import Agent
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.calculator import calculator

agent = Agent("sums", tools=[calculator], instructions=GREETING, model="m")
brief = agent.override(name="brief", engine=ScriptedEngine(lambda request: "brief"))
whole = agent.override(name="whole", output_type=int, output_retries=0,
                       engine=ScriptedEngine(["not a number"]))
short = agent.override(name="short", max_turns=1, engine=ScriptedEngine(
    [{"name": "calculator", "arguments": {"expression": "1"}}]))
"""


def reply(request: dict[str, Any]) -> Any:
    """Calls the calculator on a sum, tells its result, and otherwise how many questions came."""
    last = request["messages"][-1]
    if last["role"] == "tool":
        return f"It is {last['content']}."
    if "+" in last["content"]:
        return tool_call("calculator", expression=last["content"])
    asked = [message for message in request["messages"] if message["role"] == "user"]
    return f"question {len(asked)}: \x1b[31m{last['content']}[/red]"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with platform(tmp_path_factory.mktemp("site"), ScriptedEngine(reply)) as client:
        yield client


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An agent's file that imports its neighbour, in another folder than the present one."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "words.py").write_text("GREETING = 'Do sums.'\n")
    (tmp_path / "code" / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "words", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return "code/agent.py"


def cli(*words: object, said: str = "") -> subprocess.CompletedProcess[str]:
    return command(*words, cwd=Path.cwd(), typed=said)


def test_run_prints_the_answer_and_the_platform_has_the_run(file: str, site: Platform) -> None:
    done = cli("run", file, "40 + 2", "--url", site.url)
    assert (done.returncode, done.stdout) == (0, "It is 42.\n")
    told = json.loads(cli("run", file, "-", "--json", "--url", site.url, said="1 + 1\n").stdout)
    assert (told["input"], told["output"], told["model"]) == ("1 + 1", "It is 2.", "m@1")
    assert told["trajectory"]["messages"][0] == {"role": "system", "content": "Do sums."}
    assert told["id"] in stored(site)


def stored(site: Platform) -> dict[str, str]:
    """The stored runs: why they ended."""
    from cray_agents.agent import user_code

    async def read() -> dict[str, str]:
        return {run.id: str(run.stop_reason) async for run in site.runs(agent="sums")}

    return user_code.wait_for(read())


def test_a_stream_shows_what_happens(file: str, site: Platform) -> None:
    shown = cli("run", file, "40 + 2", "--stream", "--url", site.url).stdout
    assert 'calculator({"expression": "40 + 2"})' in shown and "calculator -> 42" in shown
    assert shown.endswith("It is 42.\n")
    lines = cli("run", file, "40 + 2", "--stream", "--json", "--url", site.url).stdout
    events = [json.loads(line) for line in lines.splitlines()]
    names = [event["event"] for event in events]
    assert names[-1] == "RunEnded" and events[-1]["run"]["output"] == "It is 42."
    (ended,) = [event["call"] for event in events if event["event"] == "ToolFinished"]
    assert (ended["name"], ended["result"]) == ("calculator", 42)
    text = [event["text"] for event in events if event["event"] == "TextDelta"]
    assert len(text) > 1 and "".join(text) == "It is 42."


@pytest.mark.slow
def test_the_returncode_says_whether_it_came_to_an_answer(file: str) -> None:
    fine = cli("run", f"{file}:brief", "hello")
    assert (fine.returncode, fine.stdout, fine.stderr) == (0, "brief\n", "")
    for stream in ((), ("--stream",)):
        wrong = cli("run", f"{file}:whole", "hello", *stream)
        assert wrong.returncode == 1 and "error: The answer is not of type int" in wrong.stderr
        limit = cli("run", f"{file}:short", "hello", *stream)
        assert limit.returncode == 1 and "max_turns" in limit.stderr
    assert cli("run", f"{file}:short", "hello").stdout == ""


def test_a_session_goes_on_in_the_next_command(file: str, site: Platform, tmp_path: Path) -> None:
    at = ("--session", "talk.jsonl", "--url", site.url)
    assert "question 1" in cli("run", file, "a", *at).stdout
    assert "question 2" in cli("run", file, "b", "--stream", *at).stdout
    assert "question 3" in cli("chat", file, *at, said="c\n").stdout
    assert len((tmp_path / "talk.jsonl").read_text().splitlines()) == 3


def test_a_conversation(file: str, site: Platform, tmp_path: Path) -> None:
    said = ["one", "", "2 + 3", "/history", "/save talk.jsonl", "/save talk.jsonl", "/save no/such",
            "/what", " /etc", "/reset", "two", "/history", "/help", "/quit",
            "too late"]  # fmt: skip
    done = cli("chat", file, "--url", site.url, said="\n".join(said))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.split("(a new conversation)")
    # a model's words do not drive the screen
    assert "question 1: \N{SYMBOL FOR ESCAPE}[31mone[/red]" in first
    assert "\x1b" not in done.stdout and "calculator -> 5" in first and "It is 5." in first
    assert "user: one" in first and "assistant: It is 5." in first and "tool: 5" in first
    assert "there is no command /what" in first and "question 3" in first
    assert "/etc" in first.split("question 3")[1]
    assert "question 1" in second and "user: two" in second and "user: one" not in second
    assert "/save FILE" in second and "too late" not in second
    (line,) = (tmp_path / "talk.jsonl").read_text().splitlines()
    roles = [message["role"] for message in json.loads(line)["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert done.stderr.count("/save FILE:") == 2


def test_without_memory(file: str, site: Platform) -> None:
    done = cli("chat", file, "--forget", "--url", site.url, said="one\ntwo\n")
    assert done.stdout.count("question 1") == 2


def test_an_error_does_not_end_a_chat(file: str) -> None:
    done = cli("chat", f"{file}:short", said="hello\nagain\n")
    assert done.returncode == 0
    assert "max_turns" in done.stderr and "the script holds 1 replies" in done.stderr


HANGING = """
import asyncio
from cray_agents import Agent
from cray_agents.testing import ScriptedEngine

async def reply(request):
    if request["messages"][-1]["content"] == "hang":
        print("thinking", flush=True)
        await asyncio.Event().wait()
    return f"{len(request['messages'])} messages"

alone = Agent("alone", engine=ScriptedEngine(reply))
"""


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    argv = [sys.executable, "-m", "cray_agents", "chat", str(tmp_path / "hanging.py")]
    chat = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert chat.stdin is not None and chat.stdout is not None
    print("hang", file=chat.stdin, flush=True)
    assert "thinking" in chat.stdout.readline()
    chat.send_signal(signal.SIGINT)
    shown = chat.communicate("go on\n")[0]
    assert "(stopped)" in shown and "1 messages" in shown  # what was stopped is forgotten
    assert chat.returncode == 0


def test_which_agent_of_a_file(file: str, tmp_path: Path) -> None:
    assert load_agent(file).name == "sums"
    assert load_agent(f"{tmp_path}/code/agent.py:whole").name == "whole"
    with pytest.raises(BadInput, match="no agent 'none', but agent, brief, whole, short: say"):
        load_agent(f"{file}:none")
    Path("one.py").write_text("from cray_agents import Agent\nonly = Agent('only')\n")
    assert load_agent("one.py").name == "only"
    Path("none.py").write_text("x = 1\n")
    with pytest.raises(BadInput, match=r"none.py defines no agent; write: agent = Agent\("):
        load_agent("none.py")
    Path("odd.py").write_text("def f(:\n")
    with pytest.raises(BadInput, match=r"odd.py:1: "):
        load_agent("odd.py")
    with pytest.raises(BadInput, match="no such file"):
        load_agent("nothing.py:agent")


WORLD = """
from cray_agents import Agent, Environment, RunContext, Task, TaskSet
from cray_agents.testing import ScriptedEngine

class Room(Environment):
    def reset(self, task: Task, context: RunContext) -> str:
        return f"You see {task.metadata['thing']!r}, {task.target}."

echo = ScriptedEngine(lambda request: request["messages"][-1]["content"])
agent = Agent("looker", environment=Room, engine=echo)
rows = [{"input": "Look.", "metadata": {"thing": n}, "id": f"t{n}", "target": n} for n in range(9)]
tasks = TaskSet.from_list(rows, identity=["thing"])
"""


@pytest.mark.slow
def test_an_environment_that_reads_metadata_is_run_and_chatted_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("room.py").write_text(WORLD)
    run = ("run", "room.py")
    assert cli(*run, "--task", "t3").stdout == "Look.\n\nYou see 3, 3.\n"
    assert "Again.\n\nYou see 3, 3." in cli(*run, "Again.", "--task", "t3").stdout
    assert "You see 'key', None." in cli(*run, "Hm", "--metadata", "thing=key").stdout
    assert "You see [1], None." in cli(*run, "Hm", "--metadata", '{"thing": [1]}').stdout
    assert "You see 8, 3." in cli(*run, "--task", "t3", "--metadata", "thing=8").stdout
    talk = cli("chat", "room.py", "--metadata", "thing=key", said="Hello.\nAnd now?\n")
    assert talk.stdout.count("You see 'key', None.") == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--task", "t10"], "has no task 't10': there is t0, t1, t2, t3, t4, ..."),
        (["Hm", "--metadata", "thing"], "write it as key=value"),
        (["Hm", "--metadata", "{thing"], "is no JSON"),
        ([], "say what to ask"),
        (["--metadata", "thing=3"], "say what to ask"),
    ],
)
def test_what_names_no_task(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("room.py").write_text(WORLD)
    refused(cli("run", "room.py", *words), told)


BROKEN = {
    "import nosuchmodule\n": "agent.py:1: ModuleNotFoundError: No module named 'nosuchmodule'",
    "import json\n\njson.loads('{')\n": "agent.py:3: JSONDecodeError: Expecting property name",
    "from cray_agents import Agent\nagent = Agent('a', tools=3)\n": "agent.py:2: BadInput: tools=3",
    "def f(:\n    pass\n": "agent.py:1: invalid syntax",
    "text = 'a\0b'\n": "agent.py:1: source code string cannot contain null bytes",
    "import broken\n": "broken.py:2: ZeroDivisionError: division by zero",
}


@pytest.mark.parametrize(("source", "said"), BROKEN.items(), ids=lambda text: text[:12])
def test_an_error_of_the_file_names_its_line_and_shows_no_code_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "broken.py").write_text("def f():\n    1 / 0\n\n\nf()\n")
    (tmp_path / "agent.py").write_text(source)
    with pytest.raises(BadInput) as error:
        load_agent(str(tmp_path / "agent.py"))
    first, _, rest = str(error.value).partition("\n")
    assert f"{tmp_path}/{said}" in first and ">" not in rest.replace("<module>", "")
    assert rest.count("File ") == rest.count(str(tmp_path))
    sys.modules.pop("broken", None)
