"""Citations: what a report quotes, compared byte for byte with what is recorded now.

A citation is a link to a screen of the dashboard, and its title is the quote:

    [gave up](#/run/run_01?t=4 "I cannot do this.")      within a text of turn 4, from 0
    [these](#/run/run_01?t=4&tok=88-90 " cannot do")     all bytes of the turn's tokens 88 to 90
    [the run](#/run/run_01 "stop_reason=completed")      a field of the run, as in its outline
    [the set](#/dataset/ds-01 "samples=512")             ... of GET /v1/datasets/ID
    [the job](#/job/ft-01 "state=succeeded")             ... of GET /v1/jobs/ID
    [won](#/generation/sums/3?pair=7 "outcome=won")      ... of a promotion's pair, from 1
    [better](#/generation/sums/3 "record.runs=256")      ... of GET /v1/loops/L/generations/N
    [version](#/models?at=sums%403 "job_id=ft-01")       ... of GET /v1/models/NAME/versions

Without a title the thing must exist, no more. A number is compared at the digits that the quote
has. Called by gateway/routes/reports.py.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

from cray_agents.errors import Corrupt, NotFound
from cray_agents.exact_json import dump_json
from cray_agents.runtime.reports.report_records import Citation, CitedKind, ReportNode
from cray_agents.runtime.views.run_pages import RunPages
from cray_agents.runtime.views.token_text import Vocabulary

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}")  # also safe as the name of a folder
NUMBER = re.compile(r"-?\d+(?:\.(\d+))?")
COUNT = re.compile(r"0|[1-9]\d{0,8}")
TOKENS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
NOT_SAID = frozenset({"role", "id", "type", "tool_call_id"})  # fields of messages that no one wrote
QUOTED = 80  # characters of what is there, in an error

#: The record of a thing as JSON, by its id and, for generations and pairs, its numbers.
Facts = Callable[["CitedThing"], dict[str, Any]]


@dataclass(frozen=True)
class CitedThing:
    """A thing that a link names; fields as in Citation. `generation`: of the loop `id`."""

    kind: CitedKind
    id: str
    at: int | None = None
    tokens: tuple[int, int] | None = None
    generation: int = 0


class CitationChecker:
    """Verifies the citations of reports; for use by any number of threads.

    facts: read the record of a thing that is no turn; they raise NotFound, Corrupt.
    vocabulary: returns that of a version; raises NotFound, Corrupt.
    """

    def __init__(
        self, pages: RunPages, vocabulary: Callable[[str], Vocabulary], facts: Facts
    ) -> None:
        self._pages = pages
        self._vocabulary = vocabulary
        self._facts = facts

    def check(self, link: ReportNode, label: str) -> Citation | None:
        """Return a link as a verified citation; None for a link to anything else.

        Raises StoreError.
        """
        target = target_of(link.href)
        if target is None:
            return None
        quote = link.info or None
        error = target if isinstance(target, str) else self._error(target, quote)
        named = None if isinstance(target, str) else target
        return Citation(
            href=link.href,
            label=label,
            kind=named and named.kind,
            id=named.id if named else "",
            at=named and named.at,
            tokens=named and named.tokens,
            quote=quote,
            ok=not error,
            error=error,
        )

    def _error(self, target: CitedThing, quote: str | None) -> str:
        """Return why a citation does not hold; "" if it does."""
        try:
            if target.tokens is not None:
                return self._of_tokens(target, quote)
            if target.kind == "run" and target.at is not None:
                return turn_error(self._pages, target.id, target.at, quote)
            return _of_field(self._facts(target), quote)
        except (NotFound, Corrupt) as error:
            return str(error)

    def _of_tokens(self, target: CitedThing, quote: str | None) -> str:
        assert target.at is not None and target.tokens is not None
        call = self._pages.call(target.id, target.at)
        ids = [*call["prompt_token_ids"], *call["token_ids"]]
        first, last = target.tokens
        if last >= len(ids):
            return f"turn {target.at} has {len(ids)} tokens, from 0 on"
        if quote is None:
            return ""
        vocabulary = self._vocabulary(call["model"])
        if not vocabulary.exact:
            return "the tokenizer of this version has no exact bytes of tokens"
        written = b"".join(map(vocabulary.bytes_of, ids[first : last + 1]))
        if written == quote.encode("utf-8", "surrogatepass"):
            return ""
        return f"these tokens are {_short(written.decode('utf-8', 'replace'))}"


def turn_error(pages: RunPages, run_id: str, turn: int, quote: str | None) -> str:
    """Return why a turn of a run has not these words; "" if it has. Raises NotFound, Corrupt."""
    window = pages.window(run_id, turn, 1)
    if turn >= window["total"]:
        return f"run {run_id} has {window['total']} turns, from 0 on"
    if quote is None or any(quote in text for text in _texts(window)):
        return ""
    return f"no text of turn {turn} has these words"


def target_of(href: str) -> CitedThing | str | None:
    """Return what a link names, or what is wrong with it; None for a link to anything else."""
    path, _, query = href.removeprefix("/").removeprefix("#/").partition("?")
    if not href.startswith(("#/", "/#/")):
        return None
    words = [unquote(word) for word in path.split("/") if word]
    target: CitedThing | str
    params = {name: values[-1] for name, values in parse_qs(query).items()}
    match words:
        case ["run", run_id]:
            target = _in_run(run_id, params)
        case ["dataset", dataset]:
            target = CitedThing("dataset", dataset)
        case ["job", job]:
            target = CitedThing("job", job)
        case ["generation", loop, number]:
            target = _in_generation(loop, number, params)
        case ["models"] if "at" in params:
            target = CitedThing("model", params["at"])
        case _:
            return None
    if isinstance(target, CitedThing) and not ID.fullmatch(target.id):
        return f"{_short(target.id)} is no {target.kind}'s id"
    return target


def _in_run(run_id: str, params: dict[str, str]) -> CitedThing | str:
    turn, tokens = params.get("t"), params.get("tok")
    if turn is None:
        return "tok names tokens of a turn: name it with t" if tokens else CitedThing("run", run_id)
    if not COUNT.fullmatch(turn):
        return f"t must be a turn's number, from 0, not {_short(turn)}"
    if tokens is None:
        return CitedThing("run", run_id, int(turn))
    match = TOKENS.fullmatch(tokens)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        return f"tok must be as 88 or 88-90, of the turn's tokens from 0, not {_short(tokens)}"
    return CitedThing("run", run_id, int(turn), (first, last))


def _in_generation(loop: str, number: str, params: dict[str, str]) -> CitedThing | str:
    pair = params.get("pair")
    if not COUNT.fullmatch(number):
        return f"{_short(number)} is no generation's number"
    if pair is None:
        return CitedThing("generation", loop, generation=int(number))
    if not COUNT.fullmatch(pair):
        return f"pair must be a pair's number, from 1, not {_short(pair)}"
    return CitedThing("pair", loop, int(pair), generation=int(number))


def _texts(window: dict[str, Any]) -> Iterator[str]:
    """Yield every text of a window of one turn: new messages, answer, calls, what follows them.

    A tool's result that is no text is quoted as its JSON.
    """
    for turn in window["data"]:
        for call in turn["tool_calls"]:
            if not isinstance(call.get("result"), str):
                yield dump_json(call.get("result")).decode()
        for value in (turn["messages"], turn["answer"], turn["tool_calls"]):
            yield from _strings(value)
    yield from _strings(window["closing"])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in NOT_SAID:
                yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _of_field(facts: dict[str, Any], quote: str | None) -> str:
    """Return why a quote `field=value` is not what the record has; "" if it is."""
    if quote is None:
        return ""
    name, equals, wanted = quote.partition("=")
    if not equals:
        return f"quote a field and its value, as name=value, not {_short(quote)}"
    value: Any = facts
    for word in name.strip().split("."):
        if not isinstance(value, dict) or word not in value:
            return f"the record has no field {_short(name)}"
        value = value[word]
    text = value if isinstance(value, str) else dump_json(value).decode()
    match = NUMBER.fullmatch(wanted.strip())
    if match and isinstance(value, float):
        text = f"{value:.{len(match[1] or '')}f}"
    return "" if wanted.strip() == text else f"{name.strip()} is {_short(text)}"


def _short(text: str) -> str:
    return repr(text if len(text) <= QUOTED else f"{text[:QUOTED]}…")
