"""Conversations: find the run that a request continues when its client names none.

An agent's request repeats the messages of its previous request, then the model's answer, then more.
The earlier request must match exactly. Answers often come back rewritten (arguments as other JSON,
or as text), but ids of tool calls come back unchanged. So of several calls with the same request,
the one whose answer is recognised in the following messages is taken. Equal answers are continued
once each before any is continued twice; their order makes no difference.

A changed beginning, such as a clock in the instructions or a trimmed history, starts a new run. So
does a repeat of the same messages. Clients that do so must name the run.

Filled by store.py; queried by runtime/gateway/model_calls/answer.py; safe in any thread.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cray_agents.exact_json import dump_json
from cray_agents.records import Message
from cray_agents.runtime.store.segments.facts import text_of

MAX_REQUESTS = 100_000  # requests remembered
MAX_ANSWERS = 4_096  # answers remembered for one request
MAX_ERRORS = 4  # places in a message where an added error may begin


@dataclass(slots=True)
class _KnownAnswer:
    """An answer to a remembered request. `continued`: a later request was matched to it."""

    run_id: str
    call_ids: tuple[str, ...]
    text: str
    continued: bool = False


class Conversations:
    """Recent requests by the hash of their messages, with their answers and runs."""

    def __init__(self, most: int = MAX_REQUESTS) -> None:
        self._most = most
        self._answers: OrderedDict[str, list[_KnownAnswer]] = OrderedDict()

    def learn(self, request: str, run_id: str, call_ids: Sequence[str], text: str) -> None:
        """Remember an answer to a request, given by the last hash of its `chain`.

        `call_ids` are the answer's tool calls; `text` is the beginning of its text.
        """
        answers = self._answers.setdefault(request, [])
        answers.append(_KnownAnswer(run_id, tuple(call_ids), text))
        del answers[:-MAX_ANSWERS]
        self._answers.move_to_end(request)
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)

    def learn_once(self, request: str, run_id: str, call_ids: Sequence[str], text: str) -> None:
        """Remember an answer, unless it is known."""
        known = self._answers.get(request, ())
        answer = (run_id, tuple(call_ids), text)
        if all((one.run_id, one.call_ids, one.text) != answer for one in known):
            self.learn(request, run_id, call_ids, text)

    def find(self, hashes: Sequence[str], messages: Sequence[Message], scope: str) -> str | None:
        """Return the run that these messages continue; `hashes` is their `chain` in `scope`."""
        for end in range(len(messages) - 1, 0, -1):
            answers = self._answers.get(hashes[end - 1])
            if answers:
                return _recognised_run(answers, messages[end:])
        return self._before_error(messages, scope)

    def _before_error(self, messages: Sequence[Message], scope: str) -> str | None:
        """Return the run whose tool call failed in smolagents.

        It adds the error to the last message, and repeats nothing of the answer. So a run is
        returned only if no other could be meant.
        """
        for last in _without_errors(messages[-1]):
            answers = self._answers.get(chain([*messages[:-1], last], scope)[-1])
            if answers:
                runs = {answer.run_id for answer in answers if answer.call_ids}
                return runs.pop() if len(runs) == 1 else None
        return None


def chain(messages: Sequence[Message], scope: str) -> list[str]:
    """Return a hash of each prefix of the messages. Equal messages differ between scopes."""
    state = hashlib.blake2b(scope.encode(), digest_size=16)
    hashes = []
    for message in messages:
        plain = {name: value for name, value in message.items() if value not in (None, "", [], {})}
        state.update(dump_json(plain, sort_keys=True))
        hashes.append(state.hexdigest())
    return hashes


def _recognised_run(answers: list[_KnownAnswer], follows: Sequence[Message]) -> str | None:
    """Return the run of the answer that the following messages quote."""
    named = {str(call.get("id")) for m in follows for call in _calls(m)}
    named |= {str(m["tool_call_id"]) for m in follows if m.get("tool_call_id")}
    if named:
        return _newest_run(answers, lambda answer: not named.isdisjoint(answer.call_ids))
    first = text_of(follows[0]).strip()
    by_text = _newest_run(
        answers,
        lambda answer: (
            any(call_id in first for call_id in answer.call_ids)
            or (not answer.call_ids and bool(answer.text) and first.startswith(answer.text))
        ),
    )
    if by_text is not None:
        return by_text
    # rewritten beyond recognition, or empty: take the only answer, if an answer follows
    alone = len({answer.run_id for answer in answers}) == 1
    follows_answer = follows[0].get("role") == "assistant"
    return answers[-1].run_id if alone and follows_answer and not answers[-1].call_ids else None


def _newest_run(answers: list[_KnownAnswer], fits: Callable[[_KnownAnswer], bool]) -> str | None:
    """Return the run of the newest fitting answer, rather one that was not continued yet."""
    newest = None
    for answer in reversed(answers):
        if fits(answer):
            if not answer.continued:
                answer.continued = True
                return answer.run_id
            newest = newest or answer.run_id
    return newest


def _without_errors(message: Message) -> Iterator[Message]:
    """Yield the message as it may have been before an error was added to its text."""
    content = message.get("content")
    part = content[-1] if isinstance(content, list) and content else content
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        return
    for _ in range(MAX_ERRORS):
        text, error, _ = text.rpartition("\nError:")
        if not error:
            return
        if isinstance(content, list):
            yield {**message, "content": [*content[:-1], {**content[-1], "text": text}]}
        else:
            yield {**message, "content": text}


def _calls(message: Message) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
