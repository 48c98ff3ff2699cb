"""Assembly: join the events of a run, in any order, to one Run record.

The agent writes the description (`run`), the gateway each model call (`call`), and judges write
rewards. A run without a description, such as a plain OpenAI client's, is built from its calls.

A client that drops a stream, or never gets an answer, and repeats its request makes two calls of
one turn. A request for `n` choices makes n calls. All calls stay on record, but only turns enter
the Run: `choose_turns` picks the calls that the client continued from. Called by store.py, and by
runtime/datasets/selection.py to group choices that stayed ambiguous.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from cray_agents.exact_json import read_arguments
from cray_agents.messages import first_question, text_of, tool_calls_of
from cray_agents.records import (
    Message,
    ModelCall,
    Reward,
    Run,
    RunError,
    Trajectory,
    Turn,
    canonical,
    is_finding,
    scanned_tags,
)
from cray_agents.runtime.store.segments.line_format import ending_of


def assemble(
    run_id: str,
    described: dict[str, Any] | None,
    calls: list[dict[str, Any]],
    rewards: list[dict[str, Any]],
) -> Run:
    """Join the bodies of a run's events. Raises pydantic's ValidationError on a broken body.

    `calls` may lack some that turns name; such a turn keeps `call=None`.
    """
    known = {call.id: call for call in map(ModelCall.model_validate, calls)}
    run = Run.model_validate(described) if described is not None else _run_from_calls(run_id, known)
    turns = run.trajectory.turns or [
        Turn(call_id=call.id) for call in choose_turns(_sort_calls(known.values()))
    ]
    given = newest_rewards([*run.rewards, *map(Reward.model_validate, rewards)])
    tags = {*run.tags, *(tag for call in known.values() for tag in call.tags)}
    findings = [(r.source, r.value, r.time) for r in given if is_finding(r.source)]
    last = max(known.values(), key=lambda call: (call.started, call.id), default=None)
    ended = -math.inf if last is None else last.started + last.seconds
    joined = [turn.model_copy(update={"call": known.get(turn.call_id)}) for turn in turns]
    return run.model_copy(
        update={
            "rewards": given,
            "tags": scanned_tags(tags, findings, ended),
            "trajectory": run.trajectory.model_copy(update={"turns": joined}),
        }
    )


def newest_rewards(rewards: Iterable[Reward]) -> list[Reward]:
    """Return the last reward given for each name, source and turn, sorted by these."""
    kept: dict[tuple[str, str, int], Reward] = {}
    for reward in sorted(rewards, key=lambda r: (r.time, r.value)):
        kept[reward.name, reward.source, -1 if reward.turn is None else reward.turn] = reward
    return [kept[key] for key in sorted(kept)]


def _sort_calls(calls: Iterable[ModelCall]) -> list[ModelCall]:
    return sorted(calls, key=lambda call: (call.started, call.id))


def _run_from_calls(run_id: str, known: dict[str, ModelCall]) -> Run:
    calls = _sort_calls(known.values())
    first, last = calls[0], calls[-1]
    request = first_question(first.messages)
    return Run(
        id=run_id,
        agent="",
        model=last.model,
        input=request,
        output=last.message.get("content"),
        stop_reason=ending_of(last.finish_reason, last.message),
        error=RunError(type="EngineError", message=last.error) if last.error else None,
        trajectory=Trajectory(messages=[*last.messages, last.message]),
        started=first.started,
        seconds=last.started + last.seconds - first.started,
        owner=first.owner,
    )


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
    named = [_comparable_call(call) for call in tool_calls_of(message)]
    return message.get("role"), text_of(message).strip(), named


def _comparable_call(call: dict[str, Any]) -> tuple[Any, ...]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    read = read_arguments(arguments)
    return call.get("id"), function.get("name"), arguments if read is None else read
