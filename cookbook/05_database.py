"""05: an environment: a shop's database, which an agent keeps by SQL, with a reward for each turn.

    python cookbook/05_database.py [--seed N] [--quick]

"3 tea were sold. How many are there now?" The agent has one tool, `query`, and takes three turns:
it changes the table, looks, and answers. Each run has a shop of its own (`reset`, `teardown`), and
what one query changed, the next one finds. The SQL is the model's, so SQLite runs in the sandbox:
no other file, no network, limits on time and memory.

Rewards are given to turns, and method grpo uses them so: a query that puts the shop right earns a
quarter of a point there, one that spoils it again loses it, and the right answer earns the rest in
the last turn. A run that did the first half well is taught that it did, though its answer is wrong.

The model is tiny, made here, and warmed up on demonstrations until it succeeds now and then. It
learns this one pattern of SQL and no more; docs/cookbook.md has what was seen. For questions of
many kinds take a model that has read some SQL: start a platform with it (docs/cluster.md), and give
the loop no demonstrations. `--quick` does little of everything, in about a minute.
"""

import argparse
import json
import random
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from cray_agents import (
    GRPO,
    Agent,
    Data,
    Environment,
    Loop,
    Message,
    PromotionTest,
    Run,
    RunContext,
    Sampling,
    Stop,
    Task,
    TaskSet,
    ToolError,
    Training,
    local_platform,
    reward,
    tool,
)
from cray_agents.loop import WarmUp
from cray_agents.testing import make_tiny_model
from cray_agents.tools.sandbox import Sandbox

GOODS = ["tea", "milk", "rice", "salt", "soap", "wine", "corn", "figs"]
SEEN = "Table items(name, stock)."
SHOP = 0.25  # of a point, for a shop that is put right; the rest is for the answer

# one statement on shop.db, undone if it leaves no shop; tells what it found or changed, and
# what the shop holds afterwards
SQLITE = """
import json, sqlite3, sys
shop = sqlite3.connect("shop.db", isolation_level=None)
shop.execute("BEGIN")
done = shop.execute(sys.stdin.read())
told = done.fetchmany(20) if done.description else f"rows changed: {done.rowcount}"
items = shop.execute("SELECT name, stock FROM items ORDER BY name").fetchall()
shop.execute("COMMIT")
print(json.dumps([told, items]))
"""


class Shop(Environment):
    """A shop of this run's own: a database in a folder of its own."""

    sandbox = Sandbox(seconds=10)

    async def reset(self, task: Task, context: RunContext) -> str:
        """Stock the shop."""
        self.folder = tempfile.TemporaryDirectory(prefix="shop-")
        self.wanted = task.metadata["after"]
        self.items = dict(task.metadata["before"])
        with closing(sqlite3.connect(Path(self.folder.name) / "shop.db")) as shop, shop:
            shop.execute("CREATE TABLE items (name TEXT PRIMARY KEY, stock INTEGER)")
            shop.executemany("INSERT INTO items VALUES (?, ?)", self.items.items())
        return SEEN

    @tool
    async def query(self, sql: str, context: RunContext) -> str:
        """Run one SQL statement.

        Args:
            sql: for SQLite.
        """
        before = self.items
        told, self.items = await self._run(sql)
        better = (self.items == self.wanted) - (before == self.wanted)
        if better:
            context.reward(SHOP * better, "shop")
        return told if isinstance(told, str) else json.dumps(told)

    def teardown(self) -> None:
        """Close the shop."""
        self.folder.cleanup()

    async def _run(self, sql: str) -> tuple[Any, dict[str, int]]:
        """What SQLite said, and what the shop holds now. Raises ToolError, in its words."""
        argv = [sys.executable, "-c", SQLITE]
        done = await self.sandbox.run(argv, stdin=sql, workdir=self.folder.name)
        if done.returncode != 0:
            raise ToolError(done.stderr.strip().splitlines()[-1] if done.stderr else done.text)
        told, items = json.loads(done.stdout)
        return told, dict(items)


agent = Agent(
    name="shopkeeper",
    model="shop",
    instructions="Keep the shop's table. Answer with the number.",
    environment=Shop,
    max_turns=4,
    max_tokens=64,
    temperature=0.0,  # when people ask; the loop's training runs sample at 1
)


@reward
def answer(run: Run) -> float:
    """The right number; the rest of the point is the shop's to give."""
    return (1 - SHOP) * (run.task is not None and run.output == run.task.target)


