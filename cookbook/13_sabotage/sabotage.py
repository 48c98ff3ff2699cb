"""13: twelve failures that other tools keep quiet about, made on purpose, and each caught.

    python cookbook/13_sabotage/sabotage.py [--only NAME ...]

An agent with a tiny model is warmed up as in 00. Then each failure is switched on in turn, either
in what a user gives (data, rewards, a chat template) or inside the platform's own processes
(sitecustomize.py breaks one function of them). The table says what caught it, after how many
seconds, and with which message. Exit code 1 if one went through. A few minutes on two cores.
"""

import json
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cray_agents import (
    Agent,
    DatasetRecipe,
    Hyperparameters,
    Message,
    ModelVersion,
    Platform,
    Run,
    Task,
    reward,
)
from cray_agents.errors import NotFound
from cray_agents.tools.calculator import calculator

HERE = Path(__file__).parent
QUICK = Hyperparameters(steps=4, learning_rate=5e-3, warmup_steps=0, schedule="constant")

agent = Agent(
    name="calculator",
    model="calc",
    instructions="Use the calculator. Answer with the number.",
    tools=[calculator],
    max_turns=2,
    max_tokens=40,
)
TASKS = [
    Task(input=f"What is {a} {operator} {b}?", target=str(eval(f"{a}{operator}{b}")))
    for a, operator, b in [(n, "+-*"[n % 3], 7 * n % 90 + 10) for n in range(10, 58)]
]


def demonstration(task: Task, thought: str = "") -> list[Message]:
    """Return the conversation of a perfect agent, which says `thought` before it calls."""
    expression = task.input.removeprefix("What is ").removesuffix("?")
    call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    called: Message = {
        "role": "assistant",
        "content": thought,
        "tool_calls": [{"id": "0", "type": "function", "function": call}],
    }
    return [
        {"role": "system", "content": agent.instructions},
        {"role": "user", "content": task.input},
        called,
        {"role": "tool", "tool_call_id": "0", "content": str(task.target)},
        {"role": "assistant", "content": str(task.target)},
    ]


SHOWN = [demonstration(task) for task in TASKS]


@reward
def right(run: Run) -> float:
    """Whether the answer is the target."""
    return float(run.output == run.target)


@dataclass
class Site:
    """A platform, its warm version of the model, and the switch of the broken parts."""

    platform: Platform
    home: Path
    warm: ModelVersion

    @contextmanager
    def broken(self, name: str):
        """Switch a failure of sitecustomize.py on for the block."""
        switch = self.home / "sabotage" / "switch"
        switch.write_text(name)
        try:
            yield
        finally:
            switch.unlink()

    async def dataset(self, shown: list[list[Message]] = SHOWN, **recipe: object) -> str:
        """Build a training set of demonstrations."""
        given = {"tokenizer": "calc", "tools": agent.tool_schemas, **recipe}
        made = await self.platform.build_dataset(DatasetRecipe(demonstrations=shown, **given))
        return str(made["id"])

    async def train(
        self, parent: ModelVersion, dataset: str, hyper: Hyperparameters = QUICK, **spec: object
    ) -> ModelVersion:
        """Train a version, and register it. Raises JobError."""
        job = await self.platform.submit_job(
            dataset=dataset, parent=parent.id, hyperparameters=hyper, **spec
        )
        job = await self.platform.wait_for(job, on_progress=lambda status: None)
        return await self.platform.register(parent.name, str(job.checkpoint))

    async def prove(self, version: ModelVersion) -> str:
        """Load a version and prove it; return the message of its refusal."""
        try:
            report = await self.platform.stage(version, force=True, holder="sabotage")
        except Exception as error:
            return str(error)
        with suppress(NotFound):
            await self.platform.renew("sabotage", 0)
        return str(report)
