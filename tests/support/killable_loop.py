"""A loop whose outcomes follow from its names alone, in this process or in ones that can be killed.

    python -m tests.support.killable_loop gateway HOME PORT    a scripted platform
    python -m tests.support.killable_loop loop URL KIND OUT    a loop on it; iterations as JSON
    python -m tests.support.killable_loop users URL            the traffic that live training takes

What a run says follows from its id, and whether it succeeds from its task, attempt and version:
two loops can be compared run by run, whatever happened to one of them.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import uvloop

from cray_agents import GRPO, KTO, Agent, Loop, PromotionTest, Task, TaskSet, Training, reward
from cray_agents.agent.hooks import Hooks
from cray_agents.agent.run_context import RunContext
from cray_agents.iteration import Iteration
from cray_agents.loop.live.schedule import Live
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.processes import die_with_parent
from cray_agents.records import Run, digest
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.in_process_engine import InProcessEngine
from tests.support.loops import grouped
from tests.support.scripted_services import first_version, server_of, start_pool
from tests.support.timed_trainer import TimedTrainer

CLOCKS = {"seconds", "wall", "idle_share"}
SKILL = {1: 0.2, 2: 0.8, 3: 0.6, 4: 0.9}  # by version: how often it succeeds
KINDS: dict[str, dict[str, Any]] = {
    "rft": {},
    "grpo": {"method": GRPO, "group_size": 3, "dynamic_sampling": 0.5},
    "async": {"method": GRPO, "group_size": 3, "max_staleness": 1},
    "watch": {"method": KTO, "live": Live(runs=8, most=8, poll=0.05)},
}
#: As "grpo", with the learning rate that was the default of the first versions.
EARLY = {"grpo-early": KINDS["grpo"] | {"training": Training(steps=1, learning_rate=1e-3)}}
ITERATIONS = 3


@reward
def lucky(run: Run) -> float:
    """Follows from task, attempt and version."""
    version = int(run.model.rpartition("@")[2])
    drawn = int(digest([run.input, run.attempt, run.model], 6), 16) / 16**6
    return float(drawn < SKILL.get(version, 0.9))


def some_tasks(train: int = 60, holdout: int = 60, test: int = 4) -> TaskSet:
    def some(split: Any, first: int, count: int) -> list[Task]:
        return [Task(input=f"say {n}", target=str(n), split=split)
                for n in range(first, first + count)]  # fmt: skip

    return TaskSet([*some("train", 0, train), *some("holdout", 1000, holdout),
                    *some("test", 2000, test)])  # fmt: skip


def site_loop(**changes: Any) -> Loop:
    arguments: dict[str, Any] = {
        "agent": Agent(name="a", model="m", hooks=[Hooks(before_model=signed)]),
        "tasks": some_tasks(),
        "rewards": [lucky],
        "tasks_per_iteration": 12,
        "training": Training(steps=1),
        "promotion": PromotionTest(hidden=0.2, batch=16),
        "concurrency": 8,
        "name": "loop",
    }
    return Loop(**grouped(**arguments | changes))


async def signed(request: dict[str, Any], context: RunContext) -> dict[str, Any]:
    """Lets the engine know which run it is asked for."""
    return request | {"user": context.run_id}


def echo(request: dict[str, Any]) -> str:
    """What was asked, and by which run: no two say the same."""
    return f"{request['messages'][-1]['content']} {request.get('user')}"


def shape(iterations: list[Iteration]) -> list[dict[str, Any]]:
    """Everything but what depends on the clock."""
    return [g.model_dump(mode="json", exclude=CLOCKS) for g in iterations]


async def serve(home: Home, port: int) -> None:
    """The platform, until it is killed."""
    registry = first_version(home)
    pool = Pool([InProcessEngine(ScriptedEngine(echo, delay=0.01))], wait_timeout=2)
    services = Services(home, Store(home), registry, TimedTrainer(home, 0.3), pool)
    await start_pool(pool, home, registry)
    await server_of(create_app(services), port=port).serve()


def live(url: str) -> None:
    """Users ask, and judge: as much as an update takes, once the one before has ended.

    A platform that is away is asked again, and samples no answer a second time.
    """
    with httpx.Client(base_url=url, timeout=120) as client:

        def told(method: str, path: str, **options: Any) -> Any:
            while True:
                try:
                    reply = client.request(method, f"/v1/{path}", **options)
                except httpx.TransportError:
                    pass
                else:
                    if reply.status_code < 500:
                        return reply.raise_for_status().json()
                time.sleep(0.05)

        for update in range(1, ITERATIONS + 1):
            values = [0.0, 1.0] * 4
            random.Random(update).shuffle(values)
            for number, value in enumerate(values):
                run = f"live{update}x{number}"
                asked = {"model": "m", "messages": [{"role": "user", "content": f"say {run}"}]}
                headers = {"X-Run-Id": run, "Idempotency-Key": run}
                told("POST", "chat/completions", json=asked, headers=headers)
                told("POST", f"trajectories/{run}/rewards", json={"value": value})
            while len(told("GET", "loops/loop/iterations")["data"]) <= update:
                time.sleep(0.05)


def main() -> None:
    """One of the processes."""
    die_with_parent(int(os.environ["TEST_PARENT"]))
    if sys.argv[1] == "users":
        live(sys.argv[2])
        return
    if sys.argv[1] == "gateway":
        uvloop.run(serve(Home(Path(sys.argv[2])), int(sys.argv[3])))
        return
    url, kind, out = sys.argv[2:]
    done = list(site_loop(platform=Platform(url), **(KINDS | EARLY)[kind]).run_sync(ITERATIONS))
    Path(out).write_text(json.dumps(shape(done)))


if __name__ == "__main__":
    globals().update(__spec__=None, __file__=None)  # or what it spawns would import all of this
    main()
