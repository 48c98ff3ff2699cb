"""Which calls of a run that nobody described are its turns: those that its client went on with.

A client that leaves in mid-stream and asks again has made two calls of one turn, and one that asks
for `n` choices has made n. All of them stay on record. Called by assembly.py, and by datasets for
what could not be told apart.
"""

import contextlib
import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from cray_agents.records import Message, ModelCall, canonical
from cray_agents.runtime.store.segments.facts import text_of

CUT = ("cancelled", "error")  # finish reasons of calls that did not come to their end


def turns_among(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """Those of the calls, in their order, that are turns.

    Left out are calls that were cut off and whose messages a later request repeats, and, of the
    choices of a request, all but the one that a later request tells. Where none is told, or several
    are, all stay.
    """
    requests = _not_repeated(by_request(calls))
    kept = [_told(choices, requests[place:]) for place, choices in enumerate(requests, 1)]
    return list(chain.from_iterable(kept))


def by_request(calls: Iterable[ModelCall]) -> list[list[ModelCall]]:
    """The choices of each request, side by side; `calls` are in order.

    The gateway names those after `<id>` `<id>-1`, `<id>-2`, ... Answers to the several prompts of
    one request are no choices.
    """
    requests: list[list[ModelCall]] = []
    known: dict[str, list[list[ModelCall]]] = {}  # by the id of the first choice
    for call in calls:
        first, _, number = call.id.rpartition("-")
        name = first if number.isdigit() and first in known else call.id
        siblings = known.setdefault(name, [])
        choices = next((choices for choices in siblings if _alike(choices[0], call)), None)
        if choices is None:
            choices = []
            siblings.append(choices)
            requests.append(choices)
        choices.append(call)
    return requests


def _alike(one: ModelCall, other: ModelCall) -> bool:
    """Whether two calls asked the same at once."""
    return (
        one.started == other.started
        and one.prompt_token_ids == other.prompt_token_ids
        and one.messages == other.messages
    )


def _not_repeated(requests: list[list[ModelCall]]) -> list[list[ModelCall]]:
    """The requests without the calls that were cut off and asked again."""
    if not any(call.finish_reason in CUT for call in chain.from_iterable(requests)):
        return requests
    asked_later: set[bytes] = set()
    kept = []
    for choices in reversed(requests):
        asked = canonical(choices[0].messages)
        again = asked in asked_later
        asked_later.add(asked)
        kept.append([c for c in choices if not again or c.finish_reason not in CUT])
    return [choices for choices in reversed(kept) if choices]


def _told(choices: list[ModelCall], later: Sequence[list[ModelCall]]) -> list[ModelCall]:
    """The choice that later requests go on with; all of them if that is not just one."""
    if len(choices) == 1:
        return choices
    asked = choices[0].messages
    told: dict[str, ModelCall] = {}
    for request in later:
        messages = request[0].messages
        if len(messages) > len(asked) and messages[: len(asked)] == asked:
            said = _said(messages[len(asked)])
            fits = next((c for c in choices if _said(c.message) == said), None)
            told |= {fits.id: fits} if fits is not None else {}
    return list(told.values()) if len(told) == 1 else choices


def _said(message: Message) -> tuple[Any, ...]:
    """What of an answer comes back in the next request, also where it is written anew."""
    calls = message.get("tool_calls")
    named = [_called(call) for call in calls or () if isinstance(call, dict)]
    return message.get("role"), text_of(message).strip(), named


def _called(call: dict[str, Any]) -> tuple[Any, ...]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return call.get("id"), function.get("name"), arguments
