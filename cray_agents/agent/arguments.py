"""What an Agent may be made of: what cannot be meant is told when it is made, not when it runs.

Called by agent.py: kinds before it looks into the arguments, the rest when it has.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cray_agents.agent.active_agent import check_text
from cray_agents.agent.hooks import Hooks
from cray_agents.errors import BadInput

if TYPE_CHECKING:
    from cray_agents.agent.agent import Agent

_NOTHING = type(None)
#: Of each argument its types, and the words for them.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("name", "model", "description"), ((str,), "a text")),
    "base_url": ((str, _NOTHING), "a text or None"),
    **dict.fromkeys(("max_turns", "retries", "output_retries"), ((int,), "a whole number")),
    **dict.fromkeys(
        ("max_total_tokens", "max_tokens"), ((int, _NOTHING), "a whole number or None")
    ),
    **dict.fromkeys(("timeout", "temperature"), ((int, float, _NOTHING), "a number or None")),
    **dict.fromkeys(("parallel_tool_calls", "json_schema"), ((bool,), "True or False")),
    "sampling": ((Mapping,), 'a dict, as in {"top_p": 0.9}'),
}
_LISTS: dict[str, tuple[type, str]] = {
    "tools": (Iterable, "a list of functions, as in [add]"),
    "handoffs": (Sequence, "a list of agents, as in [billing]"),
    "hooks": (Sequence, "a list of Hooks, as in [Hooks(after_run=...)]"),
}
_ABOVE_0 = ("max_turns", "timeout", "max_total_tokens", "max_tokens")
_FROM_0 = ("retries", "output_retries", "temperature")
_CHOICES = {"on_limit": ("stop", "answer"), "tool_calls": ("auto", "native", "constrained")}
_RESERVED = ("model", "messages", "tools", "stream", "n", "extra_headers")  # of a request


def check_kinds(agent: "Agent") -> None:
    """Raises BadInput for arguments of another type, with what to give."""
    from cray_agents.agent.agent import Agent  # late: it imports this

    for name, (types, wanted) in _KINDS.items():
        value = getattr(agent, name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _wrong(name, value, wanted)
    for name, (kind, wanted) in _LISTS.items():
        value = getattr(agent, name)
        if not isinstance(value, kind) or isinstance(value, str | Mapping):
            raise _wrong(name, value, wanted)
    for name, of in {"handoffs": Agent, "hooks": Hooks}.items():
        if not all(isinstance(one, of) for one in getattr(agent, name)):
            raise _wrong(name, getattr(agent, name), _LISTS[name][1])
    if not isinstance(agent.instructions, str) and not callable(agent.instructions):
        raise _wrong("instructions", agent.instructions, "a text or a function")
    if not (
        agent.engine is None or hasattr(agent.engine, "chat") or hasattr(agent.engine, "stream")
    ):
        raise _wrong("engine", agent.engine, "an engine, as OpenAIEngine(url) is one")
    if agent.recorder not in (None, "auto") and not callable(agent.recorder):
        raise _wrong("recorder", agent.recorder, "an async function of a Run, 'auto' or None")


def check_arguments(agent: "Agent") -> None:
    """Raises BadInput for numbers, choices and other things that cannot be meant."""
    for name in _ABOVE_0:
        if (value := getattr(agent, name)) is not None and not value > 0:
            raise BadInput(f"{name}={value!r}: must be above 0", param=name)
    for name in _FROM_0:
        if (value := getattr(agent, name)) is not None and not value >= 0:
            raise BadInput(f"{name}={value!r}: must not be negative", param=name)
    for name in ("name", "model"):
        if not getattr(agent, name).strip():
            raise BadInput(f"{name}={getattr(agent, name)!r}: must not be empty", param=name)
    for name, choices in _CHOICES.items():
        if (value := getattr(agent, name)) not in choices:
            known = " or ".join(map(repr, choices))
            raise BadInput(f"{name}={value!r}: must be {known}", param=name)
    if taken := [key for key in _RESERVED if key in agent.sampling]:
        raise BadInput(f"sampling cannot hold {taken[0]!r}: the agent sets it", param=taken[0])
    for other in agent.handoffs:
        if other.environment is not None:
            raise BadInput(
                f"{other.name} may take over in a run of {agent.name}, whose environment stays: "
                f"give {agent.name} the environment of {other.name}",
                param="handoffs",
            )
    if isinstance(agent.instructions, str):
        check_text(agent.instructions, "instructions")


def _wrong(name: str, value: Any, wanted: str) -> BadInput:
    return BadInput(f"{name}={value!r}: give {wanted}", param=name)
