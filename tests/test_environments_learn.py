"""Loops that learn from environments of other frameworks, with real vLLM and Megatron-core.

The short part is one iteration on one of them. CRAY_TEST_ENVIRONMENTS=trl,inspect runs the
campaign on these, `all` on each: a tiny model gets better by its rewards, and does not where they
are shuffled (`make soak`).
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cray_agents import Agent, Loop, TaskSet, Training
from cray_agents.agent import WorkerEnvironment
from cray_agents.config import load_config
from cray_agents.iteration import promoted_holdout_success
from cray_agents.loop import WarmUp
from cray_agents.loop import warm_up as run_warm_up
from cray_agents.loop.methods import RFT
from cray_agents.loop.settings import Data
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import Message, Run, Task
from cray_agents.runtime.datasets.reader import dataset_runs, shards
from cray_agents.runtime.store import Store
from cray_agents.server.platform_process import client, key, serving
from cray_agents.testing import make_tiny_model
from tests.support.environments.echo import COUNT, numbers, question
from tests.support.environments.pythons import venv
from tests.support.environments.workers import HERE, command, openenv_server, worker
from tests.support.loops import grouped

pytestmark = [pytest.mark.vllm, pytest.mark.megatron]

TRAIN, HELD_OUT, SHOWN = 900, 100, 200  # of COUNT; what is shown is in no other part
ITERATIONS = 2


@dataclass(frozen=True)
class EchoKind:
    """Echo in a framework: how its worker is started."""

    adapter: str
    env: str
    options: tuple[str, ...] = ()
    python: str | None = None


KINDS = {
    "trl": EchoKind(
        "trl",
        f"{HERE / 'trl_echo.py'}:Echo",
        (f"rewards={HERE / 'trl_echo.py'}:exact", f"dataset={HERE / 'trl_echo.py'}:rows"),
    ),
    "inspect": EchoKind("inspect", f"{HERE / 'inspect_echo.py'}:echo", (), "inspect"),
    "verifiers": EchoKind(
        "verifiers", str(HERE / "vf_echo.py"), ("agent.harness.id=null",), "verifiers"
    ),
    "openenv": EchoKind("openenv", "", ("text=text", f"seeds={COUNT}"), "openenv"),
}
given = os.environ.get("CRAY_TEST_ENVIRONMENTS", "")
CAMPAIGN = [*KINDS] if given == "all" else [name for name in given.split(",") if name]


def demonstrations() -> list[tuple[list[Message], dict[str, Any]]]:
    """Right answers to questions that are in no other part."""
    return [
        (
            [
                {"role": "user", "content": question(number)},
                {"role": "assistant", "content": number},
            ],
            {},
        )
        for number in numbers()[-SHOWN:]
    ]


def imitating(steps: int) -> Training:
    return Training(
        steps=steps,
        batch_size=16,
        learning_rate=2e-3,
        min_learning_rate=2e-4,
        warmup_steps=min(10, steps),
        schedule="cosine",
        weight_decay=0.1,
        seed=7,
    )


def their_tasks(kind: EchoKind, env: str, folder: Path) -> TaskSet:
    """The environment's own tasks, as its worker lists them, in a train and a holdout split."""
    file = folder / "tasks.jsonl"
    words = [word for option in kind.options for word in ("--option", option)]
    python = None if kind.python is None else venv(kind.python)
    listing = command(kind.adapter, env, "--tasks", file, *words, venv=python)
    done = subprocess.run(listing, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    listed = list(TaskSet.from_jsonl(file, holdout=0.0))
    assert len(listed) == COUNT
    parts: list[Task] = [task.model_copy(update={"split": "train"}) for task in listed[:TRAIN]]
    parts += [
        task.model_copy(update={"split": "holdout"}) for task in listed[TRAIN : TRAIN + HELD_OUT]
    ]
    return TaskSet(parts)


@contextmanager
def learning(name: str, home: Path, **changes: Any) -> Iterator[Loop]:
    """A loop on an environment, its platform and its worker."""
    kind = KINDS[name]
    with ExitStack() as stack:
        env = kind.env or stack.enter_context(openenv_server("echo"))
        tasks = their_tasks(kind, env, home.parent)
        agent = Agent(
            name="echo", model="tiny", max_tokens=12, environment=WorkerEnvironment("theirs")
        )
        fields: dict[str, Any] = {
            "method": RFT,
            "tasks_per_iteration": 256,
            "training": imitating(100),
            "demonstrations": demonstrations(),
            "temperature": 0.5,  # a model of few steps is right when greedy, and never at 1
            "name": "loop",
            **changes,
        }
        loop = Loop(agent, tasks, rewards=[], **grouped(**fields))
        make_tiny_model(home.parent / "seed-model", demonstrations(), seed=1)
        config = load_config({"home": home, "port": 0})
        model = home.parent / "seed-model"
        info = stack.enter_context(serving(config, model=model, name="tiny", ready=True))
        loop.platform = client(info)
        words = [word for option in kind.options for word in ("--option", option)]
        python = None if kind.python is None else venv(kind.python)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CRAY_AGENTS_API_KEY", key(info) or "none")
            options = (*words, "--name", "theirs", "--slots", 4)
            stack.enter_context(worker(loop.platform, kind.adapter, env, *options, venv=python))
        yield loop


def chosen(home: Path, dataset: str) -> set[str]:
    """The runs that are in a training set."""
    return {line["run"] for line in dataset_runs(Home(home), dataset) if line["accepted"]}


def stored(home: Path) -> list[Run]:
    return Store(Home(home)).runs(RunQuery(loop="loop"))


@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("forked_servers")
def test_what_is_trained_on_are_the_tokens_of_the_environments_runs(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with (
        learning(
            "trl",
            home,
            tasks_per_iteration=24,
            training=imitating(10),
            min_reward=0.0,  # whatever the model can do by now
            demonstrations=demonstrations()[:48],
        ) as loop
    ):
        run_warm_up(loop, WarmUp(imitating(20), imitating(5), band=(0.0, 1.0), jobs=1))
        done = list(loop.run_sync(1))
    runs = {run.id: run for run in stored(home) if run.iteration == 1}
    assert len(runs) == 24 == done[1].runs and done[1].failed_runs == 0
    for run in runs.values():
        (reward,) = run.rewards
        assert (reward.name, reward.source) == ("exact", "environment")
        right = run.calls[0].message["content"] == run.task.metadata["number"]
        assert reward.value == float(right)
    names = [path.name for path in Home(home).datasets.glob("ds-*")]
    (dataset,) = [name for name in names if runs.keys() & chosen(home, name)]
    rows = [row for file in shards(Home(home), dataset) for row in pq.read_table(file).to_pylist()]
    of_runs = {row["run_id"]: row for row in rows if row["run_id"] in runs}
    assert of_runs.keys() == runs.keys()
    for name, row in of_runs.items():
        (call,) = runs[name].calls
        assert row["input_ids"] == call.prompt_token_ids + call.token_ids
        assert row["loss_mask"] == [0] * len(call.prompt_token_ids) + [1] * len(call.token_ids)
        assert row["logprobs"][-len(call.token_ids) :] == pytest.approx(call.logprobs)
        assert (row["reward"], row["versions"]) == (runs[name].reward, [call.model])


if CAMPAIGN:

    @pytest.mark.timeout(3600)
    @pytest.mark.usefixtures("forked_servers")
    @pytest.mark.parametrize("name", CAMPAIGN)
    def test_a_tiny_model_gets_better_by_its_rewards(tmp_path: Path, name: str) -> None:
        ends = {}
        for control in (None, "shuffled-rewards"):
            home = tmp_path / str(control) / "home"
            home.parent.mkdir()
            with learning(name, home, control=control) as loop:
                plan = WarmUp(imitating(100), imitating(15), band=(0.4, 0.85), jobs=20)
                run_warm_up(replace(loop, name="warm-up", control=None), plan)
                loop = replace(loop, data=Data())  # they would teach it without rewards
                done = list(loop.run_sync(ITERATIONS))
            series = [iteration.holdout_success for iteration in done]
            print(f"\n{name}, {control or 'true rewards'}: held-out {series}")
            assert all(run.error is None for run in stored(home))
            ends[control] = (series[0], promoted_holdout_success(done))
        (before, after), (_, shuffled) = ends[None], ends["shuffled-rewards"]
        assert after >= before + 0.1
        assert after >= shuffled + 0.1
