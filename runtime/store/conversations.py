"""Conversations: find the run that a request continues when its client names none.

An agent's request repeats the messages of its previous request, then the model's answer, then more.
The earlier request must match exactly. Answers often come back rewritten (arguments as other JSON,
or as text), but ids of tool calls come back unchanged. So of several calls with the same request,
the one whose answer is recognised in the following messages is taken; one with neither text nor
calls leaves nothing to recognise. Of texts that begin alike the longest is taken. Equal answers are
continued equally often; their order makes no difference. A request counts while it is in flight and
once its answer is recorded, so one that is refused leaves no trace. If its answer was cut off, the
same request repeated takes its place.

A changed beginning, such as a clock in the instructions or a trimmed history, starts a new run. So
does a repeat of the same messages. Clients that do so must name the run.

Filled by store.py; queried by runtime/gateway/model_calls/answer.py; safe in any thread.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cray_agents.exact_json import dump_json
from cray_agents.messages import text_of, tool_calls_of
from cray_agents.records import Message

MAX_REQUESTS = 100_000  # requests remembered
MAX_ANSWERS = 4_096  # answers remembered for one request
QUOTED = 10_000  # characters of a message in which an answer is looked for
MAX_ERRORS = 4  # places in a message where an added error may begin


@dataclass(slots=True)
class _KnownAnswer:
    """An answer to a remembered request.

    `continued` counts the later requests that were matched to it, in flight or recorded; `cut`
    holds those of them whose own answers were cut off.
    """

    run_id: str
    call_ids: tuple[str, ...]
    text: str
    continued: int = 0
    cut: list[str] = field(default_factory=list)

    def is_quoted_by(self, role: Any, text: str) -> bool:
        """Tell whether the message after its request, whose text begins so, has this answer's."""
        if self.call_ids or self.text:
            return any(call_id in text for call_id in self.call_ids) or (
                not self.call_ids and text.startswith(self.text)
            )
        return not text or role != "assistant"


class Continuation:
    """The place of a request in flight in the run that it continues."""

    def __init__(self, answer: _KnownAnswer, request: str) -> None:
        self.run_id = answer.run_id
        self._answer, self._request, self._ended = answer, request, False
        self._repeats = request in answer.cut
        if self._repeats:
            answer.cut.remove(request)
        else:
            answer.continued += 1

    def end(self, *, recorded: bool = False, cut: bool = False) -> None:
        """End the request; it leaves no trace unless it was recorded. The first call counts."""
        ended, self._ended = self._ended, True
        if ended:
            return
        if cut if recorded else self._repeats:
            self._answer.cut.append(self._request)
        elif not recorded:
            self._answer.continued -= 1


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

    def find(
        self, hashes: Sequence[str], messages: Sequence[Message], before_error: Sequence[str] = ()
    ) -> Continuation | None:
        """Return what these messages continue.

        `hashes` is their `chain`, and `before_error` their `chain_before_error`.
        """
        for end in range(len(messages) - 1, 0, -1):
            answers = self._answers.get(hashes[end - 1])
            if answers:
                fitting = _recognised(answers, messages[end:])
                break
        else:
            fitting = self._before_error(before_error)
        if not fitting:
            return None
        request = hashes[-1]
        least = min(reversed(fitting), key=lambda one: (request not in one.cut, one.continued))
        return Continuation(least, request)

    def _before_error(self, hashes: Sequence[str]) -> list[_KnownAnswer]:
        """Return the answers whose tool call failed in smolagents.

        It adds the error to the last message, and repeats nothing of the answer. So they are
        returned only if no other run could be meant.
        """
        for request in hashes:
            if answers := self._answers.get(request):
                return _of_one_run([answer for answer in answers if answer.call_ids])
        return []


def chain(messages: Sequence[Message], scope: str) -> list[str]:
    """Return a hash of each prefix of the messages. Equal messages differ between scopes."""
    state = hashlib.blake2b(scope.encode(), digest_size=16)
    return [_add(state, message) for message in messages]


def chain_before_error(messages: Sequence[Message], scope: str) -> list[str]:
    """Return the last hash of the `chain` as it may have been before an error was added."""
    before = [*_without_errors(messages[-1])]
    state = hashlib.blake2b(scope.encode(), digest_size=16)
    for message in messages[:-1] if before else ():
        _add(state, message)
    return [_add(state.copy(), last) for last in before]


def _add(state: "hashlib.blake2b", message: Message) -> str:
    plain = {name: value for name, value in message.items() if value not in (None, "", [], {})}
    state.update(dump_json(plain, sort_keys=True))
    return state.hexdigest()


def _recognised(answers: list[_KnownAnswer], follows: Sequence[Message]) -> list[_KnownAnswer]:
    """Return the answers, given oldest first, that the following messages may quote."""
    named = {str(call.get("id")) for m in follows for call in tool_calls_of(m)}
    named |= {str(m["tool_call_id"]) for m in follows if m.get("tool_call_id")}
    if named:
        return [answer for answer in answers if not named.isdisjoint(answer.call_ids)]
    role, text = follows[0].get("role"), text_of(follows[0]).strip()[:QUOTED]
    quoted = [answer for answer in answers if answer.is_quoted_by(role, text)]
    longest = max((len(answer.text) for answer in quoted if not answer.call_ids), default=0)
    quoted = [answer for answer in quoted if answer.call_ids or len(answer.text) == longest]
    if quoted or role != "assistant" or answers[-1].call_ids:
        return quoted
    return _of_one_run(answers)  # rewritten beyond recognition: if there is only one, it is meant


def _of_one_run(answers: list[_KnownAnswer]) -> list[_KnownAnswer]:
    """Return answers if all are of one run, else none."""
    return answers if len({answer.run_id for answer in answers}) == 1 else []


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
