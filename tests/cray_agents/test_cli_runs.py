"""`cray-agents runs`: a real store, listed, shown, compared and counted, for people and as JSON."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cray_agents.cli.runs import age
from cray_agents.cli.screen import console
from cray_agents.paths import Home
from cray_agents.records import (
    Event,
    ModelCall,
    Redaction,
    Reward,
    Run,
    RunError,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)
from cray_agents.runtime.store import Store
from tests.support.command_line import cli as command
from tests.support.command_line import refused

WILD = "It is [bold]{}[/]. \x1b[31mred\x07"
LONG_ID = "run_0190abcdef1234567890abcdef1234567890abcdef"


def cli(*words: object, home: Path) -> str:
    done = command("runs", *words, "--home", home, cwd=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def process(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "cray_agents", "runs", *map(str, words)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("CRAY_AGENTS_")} | environment
    return subprocess.run(argv, env=env, capture_output=True, text=True)


def events(run_id: str, answer: str, **more: Any) -> list[Event]:
    """A run of two model calls, the first of which calls a tool."""
    system = {"role": "system", "content": "Calculate."}
    user = {"role": "user", "content": "What is 47 + 385?"}
    function = {"name": "calculator", "arguments": '{"expression": "47 + 385"}'}
    asked = {
        "role": "assistant",
        "content": None,
        "reasoning": "a sum",
        "tool_calls": [{"id": f"{run_id}-t", "type": "function", "function": function}],
    }
    told = {"role": "tool", "tool_call_id": f"{run_id}-t", "content": "432"}
    said = {"role": "assistant", "content": WILD.format(answer)}
    done = ToolCall(id=f"{run_id}-t", result=432, seconds=0.002, **function)
    fields: dict[str, Any] = {
        "agent": "calc",
        "model": "calc@3",
        "input": user["content"],
        "output": answer,
        "stop_reason": StopReason.completed,
        "started": 1_700_000_000.0,
        "seconds": 1.25,
        **more,
    }
    run = Run(
        id=run_id,
        trajectory=Trajectory(
            messages=[system, user, asked, told, said],
            turns=[Turn(call_id=f"{run_id}-1", tool_calls=[done]), Turn(call_id=f"{run_id}-2")],
        ),
        **fields,
    )

    def call(number: int, messages: list[Any], message: Any) -> Event:
        body = ModelCall(
            id=f"{run_id}-{number}",
            run_id=run_id,
            model="calc@3",
            messages=messages,
            message=message,
            prompt_token_ids=[11, 12, 13],
            token_ids=[14, ord(answer[-1])],
            logprobs=[-0.125, -0.5],
            finish_reason="stop",
            started=1_700_000_000.0 + number,
            seconds=0.31,
        )
        return Event(
            id=body.id, run_id=run_id, kind="call", body=body.model_dump(mode="json"), time=1.0
        )

    described = Event(
        id=f"{run_id}.run", run_id=run_id, kind="run", body=run.model_dump(mode="json"), time=1.0
    )
    return [described, call(1, [system, user], asked), call(2, [system, user, asked, told], said)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    task = Task(input="What is 47 + 385?", target="432", metadata={"kind": "sum"})
    good = events(
        LONG_ID,
        "432",
        rewards=[Reward(name="correct", value=1.0), Reward(name="form", value=0.5, source="judge")],
        task=task,
        loop="sums",
        iteration=2,
        attempt=1,
        tags=["a", "b"],
        redacted=[Redaction(kind="email", count=2)],
    )
    bad = events(
        "run_b",
        "431",
        rewards=[Reward(name="correct", value=0.0)],
        loop="sums",
        iteration=3,
        task=task,
        started=1_700_000_100.0,
        stop_reason=StopReason.error,
        error=RunError(type="EngineError", message="it died\nat once", infrastructure=True),
    )
    lost = events("run_c", "432", agent="other")[:1]  # its calls were not recorded

    async def fill() -> None:
        store = Store(Home(root))
        for some in (good, bad, lost):
            await store.append(some)
        await store.close()

    asyncio.run(fill())
    return root


def test_list(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 200)
    lines = cli("list", home=home).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["run_b", "run_c", LONG_ID]
    headings = "id agent model stop reason reward turns tokens age input output"
    assert " ".join(lines[0].split()) == headings
    row = next(line for line in lines if line.startswith(LONG_ID)).split()
    assert row[1:7] == ["calc", "calc@3", "completed", "1.500", "2", "10"]
    assert row[7].endswith("d") and row[-1] == "432"
    monkeypatch.setattr(console, "_width", 60)  # a block each
    about = (
        "  agent calc, model calc@3, stop reason completed, reward 1.500, turns 2, tokens 10, age "
    )
    assert f"{LONG_ID}\n{about}" in cli("list", home=home)
    assert len(cli("list", "--limit", 2, home=home).splitlines()) == 4


def test_lists_are_filtered_and_paged(home: Path) -> None:
    def ids(*words: object) -> list[str]:
        return [row["id"] for row in json.loads(cli("list", *words, "--json", home=home))]

    assert ids() == ["run_b", "run_c", LONG_ID]
    assert ids("--order", "oldest") == [LONG_ID, "run_c", "run_b"]
    assert ids("--limit", 1) == ["run_b"]
    assert ids("--limit", 1, "--after", "run_b") == ["run_c"]
    assert ids("--where", "tag=a reward>=1") == [LONG_ID]
    assert ids("--where", "error=*") == ["run_b"]
    assert ids("--where", "iteration=2,3") == ["run_b", LONG_ID]
    assert ids("--where", 'text="IT IS [BOLD]431"') == ["run_b"]
    row = json.loads(cli("list", "--where", "tag=b", "--json", home=home))[0]
    assert (row["reward"], row["turns"], row["tokens"]) == (1.5, 2, 10)
    assert (row["loop"], row["iteration"], row["redacted"]) == ("sums", 2, True)


def test_show(home: Path) -> None:
    told = cli("show", LONG_ID, home=home)
    for line in [
        LONG_ID,
        "  loop        sums",
        "  tags        a, b",
        "  target      432",
        "    kind      sum",
        "Turn 1  calc@3  3 + 2 tokens  0.31 s  stop",
        "    a sum",
        '  calls calculator({"expression": "47 + 385"})  0.002 s',
        "    432",
        "    It is [bold]432[/]. ␛[31mred␇",  # as it is, and harmless
        "reward  correct = 1  (function)",
        "reward  form = 0.5  (judge)",
        "reward  1.5 in all",
        "redacted  2 of the kind email",
        "2 calls, 6 + 4 tokens, 1.25 s",
    ]:
        assert line in told.splitlines(), line
    assert told.count("432\n") >= 3 and "14(-0.125)" not in told
    assert "\x1b" not in told and "\x07" not in told
    tokens = cli("show", LONG_ID, "--tokens", home=home)
    assert "      11 12 13" in tokens.splitlines() and "14(-0.125) 50(-0.500)" in tokens
    failed = cli("show", "run_b", home=home)
    assert "error   EngineError, the infrastructure's: it died\n        at once" in failed
    assert "call run_c-2, which is not recorded" in cli("show", "run_c", home=home)


def test_no_recorded_text_drives_the_terminal(tmp_path: Path) -> None:
    """C0, DEL, C1 and bidi overrides, in every text of a run, by every command that prints one."""
    codes = (*range(9), *range(11, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F),
             *range(0x2066, 0x206A))  # fmt: skip
    wild = "".join(map(chr, codes))
    task = Task(input=f"x{wild}", target=f"y{wild}", metadata={f"k{wild}": f"v{wild}"})
    error = RunError(type="E", message=f"no{wild}")
    told = events("run_w", f"said{wild}", agent=f"a{wild}", tags=[f"t{wild}"], task=task)
    told += events("run_x", "432", error=error, stop_reason=StopReason.error)
    store = Store(Home(tmp_path))
    asyncio.run(store.append(told))
    asyncio.run(store.close())
    for words in (
        ("list",),
        ("list", "--json"),
        ("show", "run_w"),
        ("show", "run_w", "--json"),
        ("show", "run_x"),
        ("stats", "--by", "agent"),
        ("show", f"run_{wild[1:]}"),
    ):
        done = command("runs", *words, "--home", tmp_path, cwd=tmp_path)
        assert not set(done.stdout + done.stderr) & set(wild), words
    assert json.loads(cli("show", "run_w", "--json", home=tmp_path))["output"] == f"said{wild}"
    done = process("show", "run_w", "--home", tmp_path, FORCE_COLOR="1", COLUMNS="60")
    assert not set(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)) & set(wild)


def test_show_as_json_is_the_whole_record(home: Path) -> None:
    run = Run.model_validate_json(cli("show", LONG_ID, "--json", home=home))
    assert run.calls[0].token_ids == [14, 50] and run.reward == 1.5


def test_stats(home: Path) -> None:
    rows = json.loads(cli("stats", "--by", "agent", "--json", home=home))
    assert [(row["agent"], row["runs"], row["rewarded"]) for row in rows] == [
        ("calc", 2, 2), ("other", 1, 0),
    ]  # fmt: skip
    assert rows[0]["mean_reward"] == 0.75 and rows[0]["sampled_tokens"] == 8
    (row,) = json.loads(cli("stats", "--where", "loop=sums iteration=3", "--json", home=home))
    assert (row["runs"], row["errors"], row["infrastructure"]) == (1, 1, 1)
    assert "mean reward" in cli("stats", "--by", "agent,model", home=home)


def test_mistakes(tmp_path: Path) -> None:
    Home(tmp_path).segments.mkdir()
    for words, said in {
        ("show", "run_[x]"): "run_[x]",
        ("list", "--order", "best"): "newest",
        ("list", "--after", "run_x"): "run_x",
        ("stats", "--by", "colour"): "colour",
    }.items():
        refused(command("runs", *words, "--home", tmp_path, cwd=tmp_path), said)


def test_ages() -> None:
    given = {0.4: "0s", 59: "59s", 119: "119s", 120: "2m", 7199: "119m", 7200: "2h", 200_000: "2d"}
    assert {seconds: age(seconds) for seconds in given} == given
    assert age(-5) == "0s"  # another host's clock
