"""MCP with real servers over stdio and HTTP: their tools as ours, and an agent as a server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import jsonschema._utils
import pytest

from cray_agents import Agent
from cray_agents.agent.tool import Tool, perform
from cray_agents.cli.agents import serve_mcp
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import BadInput, SetupError, ToolError
from cray_agents.processes import alive
from cray_agents.records import Run, ToolCall
from cray_agents.testing import ScriptedEngine
from cray_agents.tools import from_schema
from cray_agents.tools.from_schema import SchemaCheck, tool_from_schema
from cray_agents.tools.mcp_client import McpTools

pytestmark = pytest.mark.slow

SITE = str(Path(__file__).parents[1] / "support/tools/mcp_server.py")
COMMAND = [sys.executable, SITE]

AGENT = """
print("a print in the file")
from cray_agents import Agent
from cray_agents.testing import ScriptedEngine
from cray_agents.errors import EngineError
from cray_agents.engines.scripted import tool_call
from cray_agents.tools.calculator import calculator

async def keep(run):
    from pathlib import Path
    with Path(__file__).with_suffix(".jsonl").open("a") as file:
        print(run.model_dump_json(), file=file)

script = [tool_call("calculator", expression="2+2"), "It is 4.", EngineError("the engine is out")]
agent = Agent(name="calc bot", description="Knows sums.", tools=[calculator], recorder=keep,
              engine=ScriptedEngine(script))
"""


NOISY = """
import subprocess
from cray_agents import Agent
from cray_agents.testing import ScriptedEngine
from cray_agents.engines.scripted import tool_call

def noisy() -> None:
    print("from a tool")
    subprocess.run(["echo", "from its child"])

agent = Agent(name="a", tools=[noisy], engine=ScriptedEngine([tool_call("noisy"), "done"]))
"""


@pytest.fixture(scope="module")
def stdio() -> Iterator[McpTools]:
    with McpTools(command=COMMAND, timeout=120) as server:
        yield server


def named(server: McpTools) -> dict[str, Tool]:
    return {tool.name: tool for tool in server.tools}


async def ask(server: McpTools, name: str, arguments: str = "{}") -> ToolCall:
    asked = {"id": "c", "function": {"name": name, "arguments": arguments}}
    return await perform(named(server), asked)


def test_an_agent_uses_them(stdio: McpTools) -> None:
    calls = [
        tool_call("add", left=2),
        tool_call("weather_of", city="Oslo"),
        tool_call("fail"),
        tool_call("picture"),
        tool_call("add", left="two"),
        tool_call("add"),
    ]
    agent = Agent(name="a", tools=stdio.tools, engine=ScriptedEngine([calls, "done"]))
    done = agent.run_sync("go").trajectory.turns[0].tool_calls
    assert [call.result for call in done[:2]] == [3, {"city": "Oslo", "rain": True}]
    assert "the printer is on fire" in done[2].error
    assert done[3].result == "a dot:\n[image, image/png, about 6 bytes: not shown]"
    assert done[4].error == (
        "bad arguments for add: left: 'two' is not of type 'integer'. "
        "Expected add(left: integer, right?: integer)"
    )
    assert "'left' is a required property" in done[5].error


def test_models_see_the_servers_own_schema(stdio: McpTools) -> None:
    about = named(stdio)["add"].schema["function"]
    assert about["description"] == "Add two numbers."
    assert about["parameters"]["required"] == ["left"]
    assert about["parameters"]["properties"]["right"]["default"] == 1


async def test_calls_from_any_loop_and_side_by_side(stdio: McpTools) -> None:
    """This loop, another thread's, and the one of sync callers share one server."""
    here = asyncio.gather(*(ask(stdio, "process") for _ in range(5)))
    there = asyncio.to_thread(asyncio.run, ask(stdio, "process"))
    pids = {call.result for call in [*await here, await there]}
    assert len(pids) == 1 and os.getpid() not in pids


async def test_a_server_that_dies_is_told_and_started_again() -> None:
    async with McpTools(command=COMMAND) as server:
        first = (await ask(server, "process")).result
        died = await ask(server, "die")
        assert "ended during the call" in died.error and "I was told to die" in died.error
        second = (await ask(server, "process")).result
        assert second != first
        os.kill(second, signal.SIGKILL)  # not during a call
        calls = [await ask(server, "process") for _ in range(2)]
        assert calls[-1].result not in (None, first, second)
        pid = calls[-1].result
    closed = await ask(server, "process") if server.tools else None
    assert closed is not None and "was closed" in closed.error
    assert not alive(pid)


