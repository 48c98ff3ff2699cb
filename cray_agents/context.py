"""What a tool, a hook or an environment gets to know of the run that it serves.

Made by agent.py, one for each run. A tool asks for it with a parameter annotated `RunContext`,
which the model does not see.
"""

from dataclasses import dataclass, field
from typing import Any

from cray_agents.records import Message, Reward, Task


@dataclass
class RunContext:
    """A run that goes on. `given` is what the caller passed as `context=`, for tools to share.

    `messages` is the conversation so far, system message first: read it, do not change it. `turn`
    counts model calls from 0. `environment` is the run's own, if its agent has one.
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

    def reward(self, value: float, name: str = "step") -> None:
        """Reward the present turn; it is on the run's record, beside what reward functions say."""
        self.rewards.append(
            Reward(name=name, value=float(value), source="environment", turn=self.turn)
        )
