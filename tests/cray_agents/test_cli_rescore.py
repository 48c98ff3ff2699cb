"""`runs rescore`: a changed reward function over stored runs."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.records import Event, Reward, Run, RunError, StopReason
from cray_agents.runtime.store import Store
from tests.support.command_line import cli, refused

CODE = """
from cray_agents import reward

@reward(weight=2.0)
def length(run):
    if run.output == "bad":
        raise ValueError("no length")
    return len(run.output)

def by_turn(run, world):
    return 0.0

def made():
    kept = []
    def closure(run):
        return len(kept)
    return closure

closed = made()

class Judge:
    def __call__(self, run):
        return 1.0

judge = Judge()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three runs of a loop, one outside it, one that its infrastructure failed."""
    home = tmp_path / "home"
    (tmp_path / "rewards.py").write_text(CODE)

    async def write() -> None:
        store = Store(Home(home))
        for name, output, loop in (("a", "x", "l"), ("b", "xyz", "l"), ("c", "bad", "l"),
                                   ("d", "other", None), ("e", "", "l")):  # fmt: skip
            failed = RunError(type="EngineTimeout", message="late", infrastructure=True)
            run: Run[Any] = Run(
                id=name,
                agent="a",
                model="m@1",
                input="q",
                output=output,
                stop_reason=StopReason.completed,
                loop=loop,
                rewards=[Reward(name="length", value=1.0)] if output else [],
                error=None if output else failed,
            )
            body = run.model_dump(mode="json")
            await store.append([Event(id=name, run_id=name, kind="run", body=body)])
        await store.close()

    asyncio.run(write())
    return home


def rewards(home: Path, run_id: str) -> dict[str, float]:
    store = Store(Home(home))
    try:
        return {reward.source: reward.value for reward in store.run(run_id).rewards}
    finally:
        asyncio.run(store.close())


def rescore(home: Path, *words: str, target: str = "rewards.py:length") -> Any:
    argv = ["runs", "rescore", "--home", home, "--where", "loop=l", "--reward", target, *words]
    return cli(*argv, cwd=home.parent)


def test_new_rewards_stand_beside_the_old(root: Path) -> None:
    done = rescore(root, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["runs"], report["scored"], report["changed"]) == (4, 2, 2)
    assert (report["failed"], report["infrastructure"]) == (1, 1)
    assert (report["mean_before"], report["mean_after"]) == (1.0, 4.0)
    assert "no length" in report["failures"][0]
    assert rewards(root, "b") == {"function": 1.0}
    assert rescore(root).returncode == 0
    assert rewards(root, "b") == {"function": 1.0, "rescore": 6.0}
    assert rewards(root, "d") == {"function": 1.0}  # of no loop
    again = json.loads(rescore(root, "--json").stdout)
    assert (again["changed"], again["same"]) == (0, 2)
    assert rescore(root, "--source", "function").returncode == 0
    assert rewards(root, "a") == {"function": 2.0, "rescore": 2.0}


def test_an_outline_lists_turns(tmp_path: Path) -> None:
    call: dict[str, Any] = {
        "id": "c",
        "run_id": "r",
        "model": "m@1",
        "messages": [{"role": "user", "content": "q"}],
    }
    call |= {"message": {"role": "assistant", "content": "answer"}, "token_ids": [1, 2, 3]}

    async def write() -> None:
        store = Store(Home(tmp_path / "home"))
        body = {**call, "logprobs": [-1.0] * 3, "prompt_token_ids": [9], "started": 1.0}
        await store.append([Event(id="c", run_id="r", kind="call", body=body)])
        await store.close()

    asyncio.run(write())
    argv = ["runs", "show", "--outline", "r", "--home", tmp_path / "home"]
    (mark,) = json.loads(cli(*argv, "--json", cwd=tmp_path).stdout)
    assert (mark["turn"], mark["prompt"], mark["sampled"], mark["messages"]) == (1, 1, 3, 1)
    assert "sampled" in cli(*argv, cwd=tmp_path).stdout
    assert cli("runs", "show", "--outline", "none", *argv[4:], cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("rewards.py:by_turn", "by_turn(run, world) does not take a run alone"),
        ("rewards.py:closed", "was made within another function"),
        ("rewards.py:judge", "no plain function but a Judge"),
        ("rewards.py:none", "has no 'none'"),
        ("rewards.py", "FILE.py:NAME"),
        ("nowhere.py:length", "no such file"),
        ("no_such_module:length", "no module 'no_such_module'"),
    ],
)
def test_what_depends_on_more_than_the_run_is_refused(root: Path, target: str, reason: str) -> None:
    refused(rescore(root, target=target), reason)
    assert rewards(root, "a") == {"function": 1.0}
