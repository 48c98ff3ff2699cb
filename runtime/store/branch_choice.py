"""Branch choice: pick the calls of an undescribed run that its client continued from.

A client that drops a stream, or never gets an answer, and repeats its request makes two calls of
one turn. A request for `n` choices makes n calls. All calls stay on record, but only turns enter
the Run. Called by assembly.py, and by runtime/datasets/selection/selection.py to group choices that
stayed ambiguous.
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

    A call that was cut off is left out if a later request repeats its messages. Of several answers
    to the same messages, be they choices of a request or of a repeated one, only the one that later
    requests quote stays. If they quote none or several, all stay; but of a request and its retries
    the last.
    """
    requests = _drop_repeated(group_by_request(calls))
    lasts = [canonical(choices[0].messages[-1:]) for choices in requests]
    similar: dict[bytes, list[list[ModelCall]]] = {}
    for last, choices in zip(lasts, requests, strict=True):
        similar.setdefault(last, []).append(choices)
    kept = [_pick_branch(r, similar[lasts[i]], requests[i + 1 :]) for i, r in enumerate(requests)]
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
    later: dict[bytes, float] = {}  # when a request came last
    kept = []
    for choices in reversed(requests):
        request = canonical(choices[0].messages)
        again = later.setdefault(request, choices[0].started) != choices[0].started
        kept.append([c for c in choices if not again or c.finish_reason not in CUT])
    return [choices for choices in reversed(kept) if choices]


def _pick_branch(
    choices: list[ModelCall],
    similar: Sequence[list[ModelCall]],
    later: Sequence[list[ModelCall]],
) -> list[ModelCall]:
    """Return the choices that are turns. `similar` has all requests of the same messages."""
    if len(choices) == len(similar) == 1:
        return choices
    prompt, started = choices[0].messages, choices[0].started
    separate = [other for other in similar if other is choices or other[0].started != started]
    repeats = [other for other in separate if other[0].messages == prompt]
    newest, quoted = list(chain.from_iterable(reversed(repeats))), set[str]()
    ways: list[list[Message]] = []  # on from the prompt: an answer, and what follows it
    for request in later:
        messages = request[0].messages
        way = messages[len(prompt) : len(prompt) + 2]
        if not way or messages[: len(prompt)] != prompt or way in ways:
            continue
        ways.append(way)
        answer = comparable_message(way[0])
        equal = [c.id for c in newest if comparable_message(c.message) == answer]
        quoted.update(sorted(equal, key=quoted.__contains__)[:1])  # rather one not quoted yet
    if len(quoted) == 1:
        return [call for call in choices if call.id in quoted]
    is_lost = choices is not repeats[-1] and all(calls[0].retry for calls in repeats[1:])
    return [] if is_lost and not quoted else choices


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
