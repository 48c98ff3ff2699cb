"""Environments that do wrong in every way, of each framework: errors of theirs, never rewards."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Agent, Platform, Task
from cray_agents.agent import WorkerEnvironment
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import EngineUnavailable
from cray_agents.loop import rollouts
from cray_agents.records import Run
from cray_agents.testing import ScriptedEngine
from tests.support.environments.pythons import venv
from tests.support.environments.workers import HERE, openenv_server, worker
from tests.support.scripted_platform import platform
from tests.test_env_worker import carried_out, stored

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

OWN, DIED = "EnvironmentFailed", "EnvironmentDied"
CROWD = "the environment has 2000 tools: at most 1000"
NAN = r"reward \w+ is nan: must be a finite number"
HUNG = ("EnvironmentTimeout", r"the run took more than \d+ s")


@dataclass(frozen=True)
class BadEnvironment:
    """An environment, the metadata that name its tasks, and the errors of what it does wrong.

    env: as `--env` takes it; the kind of server for OpenEnv. None in errors: the run is a good one.
    """

    adapter: str
    env: str
    errors: dict[str, tuple[str, str] | None]
    key: str
    options: Sequence[str] = ()
    python: str | None = None

    def task(self, way: str) -> Task:
        place: Any = list(self.errors).index(way) if self.key == "idx" else way
        more = {"environment": "crowded" if way == "crowded" else "nasty"}
        return Task(
            input=f"Work: {way}",
            metadata={self.key: place, **(more if self.adapter == "trl" else {})},
        )

    @contextmanager
    def place(self) -> Iterator[str]:
        """Where it is, for `--env`."""
        with ExitStack() as stack:
            if self.adapter == "openenv":
                yield stack.enter_context(openenv_server(self.env))
            else:
                yield f"{HERE / self.env}"


WORLD = (OWN, ".*no world today.*")
KILLED = (DIED, "the environment's process died with signal 9")
LONG = r" 500000\d\d characters: at most 4000000"
BAD = {
    "trl": BadEnvironment(
        "trl",
        "trl_nasty.py:nasties",
        {
            "good": None,
            "reset": WORLD,
            "dies": KILLED,
            "nan": (OWN, NAN),
            "floods": (OWN, "tool submit returned" + LONG),
            "floods first": (OWN, "the first observation has" + LONG),
            "crowded": (OWN, CROWD),
            "wordy": (OWN, r"RuntimeError: it went so:\n.*\n\[\.\.\.\]\n.*\nKeyError: 'the cause'"),
            "hangs": HUNG,
            "leaks": None,
        },
        "nasty",
    ),
    "inspect": BadEnvironment(
        "inspect",
        "inspect_nasty.py:nasties",
        {
            "good": None,
            "reset": WORLD,
            "dies": KILLED,
            "nan": (OWN, NAN),
            "floods": (OWN, "a message of the user has" + LONG),
            "floods first": (OWN, "a message of the user has" + LONG),
            "floods a tool": None,
            "crowded": (OWN, CROWD),
            "hangs": HUNG,
            "leaks": None,
        },
        "sample",
        python="inspect",
    ),
    "verifiers": BadEnvironment(
        "verifiers",
        "vf_nasty.py",
        {
            "good": None,
            "reset": WORLD,
            "hangs": HUNG,
            "dies": KILLED,
            "nan": (OWN, NAN),
            "floods first": (OWN, "a message to the model has" + LONG),
            "leaks": None,
        },
        "idx",
        ["agent.harness.id=null"],
        python="verifiers",
    ),
    "openenv": BadEnvironment(
        "openenv",
        "nasty",
        {
            "good": None,
            "reset": WORLD,
            "nan": (OWN, "reward return is nan.*|no step had a reward"),
            "floods": (OWN, "tool act returned" + LONG),
            "floods first": (OWN, "the first observation has" + LONG),
            "hangs": HUNG,
            "dies": (OWN, ".*"),
        },
        "way",
        python="openenv",
    ),
}


def submit(request: dict[str, Any], version: str) -> Any:
    """Submit 2 to a tool, if there is one, and then say so; or 1 to the server of OpenEnv."""
    tools = [tool["function"]["name"] for tool in request.get("tools") or ()]
    if not tools or request["messages"][-1]["role"] == "tool":
        return "done"
    return tool_call(tools[0], number=1 if tools == ["act"] else 2)


def carry_out(root: Path, bad: BadEnvironment, *ways: str) -> list[Run]:
    """The runs of one worker with one slot; what it says is in `root`/worker.log.

    Those that hang come last, and have a time limit.
    """
    words = [word for option in bad.options for word in ("--option", option)]
    python = None if bad.python is None else venv(bad.python)
    agent = Agent(name="a", model="m", environment=WorkerEnvironment("theirs"))
    tasks = {way: bad.task(way) for way in ways}
    hung = [tasks[way] for way in ways if way == "hangs"]
    with (
        bad.place() as env,
        platform(root / "home", ScriptedEngine(submit)) as where,
        worker(where, bad.adapter, env, *words, "--name", "theirs", "--slots", 1, venv=python) as w,
    ):
        for limit, some in ((None, [t for t in tasks.values() if t not in hung]), (4, hung)):
            with suppress(EngineUnavailable):  # raised where all runs failed
                if some:
                    in_time = agent.override(timeout=limit)
                    asyncio.run(carried_out(Platform(where.url), in_time, some))
    (root / "worker.log").write_text("".join(w.lines))
    runs = {run.task.id: run for run in stored(root / "home")}
    return [runs[task.id] for task in tasks.values()]


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "RETRIES", 0)


@pytest.mark.parametrize("adapter", BAD)
def test_what_environments_do_wrong_is_an_error_and_never_a_reward(
    tmp_path: Path, adapter: str
) -> None:
    bad = BAD[adapter]
    ways = [way for way in bad.errors if (adapter, way) != ("openenv", "dies")]
    for way, run in zip(ways, carry_out(tmp_path, bad, *ways), strict=True):
        check(run, bad.errors[way])
    log = (tmp_path / "worker.log").read_text()
    assert ("processes were left behind" in log) == ("leaks" in bad.errors), log[-4000:]
    commands = map(command_of, Path("/proc").glob("[0-9]*/cmdline"))
    assert not [words for words in commands if words.startswith("sleep\x0098765")]


def test_an_environment_whose_server_dies(tmp_path: Path) -> None:
    (run,) = carry_out(tmp_path, BAD["openenv"], "dies")
    check(run, BAD["openenv"].errors["dies"])


CROWDED = {
    "openenv": BadEnvironment("openenv", "crowded", {"": (OWN, CROWD)}, "way", python="openenv"),
    "verifiers": BadEnvironment(
        "verifiers",
        "vf_crowded.py",
        {"": (OWN, CROWD)},
        "idx",
        ["agent.harness.id=null"],
        python="verifiers",
    ),
    # verifiers itself cuts the result of a tool, and tells the model
    "verifiers with a long result": BadEnvironment(
        "verifiers",
        "vf_crowded.py",
        {"": None},
        "idx",
        ["agent.harness.id=null", "taskset.task.tools.count=1"],
        python="verifiers",
    ),
}


@pytest.mark.parametrize("name", CROWDED)
def test_a_server_of_thousands_of_tools(tmp_path: Path, name: str) -> None:
    (run,) = carry_out(tmp_path, CROWDED[name], "")
    check(run, CROWDED[name].errors[""])


def check(run: Run, expected: tuple[str, str] | None) -> None:
    """A good run with a reward, or one that its environment failed, without any."""
    if expected is None:
        assert (run.error, run.reward) == (None, 1.0)
        assert all(len(str(call.messages)) < 100_000 for call in run.calls)
        return
    kind, message = expected
    assert run.error is not None, expected
    assert (run.error.type, run.error.infrastructure, run.stop_reason) == (kind, True, "error")
    assert re.fullmatch(message, run.error.message, re.DOTALL), run.error.message
    assert not run.rewards


def command_of(path: Path) -> str:
    """A command line; "" if its process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