async def test_a_call_that_hangs_hurts_no_other() -> None:
    async with McpTools(command=COMMAND, timeout=120, allow=["hang", "proc*"]) as server:
        assert sorted(named(server)) == ["hang", "process"]
        server.tools = (replace(named(server)["hang"], timeout=3), named(server)["process"])
        before = await ask(server, "process")
        hung = await ask(server, "hang")
        assert hung.error == "hang did not answer within 3 s"
        assert (await ask(server, "process")).result == before.result


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else gets, while a server that is started for it may."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def site_at(port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*COMMAND, str(port)])
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


async def test_over_http_with_a_prefix_also_when_the_server_is_restarted(port: int) -> None:
    url = f"http://127.0.0.1:{port}/mcp"
    with site_at(port) as first:
        server = McpTools(url=url, prefix="site.", allow=["process", "weather.of"]).open()
        assert sorted(named(server)) == ["site_process", "site_weather_of"]
        assert (await ask(server, "site_process")).result == first.pid
    try:
        gone = [(await ask(server, "site_process")).error for _ in range(2)]
        assert "the MCP server" in gone[0] and "did not start" in gone[1]
        with site_at(port) as second:
            assert (await ask(server, "site_process")).result == second.pid
    finally:
        server.close()
        server.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": ["/no/such/server"]}, "No such file"),
        ({"command": [sys.executable, "-c", "raise SystemExit('no licence')"]}, "no licence"),
        ({"command": ["sleep", "60"], "start_timeout": 0.2}, "no answer within 0.2 s"),
        ({"url": "http://127.0.0.1:9/mcp"}, "connection attempts failed"),
    ],
)
def test_servers_that_do_not_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError) as caught:
        McpTools(**options).open()
    assert message in str(caught.value)


def test_a_server_that_never_answers_is_not_left_behind(tmp_path: Path) -> None:
    script = f"mkdir {tmp_path}/$$; exec sleep 600"
    for seconds in (3, 20, 100):  # a busy machine may need longer to start it at all
        with pytest.raises(SetupError, match=f"no answer within {seconds} s"):
            McpTools(command=["sh", "-c", script], start_timeout=seconds).open()
        if pids := [int(path.name) for path in tmp_path.iterdir()]:
            break
    assert pids and not alive(pids[0])


async def test_a_start_that_takes_longer_than_a_call_may(tmp_path: Path) -> None:
    """The calls are told; the start goes on for the next one, and there is only one."""
    script = f'echo begun >> {tmp_path}/starts; exec "{sys.executable}" "{SITE}"'
    async with McpTools(command=["sh", "-c", script], timeout=120) as server:
        assert "ended during the call" in (await ask(server, "die")).error
        server.tools = (replace(named(server)["process"], timeout=0.05),)
        calls = [await ask(server, "process")]
        while calls[-1].error is not None:
            assert "did not answer within 0.05 s" in calls[-1].error
            calls.append(await ask(server, "process"))
    assert len(calls) > 1
    assert (tmp_path / "starts").read_text() == "begun\n" * 2


def test_what_cannot_be_meant() -> None:
    for options in ({}, {"command": ["a"], "url": "b"}, {"command": "python server.py"}):
        with pytest.raises(BadInput, match="give an MCP server's command"):
            McpTools(**options)
    with pytest.raises(BadInput, match=r"fits no tool of the MCP server; it has add, weather\.of"):
        McpTools(command=COMMAND, allow=["add", "subtract"]).open()


def test_schemas_are_held_and_never_followed_out() -> None:
    tool = tool_from_schema(
        "t",
        "",
        {
            "properties": {"any": True, "tree": {"$ref": "#/$defs/tree"}},
            "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "additionalProperties": False,
        },
        lambda arguments: sorted(arguments),
    )

    async def told(arguments: str) -> Any:
        asked = {"id": "c", "function": {"name": "t", "arguments": arguments}}
        call = await perform({"t": tool}, asked)
        return call.error or call.result

    assert asyncio.run(told('{"any": 1, "tree": [[], [[]]]}')) == ["any", "tree"]
    assert "tree: 1: 3 is not of type 'array'" in asyncio.run(told('{"tree": [[], 3]}'))
    assert "'{x}' was unexpected" in asyncio.run(told('{"{x}": 1}'))
    assert "should be an object" in asyncio.run(told("[1]"))
    assert "bad arguments" in asyncio.run(told("{"))
    with pytest.raises(BadInput, match="broken JSON schema: type: 'objekt'"):
        tool_from_schema("t", "", {"type": "objekt"}, print)
    with pytest.raises(BadInput, match="cannot be called 'a b'"):
        tool_from_schema("a b", "", {}, print)
    away = tool_from_schema("t", "", {"properties": {"a": {"$ref": "http://127.0.0.1:9/s"}}}, print)
    call = perform({"t": away}, {"id": "c", "function": {"name": "t", "arguments": '{"a": 1}'}})
    assert "which is not in it" in asyncio.run(call).error


