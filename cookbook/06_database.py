"""06: an environment: a shop's database, which an agent keeps by SQL, with a reward for each turn.

    python cookbook/06_database.py [--quick]

"3 tea were sold. How many are there now?" The agent has one tool, `query`, and takes three turns:
it changes the table, looks, and answers. Each run has a shop of its own (`reset`, `teardown`), and
what one query changed, the next one finds. The SQL is the model's, so SQLite runs in the sandbox:
no other file, no network, limits on time and memory.

Rewards are given to turns, and method grpo uses them so: a query that puts the shop right earns
half a point there, one that spoils it again loses it, and the right answer earns the other half in
the last turn. A run that did the first half well is taught that it did, though its answer is wrong.

The model is tiny, made here, and shown a few demonstrations first. It learns this one pattern of
SQL and no more: seen were held-out rewards of 0.32 before, and 0.46, 0.47, 0.50 after the first
three generations. For questions of many kinds take a model that has read some SQL: start a platform
with it (10_cluster.py) and give the loop no demonstrations. `--quick` does little of everything, in
about a minute.
"""

import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from cray_agents import (
    Agent,
    Environment,
    Hyperparameters,
    Loop,
    PromotionTest,
    Run,
    RunContext,
    Task,
    TaskSet,
    reward,
    tool,
)
from cray_agents.errors import ToolError
from cray_agents.records import Message
from cray_agents.tools.sandbox import Sandbox
from cray_agents.training import Policy
from cray_agents.warmup import WarmUp, warm_up

GOODS = ["tea", "milk", "rice", "salt", "soap", "wine", "corn", "figs"]
SEEN = "Table items(name, stock)."

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
        before = task.metadata["before"]
        await self._run("CREATE TABLE items (name TEXT PRIMARY KEY, stock INTEGER)")
        values = ", ".join(f"('{name}', {stock})" for name, stock in before.items())
        _, self.items = await self._run(f"INSERT INTO items VALUES {values}")
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
            context.reward(0.5 * better, "shop")
        return told if isinstance(told, str) else json.dumps(told)

    def teardown(self) -> None:
        """Close the shop."""
        self.folder.cleanup()

    async def _run(self, sql: str) -> tuple[Any, dict[str, int]]:
        """What SQLite said, and what the shop holds now. Raises ToolError, in its words."""
        argv = [sys.executable, "-c", SQLITE]
        done = await self.sandbox.run(argv, stdin=sql, workdir=self.folder.name)
        if done.returncode != 0:
            raise ToolError(done.stderr.strip().splitlines()[-1] if done.stderr else done.shown)
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
    """Half a point for the right number; the other half is the shop's to give."""
    return 0.5 * (run.task is not None and run.output == run.task.target)


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
    count, name = task.input.split()[:2]
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
    """GRPO on turns."""
    count = 60 if quick else 2000
    tasks = TaskSet.from_generator(order, count, seed=seed, holdout=0.1 if quick else 0.04)
    shown = [task for task in tasks if task.split == "train"][: 24 if quick else 60]
    return Loop(
        agent,
        tasks,
        rewards=[answer],
        method="grpo",
        attempts=4,
        tasks_per_generation=4 if quick else 48,
        resample=0.25,
        hyperparameters=Hyperparameters(
            steps=4 if quick else 24,
            batch_size=32,
            learning_rate=3e-4,
            policy=Policy(clip_high=0.28),
        ),
        demonstrations=[(demonstration(task), {}) for task in shown],
        promotion=PromotionTest(),  # rewards are from 0 to 1
        target=None if quick else 0.95,
        concurrency=16,  # a query is a process
        seed=seed,
    )


def warmed_up(loop: Loop, quick: bool = False) -> None:
    """Imitate a few demonstrations, until some runs succeed."""
    first = Hyperparameters(
        steps=40 if quick else 100, learning_rate=2e-3, warmup_steps=10, order="weighted", seed=99
    )
    then = first.model_copy(update={"steps": 20})
    shown = len(loop.demonstrations)
    plan = WarmUp(first, then, demonstrations=shown, more=0, band=(0.2, 0.7), jobs=20)
    warm_up(loop, replace(plan, band=(0.0, 1.0)) if quick else plan)


def make_model(directory: Path) -> None:
    """Write the untrained model; its tokenizer learns its merges from the demonstrations."""
    from cray_agents.trainers.seed_model import make_seed_model, render

    shown = [messages for messages, _ in make_loop().demonstrations]
    make_seed_model(directory, seed=0, corpus=[render(m, agent.tool_schemas) for m in shown])


def main(quick: bool = False) -> None:
    """Make the model, warm it up, run the loop; the same command goes on where it stopped."""
    from cray_agents import local_platform

    loop = make_loop(quick=quick)
    home = Path(".cray-agents") / ("cookbook-06-quick" if quick else "cookbook-06")
    if not (home / "seed-model").exists():
        make_model(home / "seed-model")
    with local_platform(home, model=home / "seed-model", name=agent.model) as loop.platform:
        warmed_up(loop, quick)
        for done in loop.run(1 if quick else 12):
            print(done.generation, done.version, done.holdout_success, done.note or "")


if __name__ == "__main__":
    main("--quick" in sys.argv)
