"""Export format: what turns a run, or a pair of runs, into records, and what is lost by it.

A format's module defines a LineFormat and knows nothing of files; exports/exporter.py lists all. A
run that a format cannot carry is the error `unsupported_export`. Anything else left out is a loss,
named by a code and told in a sentence. export_files.py counts losses, the command line prints them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json
from cray_agents.records import Run

if TYPE_CHECKING:
    from cray_agents.runtime.store import Store

Json = dict[str, Any]


class Item(NamedTuple):
    """A run, or the better and the worse run of a pair, to be written.

    `covers` is the number of runs or pairs that it counts as. `lost` holds the losses known before
    writing, as (code, count). An item without runs writes nothing.
    """

    runs: tuple[Run, ...]
    covers: int = 1
    lost: tuple[tuple[str, int], ...] = ()


class Written(NamedTuple):
    """The records of a run or a pair, one per line, and the codes of their losses."""

    records: list[Json]
    losses: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnePage:
    """A file that is one page: what it begins with, and how a record stands in it.

    `head` returns the beginning; it raises SetupError where this installation lacks it. When the
    file has `most_bytes`, it ends with `full` instead of further runs.
    """

    head: Callable[[], bytes]
    encode: Callable[[Run, Json], bytes]
    most_bytes: int
    full: bytes


@dataclass(frozen=True)
class LineFormat:
    """A format whose file is records, one after the other: JSON lines, unless it is a `page`.

    It has `write_run`, `write_pair` or `with_store`. `about` describes its contents in a sentence.
    `write_run` gets a whole run with its calls. `write_pair` gets the better and the worse of two
    runs on one task. `with_store` returns a `write_run` that reads more of the runs' store. All
    raise BadInput with the code unsupported_export for a run that the format cannot carry. `pack`
    makes the file of the lines, where a file of lines is not the format itself.
    """

    name: str
    title: str
    about: str
    write_run: Callable[[Run], Written] | None = None
    write_pair: Callable[[Run, Run], Written] | None = None
    with_store: Callable[["Store"], Callable[[Run], Written]] | None = None
    suffix: str = ".jsonl"
    page: OnePage | None = None
    pack: Callable[[Iterable[bytes], Path], None] | None = None


def unsupported(run: Run, field: str, problem: str) -> BadInput:
    """Return the error of a run that a format cannot carry, naming the field and the problem."""
    return BadInput(
        f"run {run.id} cannot be exported: {field} {problem}",
        param=field,
        code="unsupported_export",
    )


def line_of(run: Run, record: Json) -> bytes:
    """Return a record as a line without its newline. Raises BadInput if JSON cannot carry it."""
    return _encode(run, "a value", record)


def json_text(run: Run, field: str, value: Any) -> str:
    """Return a value as JSON text. Raises BadInput if JSON cannot carry it."""
    return _encode(run, field, value).decode()


def _encode(run: Run, field: str, value: Any) -> bytes:
    try:
        return dump_json(value)
    except TypeError as error:  # a lone surrogate, an integer beyond 64 bits
        raise unsupported(run, field, f"has no form in JSON: {error}") from error


# ---- losses: their codes and sentences, the rules for them, and their counts
MISSING, UNSUPPORTED, FULL = "missing_runs", "unsupported_runs", "full_file"
LOSSES = MappingProxyType(
    {
        "conversation_only": "the conversation alone is carried: no rewards, ending, tags, times, "
        "model versions or exact tokens",
        "reasoning": "the model's reasoning is left out",
        "other_calls": "model calls that the conversation does not tell of (further answers, other "
        "conversations of the run) are left out",
        "unanswered_end": "messages after the assistant's last one are left out",
        "after_the_difference": "what follows the two answers that differ is left out",
        "tool_arguments": "arguments of a tool call that are no JSON object were put into one, as "
        '{"unparsed": ...}',
        "tool_call_ids": "the format has no ids of tool calls: results follow calls in order",
        "message_fields": "fields of messages that the format does not have are left out",
        "text_parts": "texts in several parts became one text",
        "split_turns": "a message with several tool calls became several",
        "call_text": "what the assistant said in a message with tool calls is left out",
        "joined_turns": "messages of one speaker in a row became one",
        "not_alternating": "messages are left out where questions and answers do not alternate",
        "redacted": "something was removed from the texts before they were stored, and the format "
        "cannot say so",
        "template_settings": "settings of the chat template (chat_template_kwargs, "
        "reasoning_effort and the like) are left out: a prompt rendered anew may differ",
        "completions": "texts continued through /v1/completions are told as questions and answers",
        "other_tools": "tools that are no functions are left out",
        "weights": "which of the assistant's messages are not to be trained on is left out",
        "developer_role": "the developer's messages became the system's",
        "earlier_turns": "only the last answer is to be learned; earlier ones are its context",
        "exact_tokens": "exact token ids and logprobs are left out",
        "missing_calls": "model calls that are not in the store have no record of their own",
        MISSING: "runs that are no longer in the store are left out",
        UNSUPPORTED: "runs that the format cannot carry are left out",
        "no_tokens": "runs and cut-off turns without exact tokens, or without their logprobs, are "
        "left out",
        "no_advantages": "advantages are computed for a dataset; they are null here",
        "no_task": "runs without a task are left out: their prompt has nothing to be judged by",
        "no_target": "tasks without a target have no ground truth: it is null",
        "json_target": "targets that are no text stand as JSON",
        "other_attempts": "further runs on a task are left out: a row is a task",
        "answers": "what the model answered is left out: a row is a task, to be answered anew",
        "tools": "definitions of tools are left out",
        "no_conversation": "the conversation is left out: tokens, masks and numbers are carried",
        "unpaired": "which of two runs on a task was the better is left out",
        "unlabelled": "whether a run is desirable is left out",
        "content_parts": "contents in several parts stand as JSON",
        "later_turns": "runs are cut where their turns take too much of the file: later turns are "
        "left out",
        FULL: "runs are left out because the file was full: a browser opens no larger one "
        "well; export fewer runs to a file",
        "token_texts": "tokens have no texts where the tokenizer of their version is not here",
        "repeated_messages": "later calls of long runs carry only the messages since the model "
        "spoke last",
        "call_details": "how and when each model call was made, and how long each tool took, is "
        "left out",
    }
)

#: Fields of a request that a chat template reads, beside messages and tools.
TEMPLATE_SETTINGS = ("chat_template", "chat_template_kwargs", "continue_final_message", "documents",
                     "output_config", "reasoning", "reasoning_effort", "thinking")  # fmt: skip


def text_losses(run: Run) -> set[str]:
    """Return what every format loses that carries a run's texts, but not how each call was made."""
    losses = set()
    if run.redacted or any(call.redacted for call in run.calls):
        losses.add("redacted")
    if any(call.sampling.get(name) for call in run.calls for name in TEMPLATE_SETTINGS):
        losses.add("template_settings")
    return losses