# ---- the tasks


def order(draw: random.Random) -> Task:
    """Something was sold, or came in."""
    before = {name: draw.randrange(30, 70) for name in sorted(draw.sample(GOODS, 4))}
    name, count, sold = draw.choice(list(before)), draw.randrange(1, 30), draw.random() < 0.5
    left = before[name] + (-count if sold else count)
    return Task(
        input=f"{count} {name} {'were sold' if sold else 'came in'}. How many are there now?",
        target=str(left),
        metadata={"before": before, "after": before | {name: left}, "sold": sold},
    )


def solution(task: Task) -> list[str]:
    """The two queries of a perfect agent."""
    count, name = task.text.split()[:2]
    sign = "-" if task.metadata["sold"] else "+"
    return [
        f"UPDATE items SET stock = stock {sign} {count} WHERE name = '{name}'",
        f"SELECT stock FROM items WHERE name = '{name}'",
    ]


def demonstration(task: Task) -> list[Message]:
    """A scripted run of a perfect agent."""
    said: list[Message] = [
        {"role": "system", "content": agent.instructions},
        {"role": "user", "content": f"{task.input}\n\n{SEEN}"},
    ]
    told = ["rows changed: 1", f"[[{task.target}]]"]
    for number, (sql, result) in enumerate(zip(solution(task), told, strict=True)):
        function = {"name": "query", "arguments": json.dumps({"sql": sql})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        said += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
    return [*said, {"role": "assistant", "content": task.target}]


# ---- the loop


def make_loop(seed: int = 0, quick: bool = False) -> Loop:
    """GRPO on turns, after a warm-up until runs succeed now and then.

    The band begins above what a shop that is put right is worth: some answers must be right, too,
    or the loop learns to put the shop right and to leave the rest. A run is some eighty tokens. A
    model that is sure of each by 0.97 makes one run in ten right at temperature 1, and most that it
    is taught is noise; at 0.6 the runs are about as often right as those that are judged.
    """
    count = 60 if quick else 2000
    tasks = TaskSet.from_generator(order, count, seed=seed, holdout=0.1 if quick else 0.04)
    shown = [task for task in tasks if task.split == "train"][: 24 if quick else 160]
    imitating = Training(
        steps=10 if quick else 60,
        learning_rate=2e-3,
        warmup_steps=10,
        order="weighted",
        seed=1000 * (seed + 1),
    )
    steps = 4 if quick else 24
    return Loop(
        agent,
        tasks,
        rewards=[answer],
        name=f"shopkeeper-{seed}",
        method=GRPO(
            group_size=4 if quick else 8,
            tasks_per_iteration=4 if quick else 48,
            evaluate_every=1 if quick else 2,
            clip_high=0.28,
            training=Training(
                steps=steps,
                batch_size=48,
                learning_rate=5e-4,
                warmup_steps=steps,
                adam_beta2=0.99,
                seed=1000 * (seed + 1),
            ),
        ),
        # a query is a process
        sampling=Sampling(temperature=0.6, seed=seed, concurrency=16, dynamic_sampling=0.25),
        data=Data(demonstrations=[(demonstration(task), {}) for task in shown]),
        warm_up=WarmUp(
            imitating,
            then=imitating.model_copy(update={"steps": 20}),
            band=(0.0, 1.0) if quick else (0.35, 0.65),
        ),
        promotion=PromotionTest(),  # rewards are from 0 to 1
        stop=Stop(target=None if quick else 0.95),
    )


loop = make_loop()  # for `cray-agents loop`


def main() -> None:
    """Make the model, and run the loop; the same command goes on where it stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if not given.quick:
        print("some ten minutes on two cores, half of it the warm-up", file=sys.stderr)
    loop = make_loop(given.seed, given.quick)
    home = Path(".cray-agents") / f"cookbook-05{'-quick' if given.quick else ''}-{given.seed}"
    model = make_tiny_model(
        home / "seed-model", loop.data.demonstrations, tools=agent.tool_schemas, seed=given.seed
    )
    with local_platform(home, model=model, name=agent.model) as loop.platform:
        for done in loop.run_sync(1 if given.quick else 12):
            told = f"{done.holdout_success:.3f}" if done.holdout_tasks else "passed on"
            print(done.iteration, done.version, told, done.note, flush=True)


if __name__ == "__main__":
    main()