async def test_patterns_are_matched_in_linear_time_or_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = SchemaCheck(
        "t",
        {
            "patternProperties": {"^(n+)+$": {"type": "integer"}, "(?=x)": False},
            "properties": {"ahead": {"pattern": "^(?!b)a"}, "pattern": {"pattern": "^[0-9]{3}$"}},
            "additionalProperties": {"pattern": "^o"},
        },
    )
    ours = [one for one in caplog.records if one.name == from_schema.__name__]
    assert [one.args[1] for one in ours] == ["^(?!b)a", "(?=x)"]  # type: ignore[index]
    assert await schema.problem({"nnn": 1, "n" * 50 + "!": "o", "pattern": "012"}) is None
    assert await schema.problem({"ahead": "b"}) is None  # whoever takes it looks
    assert await schema.problem({"nn": "1"}) == "nn: '1' is not of type 'integer'"
    assert await schema.problem({"pattern": "12"}) == "pattern: '12' does not match '^[0-9]{3}$'"
    assert await schema.problem({"mmm": "p"}) is None  # "(?=x)" may mean it
    large = {f"p{n}": {"pattern": "(((a{50}){50}){50})" + "a" * n} for n in range(300)}
    with pytest.raises(BadInput, match="takes more than 1 s to check"):
        SchemaCheck("t", {"properties": large})


HOSTILE = str(Path(__file__).parents[1] / "support/tools/hostile_mcp_server.py")
TAKES_LONG = {"a": "a" * 50 + "!"}


async def ticks(work: asyncio.Task[Any]) -> int:
    """How often this event loop comes round until some work is done."""
    count = 0
    while not work.done():
        await asyncio.sleep(0.01)
        count += 1
    return count


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        ("pattern", "does not match '^(a+)+$'"),
        ("names", "does not match '^(a+)+$'"),
        ("answer", "does not match '^(a+)+$'"),
        ("doubling", "its JSON schema takes more than 1 s to check"),
        ("meta", "its JSON schema takes more than 1 s to check"),
    ],
)
async def test_a_schema_that_takes_for_ever_holds_only_its_own_call(
    tool: str, problem: str
) -> None:
    arguments: dict[str, Any] = {"a": [{"n": n} for n in range(20_000)]}
    async with McpTools(command=[sys.executable, HOSTILE]) as server:
        given = json.dumps(arguments if tool == "meta" else TAKES_LONG)
        call = asyncio.create_task(ask(server, tool, given))
        assert await ticks(call) > (5 if "more than" in problem else 0)
        assert problem in call.result().error
        assert (await ask(server, "pattern", '{"a": "aaa"}')).result == "done"