def describe_loss(code: str) -> str:
    """Return the sentence of a loss's code."""
    return LOSSES.get(code) or code.replace("_", " ")


@dataclass(frozen=True)
class ExportLoss:
    """A loss in words, and the number of runs, pairs or tasks that had it."""

    count: int
    sentence: str


@dataclass(frozen=True)
class LossRules:
    """Rules for losses. `strict` makes each an error, except those in `allow`.

    `skip_unsupported` turns a run that the format cannot carry into a loss.
    """

    strict: bool = False
    allow: frozenset[str] = frozenset()
    skip_unsupported: bool = False


@dataclass
class ExportCounts:
    """Counts of an export so far: `records` lines or rows of `runs` runs (or pairs, or samples)."""

    rules: LossRules = field(default_factory=LossRules)
    records: int = 0
    runs: int = 0
    losses: Counter[str] = field(default_factory=Counter)

    def write_item(self, item: Item, write: Callable[..., Written]) -> Written:
        """Write an item with a format and count it. Raises BadInput as the rules demand."""
        written = Written([])
        if item.runs:
            try:
                written = write(*item.runs)
            except BadInput as error:
                if error.code != "unsupported_export" or not self.rules.skip_unsupported:
                    raise
                written = Written([], (UNSUPPORTED,))
        subject = " and ".join(run.id for run in item.runs)
        for code, count in (*item.lost, *((code, 1) for code in written.losses)):
            self.add(code, count, subject)
        self.records += len(written.records)
        self.runs += item.covers
        return written

    def add(self, code: str, count: int, subject: str = "") -> None:
        """Count a loss of `count` runs. Raises BadInput if the rules forbid it."""
        if self.rules.strict and code not in self.rules.allow:
            raise BadInput(
                f"{subject or 'what is exported'}: {describe_loss(code)} (the loss {code!r}, which "
                "strict does not allow)",
                param="strict",
                code="export_loss",
            )
        self.losses[code] += count


def describe_losses(counts: Mapping[str, int]) -> dict[str, ExportLoss]:
    """Return the losses with their sentences, most frequent first, then by code."""
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {code: ExportLoss(count, describe_loss(code)) for code, count in order if count}
