"""RunContext: the public state of a run, for tools, hooks, environments and instructions.

Made by run_state.py, one for each run. A tool asks for it with a parameter annotated `RunContext`,
which the model does not see.
"""

import threading
from dataclasses import dataclass, field
from typing import Any, Generic

from typing_extensions import TypeVar

from cray_agents.ports import ChatEngine
from cray_agents.records import Message, Reward, Task, digest

#: The type of what the caller of a run gives its tools, hooks and instructions: `run(deps=...)`.
Deps = TypeVar("Deps", default=Any)

_REWARDING = threading.Lock()  # tools of one turn run at the same time, in threads


@dataclass
class RunContext(Generic[Deps]):
    """A run in progress. `deps` is the caller's `run(deps=...)`, for tools to share.

    `messages` is the conversation so far, system message first: read it, do not change it. `turn`
    counts model calls from 0. `input` is a text, also where the task's is a list of messages.
    `environment` is the run's own, if its agent has one. The run asks
    `engine` for `model`, with the sampling `seed` if there is one. `agent` names the agent that
    speaks, also after a handoff.
    """

    run_id: str
    agent: str
    input: str
    task: Task | None = None
    deps: Deps = None  # type: ignore[assignment]  # `run` without deps
    environment: Any = None
    messages: list[Message] = field(default_factory=list)
    turn: int = 0
    rewards: list[Reward] = field(default_factory=list)
    engine: ChatEngine | None = None
    model: str = ""
    seed: int | None = None
    children: int = 0

    def reward(self, value: float, name: str = "step") -> None:
        """Reward the present turn, beside the run's reward functions.

        Rewards of one turn under one name add up.
        """
        with _REWARDING:
            same = [r for r in self.rewards if (r.name, r.turn) == (name, self.turn)]
            total = sum(r.value for r in same) + float(value)
            given = Reward(name=name, value=total, source="environment", turn=self.turn)
            self.rewards[:] = [*(r for r in self.rewards if r not in same), given]

    def child(self) -> dict[str, Any]:
        """Id and seed of a sub-agent's run: the same again when this run is repeated."""
        self.children += 1
        made = digest([self.run_id, self.children], 24)
        return {"run_id": f"run_{made}", "seed": None if self.seed is None else int(made[:7], 16)}