async def test_what_is_collected_meanwhile_does_not_end_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error in the end of an object or generator is lost, and so is who looks at the time."""

    class Ends:
        def __del__(self) -> None: ...

    def numbers() -> Iterator[int]:
        yield from range(2)

    checking = FunctionType(numbers.__code__, {"__name__": "jsonschema", "range": range})
    begun = [checking()]
    next(begun[0])

    def compared(one: object, two: object) -> bool:
        late = time.thread_time() + 0.1
        while begun and time.thread_time() < late:
            pass
        begun.clear()
        for _ in range(50):
            Ends()
        return bool(equal(one, two))

    equal = jsonschema._utils.equal
    monkeypatch.setattr(jsonschema._utils, "equal", compared)
    monkeypatch.setattr(from_schema, "SECONDS", 0.05)
    check = SchemaCheck("t", {"properties": {"a": {"uniqueItems": True}}})
    with pytest.raises(ToolError, match=r"takes more than 0\.05 s"):
        await check.problem({"a": [{"n": n} for n in range(500)]})


async def test_a_schema_that_refers_to_itself_for_ever() -> None:
    async with McpTools(command=[sys.executable, HOSTILE]) as server:
        assert "cannot be checked: nested too deeply" in (await ask(server, "endless")).error
        assert (await ask(server, "pattern", '{"a": "aaa"}')).result == "done"


async def test_an_answer_that_is_not_what_its_schema_says() -> None:
    async with McpTools(command=[sys.executable, HOSTILE]) as server:
        said = (await ask(server, "answer", '{"a": "b"}')).error
    assert said.startswith("the MCP server gave answer a wrong answer: a: 'b' does not match")


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [
        ("many", SetupError, "lists more than 1000 tools"),
        ("pages", SetupError, "lists more than 100 pages of tools"),
        ("large", BadInput, "has a JSON schema of 200,0.. characters: at most 100,000"),
        ("wordy", BadInput, "has a description of 200,000 characters: at most 100,000"),
        ("broken", SetupError, "(?s)lists its tools wrongly: .*inputSchema"),
        ("refused", SetupError, "(?s)lists its tools wrongly: .*no such method"),
    ],
)
def test_what_a_server_lists_is_limited(way: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        McpTools(command=[sys.executable, HOSTILE, way], start_timeout=100).open()


def test_a_server_that_never_lists_its_tools() -> None:
    said = ""
    for seconds in (4, 20, 100):  # a busy machine may need longer to start it at all
        with pytest.raises(SetupError) as caught:
            McpTools(command=[sys.executable, HOSTILE, "silent"], start_timeout=seconds).open()
        said = str(caught.value)
        if "no answer" not in said:
            break
    assert f"lists no tools, or not all of them, within {seconds} s" in said


@pytest.fixture
def agent_file(tmp_path: Path) -> Path:
    file = tmp_path / "bot.py"
    file.write_text(AGENT)
    return file


def command(file: Path, *words: str) -> list[str]:
    return ["-m", "cray_agents", "mcp", str(file), *words]


async def test_an_agent_as_a_server(agent_file: Path) -> None:
    from mcp import Client, StdioServerParameters  # 0.6 s, which every worker would spend

    news: list[str | None] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        news.append(message)

    parameters = StdioServerParameters(command=sys.executable, args=command(agent_file))
    async with Client(parameters) as client:
        (tool,) = (await client.list_tools()).tools
        assert (tool.name, tool.description) == ("ask_calc_bot", "Knows sums.")
        result = await client.call_tool(tool.name, {"question": "2+2?"}, progress_callback=hear)
        assert [block.text for block in result.content] == ["It is 4."]
        said = result.structured_content
        assert (said["output"], said["stop_reason"]) == ("It is 4.", "completed")
        failed = await client.call_tool(tool.name, {"question": "3+3?"})
        assert failed.is_error and "the engine is out" in failed.content[0].text
    assert news == [
        "calc bot asks default",
        'calculator({"expression": "2+2"})',
        "calculator: 4",
        "It is 4.",
    ]
    lines = agent_file.with_suffix(".jsonl").read_text().splitlines()
    runs = [Run.model_validate_json(line) for line in lines]
    assert [run.input for run in runs] == ["2+2?", "3+3?"]
    assert runs[0].id == said["run_id"] and runs[0].tags == ["mcp"]


def test_what_a_tool_prints_does_not_reach_the_wire(tmp_path: Path) -> None:
    file = tmp_path / "bot.py"
    file.write_text(NOISY)
    asked = [
        ("initialize", {"protocolVersion": "2025-06-18", "capabilities": {},
                        "clientInfo": {"name": "t", "version": "1"}}),
        ("tools/call", {"name": "ask_a", "arguments": {"question": "?"}}),
    ]  # fmt: skip
    pipe = subprocess.PIPE
    argv = [sys.executable, *command(file)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        answers = []
        for number, (method, params) in enumerate(asked):
            request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            print(json.dumps(request), file=process.stdin, flush=True)
            answers.append(json.loads(process.stdout.readline()))
        rest, printed = process.communicate()
    assert answers[1]["result"]["content"][0]["text"] == "done"
    assert rest == "" and "from a tool" in printed and "from its child" in printed


def test_an_agent_as_a_server_over_http_for_another_agent(agent_file: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, *command(agent_file, "--http")], stderr=subprocess.PIPE, text=True
    )
    try:
        line = next(line for line in process.stderr if line.startswith("MCP server:"))
        with McpTools(url=line.split()[-1]) as server:
            script: list[Any] = [tool_call("ask_calc_bot", question="2+2?"), "done"]
            agent = Agent(name="a", tools=server.tools, engine=ScriptedEngine(script))
            (call,) = agent.run_sync("go").trajectory.turns[0].tool_calls
            assert call.result["output"] == "It is 4."
        port = int(line.split()[-1].rpartition(":")[2].partition("/")[0])
        with socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100_000)
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")  # an endless head
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_port_without_http(agent_file: Path) -> None:
    with pytest.raises(BadInput, match="--port is for --http"):
        serve_mcp(str(agent_file), port=1)
