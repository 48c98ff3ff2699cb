"""What a tool, a hook, an environment or an instructions function gets to know of its run.

Made by agent.py, one for each run. A tool asks for it with a parameter annotated `RunContext`,
which the model does not see.
"""

from dataclasses import dataclass, field
from typing import Any

from cray_agents.ports import ChatEngine
from cray_agents.records import Message, Reward, Task, digest


@dataclass
class RunContext:
    """A run that goes on. `given` is what the caller passed as `context=`, for tools to share.

    `messages` is the conversation so far, system message first: read it, do not change it. `turn`
    counts model calls from 0. `environment` is the run's own, if its agent has one. `engine` and
    `model` are what the run asks, with the sampling `seed` if it was given one; `agent` is who
    speaks, also after a handoff.
    """

    run_id: str
    agent: str
    input: str
    task: Task | None = None
    given: Any = None
    environment: Any = None
    messages: list[Message] = field(default_factory=list)
    turn: int = 0
    rewards: list[Reward] = field(default_factory=list)
    engine: ChatEngine | None = None
    model: str = ""
    seed: int | None = None
    children: int = 0

    def reward(self, value: float, name: str = "step") -> None:
        """Reward the present turn; it is on the run's record, beside what reward functions say.

        What is given to one turn under one name adds up.
        """
        same = [r for r in self.rewards if (r.name, r.turn) == (name, self.turn)]
        total = sum(r.value for r in same) + float(value)
        given = Reward(name=name, value=total, source="environment", turn=self.turn)
        self.rewards[:] = [*(r for r in self.rewards if r not in same), given]

    def child(self) -> dict[str, Any]:
        """Id and seed of a sub-agent's run: the same again when this run is done again."""
        self.children += 1
        made = digest([self.run_id, self.children], 24)
        return {"run_id": f"run_{made}", "seed": None if self.seed is None else int(made[:7], 16)}
