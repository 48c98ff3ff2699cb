"""Which run a request goes on with, when its client does not say: that of its conversation.

An agent's request repeats the messages of its previous one, then what the model said, then more.
What the model said often comes back rewritten (arguments as other JSON, or as text), while ids of
tool calls come back as they were; so the earlier request must match exactly, and of several calls
with that request the one whose answer is recognised in what follows is taken. Of answers that are
alike each is gone on with once, before any is a second time: which is whose makes no difference.

Not found, and so a run of its own: a conversation whose beginning changes between turns (a clock
in the instructions, a trimmed history), and the same messages asked again. There, name the run.

Filled by store.py, asked by the gateway; any thread.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from cray_agents.records import Message
from cray_agents.runtime.store.segments.facts import text_of

MOST = 100_000  # requests remembered
SAME = 4_096  # answers remembered to one request
MOST_ERRORS = 4  # places in a message where an error may have been added to it


@dataclass(slots=True)
class _KnownAnswer:
    run_id: str
    call_ids: tuple[str, ...]
    text: str
    continued: bool = False


class Conversations:
    """Requests by the hash of their messages, and what was answered in which run."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._answers: OrderedDict[str, list[_KnownAnswer]] = OrderedDict()

    def learn(self, asked: str, run_id: str, call_ids: Sequence[str], text: str) -> None:
        """Remember an answer to the request whose `chain` ended in `asked`.

        It called the tools of these ids, and its text begins with this one.
        """
        answers = self._answers.setdefault(asked, [])
        answers.append(_KnownAnswer(run_id, tuple(call_ids), text))
        del answers[:-SAME]
        self._answers.move_to_end(asked)
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)

    def find(self, hashes: Sequence[str], messages: Sequence[Message], scope: str) -> str | None:
        """The run that these messages go on with; `hashes` is their `chain` in `scope`."""
        for end in range(len(messages) - 1, 0, -1):
            answers = self._answers.get(hashes[end - 1])
            if answers:
                return _recognised(answers, messages[end:])
        return self._before_error(messages, scope)

    def _before_error(self, messages: Sequence[Message], scope: str) -> str | None:
        """The run whose call failed in smolagents: it adds the error to the last message.

        It sends nothing of the answer back, so there must be but one that could be meant.
        """
        for last in _without_errors(messages[-1]):
            answers = self._answers.get(chain([*messages[:-1], last], scope)[-1])
            if answers:
                runs = {answer.run_id for answer in answers if answer.call_ids}
                return runs.pop() if len(runs) == 1 else None
        return None


def chain(messages: Sequence[Message], scope: str) -> list[str]:
    """For each prefix of the messages, a hash of it. Conversations of other scopes never match."""
    state = hashlib.blake2b(scope.encode(), digest_size=16)
    hashes = []
    for message in messages:
        plain = {name: value for name, value in message.items() if value not in (None, "", [], {})}
        state.update(orjson.dumps(plain, option=orjson.OPT_SORT_KEYS))
        hashes.append(state.hexdigest())
    return hashes


def _recognised(answers: list[_KnownAnswer], follows: Sequence[Message]) -> str | None:
    """The run of the answer that is told in what follows."""
    named = {str(call.get("id")) for m in follows for call in _calls(m)}
    named |= {str(m["tool_call_id"]) for m in follows if m.get("tool_call_id")}
    if named:
        return _newest(answers, lambda answer: not named.isdisjoint(answer.call_ids))
    first = text_of(follows[0]).strip()
    by_text = _newest(
        answers,
        lambda answer: (
            any(call_id in first for call_id in answer.call_ids)
            or (not answer.call_ids and bool(answer.text) and first.startswith(answer.text))
        ),
    )
    if by_text is not None:
        return by_text
    # rewritten beyond recognition, or empty: the only answer there was, if an answer follows
    alone = len({answer.run_id for answer in answers}) == 1
    follows_answer = follows[0].get("role") == "assistant"
    return answers[-1].run_id if alone and follows_answer and not answers[-1].call_ids else None


def _newest(answers: list[_KnownAnswer], fits: Callable[[_KnownAnswer], bool]) -> str | None:
    """The run of the newest fitting answer that was not gone on with, or else of the newest."""
    newest = None
    for answer in reversed(answers):
        if fits(answer):
            if not answer.continued:
                answer.continued = True
                return answer.run_id
            newest = newest or answer.run_id
    return newest


def _without_errors(message: Message) -> Iterator[Message]:
    """The message as it was before an error was added to its text."""
    content = message.get("content")
    part = content[-1] if isinstance(content, list) and content else content
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        return
    for _ in range(MOST_ERRORS):
        text, found, _ = text.rpartition("\nError:")
        if not found:
            return
        if isinstance(content, list):
            yield {**message, "content": [*content[:-1], {**content[-1], "text": text}]}
        else:
            yield {**message, "content": text}


def _calls(message: Message) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
