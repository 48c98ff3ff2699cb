"""What an Agent may be made of: what cannot be meant is told when it is made, not when it runs.

Called by agent.py.
"""

from typing import TYPE_CHECKING

from cray_agents.errors import BadInput
from cray_agents.hooks import Hooks
from cray_agents.persona import check_text

if TYPE_CHECKING:
    from cray_agents.agent import Agent

_ABOVE_0 = ("max_turns", "timeout", "max_total_tokens")
_FROM_0 = ("retries", "output_retries")
_CHOICES = {"on_limit": ("stop", "answer"), "tool_calls": ("auto", "native", "constrained")}
_RESERVED = ("model", "messages", "tools", "stream", "n", "extra_headers")  # of a request


def check_arguments(agent: "Agent") -> None:
    """Raises BadInput for numbers, choices and other things that cannot be meant."""
    for name in _ABOVE_0:
        if (value := getattr(agent, name)) is not None and not value > 0:
            raise BadInput(f"{name}={value!r}: must be above 0", param=name)
    for name in _FROM_0:
        if (value := getattr(agent, name)) < 0:
            raise BadInput(f"{name}={value!r}: must not be negative", param=name)
    for name, choices in _CHOICES.items():
        if (value := getattr(agent, name)) not in choices:
            known = " or ".join(map(repr, choices))
            raise BadInput(f"{name}={value!r}: must be {known}", param=name)
    if taken := [key for key in _RESERVED if key in agent.sampling]:
        raise BadInput(f"sampling cannot hold {taken[0]!r}: the agent sets it", param=taken[0])
    if isinstance(agent.hooks, Hooks) or not all(isinstance(one, Hooks) for one in agent.hooks):
        raise BadInput("hooks: give a list of Hooks, as in [Hooks(after_run=...)]", param="hooks")
    for other in agent.handoffs:
        if other.environment is not None:
            raise BadInput(
                f"{other.name} may take over in a run of {agent.name}, whose environment stays: "
                f"give {agent.name} the environment of {other.name}",
                param="handoffs",
            )
    if isinstance(agent.instructions, str):
        check_text(agent.instructions, "instructions")
    elif not callable(agent.instructions):
        raise BadInput(
            f"instructions={agent.instructions!r}: give a text or a function", param="instructions"
        )
