"""Checks of an Agent's arguments: nonsense is an error when the agent is made, not when it runs.

Called by agent.py: kinds before it looks into the arguments, the rest afterwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cray_agents.agent.hooks import Hooks
from cray_agents.agent.run_state import check_text
from cray_agents.errors import BadInput

_NOTHING = type(None)
#: The types of each argument, and words for them.
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


def check_kinds(arguments: Mapping[str, Any], agent_type: type) -> None:
    """Check an agent's arguments by name. Raises BadInput for one of another type."""
    for name, (types, wanted) in _KINDS.items():
        value = arguments[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _wrong(name, value, wanted)
    for name, (kind, wanted) in _LISTS.items():
        value = arguments[name]
        if not isinstance(value, kind) or isinstance(value, str | Mapping):
            raise _wrong(name, value, wanted)
    for name, of in {"handoffs": agent_type, "hooks": Hooks}.items():
        if not all(isinstance(one, of) for one in arguments[name]):
            raise _wrong(name, arguments[name], _LISTS[name][1])
    if not isinstance(arguments["instructions"], str) and not callable(arguments["instructions"]):
        raise _wrong("instructions", arguments["instructions"], "a text or a function")
    engine, recorder = arguments["engine"], arguments["recorder"]
    if not (engine is None or hasattr(engine, "chat") or hasattr(engine, "stream")):
        raise _wrong("engine", engine, "an engine, as OpenAIEngine(url) is one")
    if recorder not in (None, "auto") and not callable(recorder):
        raise _wrong("recorder", recorder, "an async function of a Run, 'auto' or None")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check the values of an agent's arguments. Raises BadInput for one that makes no sense."""
    for name in _ABOVE_0:
        if (value := arguments[name]) is not None and not value > 0:
            raise BadInput(f"{name}={value!r}: must be above 0", param=name)
    for name in _FROM_0:
        if (value := arguments[name]) is not None and not value >= 0:
            raise BadInput(f"{name}={value!r}: must not be negative", param=name)
    for name in ("name", "model"):
        if not arguments[name].strip():
            raise BadInput(f"{name}={arguments[name]!r}: must not be empty", param=name)
    for name, choices in _CHOICES.items():
        if (value := arguments[name]) not in choices:
            known = " or ".join(map(repr, choices))
            raise BadInput(f"{name}={value!r}: must be {known}", param=name)
    if taken := [key for key in _RESERVED if key in arguments["sampling"]]:
        raise BadInput(f"sampling cannot hold {taken[0]!r}: the agent sets it", param=taken[0])
    name = arguments["name"]
    for other in arguments["handoffs"]:
        if other.environment is not None:
            raise BadInput(
                f"{other.name} may take over in a run of {name}, whose environment stays: "
                f"give {name} the environment of {other.name}",
                param="handoffs",
            )
    if isinstance(arguments["instructions"], str):
        check_text(arguments["instructions"], "instructions")


def _wrong(name: str, value: Any, wanted: str) -> BadInput:
    return BadInput(f"{name}={value!r}: give {wanted}", param=name)
