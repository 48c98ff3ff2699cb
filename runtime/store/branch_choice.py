"""Branch choice: pick the calls of an undescribed run that its client continued from.

A client that drops a stream and repeats its request makes two calls of one turn. A request for `n`
choices makes n calls. All calls stay on record, but only turns enter the Run. Called by
assembly.py, and by runtime/datasets/selection/selection.py to group choices that stayed ambiguous.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from cray_agents.exact_json import read_arguments
from cray_agents.records import Message, ModelCall, canonical
from cray_agents.runtime.store.segments.facts import text_of

CUT = ("cancelled", "error")  # finish reasons of calls that were cut off


def choose_turns(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Return the calls that are turns, in their order.

    A call that was cut off is left out if a later request repeats its messages. Of several choices
    of a request, only the one that later requests quote stays. If they quote none or several, all
    stay.
    """
    requests = _drop_repeated(group_by_request(calls))
    kept = [_pick_branch(choices, requests[place:]) for place, choices in enumerate(requests, 1)]
    return list(chain.from_iterable(kept))


def group_by_request(calls: Iterable[ModelCall]) -> list[list[ModelCall]]:
    """Group calls, given in order, by request: each list holds the choices of one.

    The gateway names further choices of `<id>` `<id>-1`, `<id>-2`, ... The answers to several
    prompts in one request are separate requests here.
    """
    requests: list[list[ModelCall]] = []
    known: dict[str, list[list[ModelCall]]] = {}  # by the id of the first choice
    for call in calls:
        first, _, number = call.id.rpartition("-")
        name = first if number.isdigit() and first in known else call.id
        siblings = known.setdefault(name, [])
        choices = next((choices for choices in siblings if _same_request(choices[0], call)), None)
        if choices is None:
            choices = []
            siblings.append(choices)
            requests.append(choices)
        choices.append(call)
    return requests


def _same_request(one: ModelCall, other: ModelCall) -> bool:
    """Tell whether two calls belong to one request: same start, tokens and messages."""
    return (
        one.started == other.started
        and one.prompt_token_ids == other.prompt_token_ids
        and one.messages == other.messages
    )


def _drop_repeated(requests: list[list[ModelCall]]) -> list[list[ModelCall]]:
    """Drop the calls that were cut off and requested again."""
    if not any(call.finish_reason in CUT for call in chain.from_iterable(requests)):
        return requests
    later: set[bytes] = set()
    kept = []
    for choices in reversed(requests):
        request = canonical(choices[0].messages)
        again = request in later
        later.add(request)
        kept.append([c for c in choices if not again or c.finish_reason not in CUT])
    return [choices for choices in reversed(kept) if choices]


def _pick_branch(choices: list[ModelCall], later: Sequence[list[ModelCall]]) -> list[ModelCall]:
    """Return the one choice that later requests continue; all choices if it is not just one."""
    if len(choices) == 1:
        return choices
    prompt = choices[0].messages
    quoted: dict[str, ModelCall] = {}
    for request in later:
        messages = request[0].messages
        if len(messages) > len(prompt) and messages[: len(prompt)] == prompt:
            answer = comparable_message(messages[len(prompt)])
            match = next((c for c in choices if comparable_message(c.message) == answer), None)
            quoted |= {match.id: match} if match is not None else {}
    return list(quoted.values()) if len(quoted) == 1 else choices


def comparable_message(message: Message) -> tuple[Any, ...]:
    """Return the content of an answer that survives a client's rewriting, to compare by."""
    calls = message.get("tool_calls")
    named = [_comparable_call(call) for call in calls or () if isinstance(call, dict)]
    return message.get("role"), text_of(message).strip(), named


def _comparable_call(call: dict[str, Any]) -> tuple[Any, ...]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    read = read_arguments(arguments)
    return call.get("id"), function.get("name"), arguments if read is None else read
