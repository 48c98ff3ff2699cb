"""`eval`: one log of Inspect AI, a sample per run, which Inspect View opens.

A log is a zip of JSON, in the layout of Inspect's own writer (version 2): `header.json`, one file
in `samples/` for each sample, and `summaries.json` for the list. The lines of an export are the
samples; `pack_log` makes the zip of them. A sample is a task, an epoch one of the runs on it; its
`uuid` is the run's id. Rewards are scores, a run's error is the sample's error. Calls of models and
tools are its events. A call names the messages it saw by ranges in a pool, where each different
message is once, as Inspect's own writer does: else a run of n turns would take n² space. Sample
metadata name run, agent, model with version, loop, iteration, tags, and the task's own metadata.
Listed in exporter.py.
"""

import os
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json, load_json, sent_arguments
from cray_agents.messages import (
    function_of,
    other_fields,
    part_text,
    reasoning_of,
    text_of_input,
    with_parts,
)
from cray_agents.records import Message, ModelCall, Run, StopReason, ToolCall, digest, is_finding
from cray_agents.runtime.exports.export_format import (
    Json,
    LineFormat,
    Written,
    json_text,
    text_losses,
    unsupported,
)
from cray_agents.runtime.exports.formats.jsonl import check_finite
from cray_agents.runtime.store.run_conversation import Conversation, conversation_of

VERSION = 2  # of the layout
SEVERAL = "several"  # models or agents in one log: each sample names its own
LONGEST = 1000  # characters of a text in the list of samples
CHANGED = (1980, 1, 1, 0, 0, 0)  # of the files in the zip: equal exports are equal bytes
_ROLES = ("system", "developer", "user", "assistant", "tool")
_STOPS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls",
          "content_filter": "content_filter"}  # fmt: skip


def _write_run(run: Run) -> Written:
    check_finite(run)
    conversation = conversation_of(run)
    losses = {"exact_tokens", "call_details", *text_losses(run)}
    writer, messages = MessageWriter(run, losses), []
    for index, message in enumerate(conversation.messages):
        turn = conversation.turns_by_message.get(index)
        model = turn.call.model if turn is not None and turn.call is not None else run.model
        messages.append(writer.write(f"messages[{index}]", message, model))
    events, pool = write_events(writer)
    usage, output = _usage(run), _output(run, conversation, messages)
    sample = {
        "id": run.task.id if run.task is not None else run.id,
        "epoch": 1,  # pack_log counts
        "input": _input(writer),
        "target": _target(run),
        "messages": messages,
        "output": output,
        "scores": _scores(run, output["completion"]) or None,
        "metadata": _metadata(run, conversation),
        "store": {},
        "events": events,
        "events_data": {"messages": pool, "calls": []},
        "attachments": {},
        "model_usage": usage,
        "uuid": run.id,
        "started_at": iso_time(run.started),
        "completed_at": iso_time(run.started + run.seconds),
        "total_time": run.seconds,
        "working_time": run.seconds,
        "error": _error(run),
        "limit": _limit(run),
        "turn_count": len(run.trajectory.turns),
    }
    return Written([sample], tuple(sorted(losses)))


def _input(writer: "MessageWriter") -> str | list[Json]:
    """Return what the agent was asked: a text, or a task's messages. Raises BadInput."""
    run = writer.run
    asked = run.input if run.task is None else run.task.input
    if isinstance(asked, str):
        return run.input
    return [writer.write(f"task.input[{n}]", one, run.model) for n, one in enumerate(asked)]


def _output(run: Run, conversation: Conversation, messages: list[Json]) -> Json:
    model = run.calls[-1].model if run.calls else run.model
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    last = answers[-1] if answers else -1
    turn = conversation.turns_by_message.get(last)
    reason = turn.call.finish_reason if turn is not None and turn.call is not None else None
    usage = count_tokens(run.usage.prompt_tokens, run.usage.completion_tokens)
    return write_output(model, messages[last] if answers else None, reason, usage)


def _usage(run: Run) -> Json:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for call in run.calls:
        counts[call.model][0] += len(call.prompt_token_ids)
        counts[call.model][1] += len(call.token_ids)
    return {model: count_tokens(read, sampled) for model, (read, sampled) in counts.items()}


def _scores(run: Run, answer: str) -> Json:
    """Return a score for each reward, named by it, and by source and turn where that is needed."""
    names = Counter(reward.name for reward in run.rewards)
    scores: Json = {}
    for reward in run.rewards:
        name = reward.source if is_finding(reward.source) else reward.name
        if reward.turn is not None:
            name = f"{name}[{reward.turn}]"
        if names[reward.name] > 1 and name in scores:
            name = f"{name} ({reward.source})"
        about = {"source": reward.source, "turn": reward.turn, "giver": reward.giver}
        score = {"value": reward.value, "answer": answer or None, "explanation": reward.comment}
        scores[name] = {**score, "metadata": about}
    return scores


def _metadata(run: Run, conversation: Conversation) -> Json:
    functions = [function_of(tool) for tool in conversation.tools if isinstance(tool, dict)]
    name, _, number = run.model.rpartition("@")
    known = {
        "run": run.id,
        "agent": run.agent,
        "model": run.model,
        "model_name": name or run.model,
        "model_version": int(number) if name and number.isdigit() else None,
        "loop": run.loop,
        "iteration": run.iteration,
        "attempt": run.attempt,
        "split": None if run.task is None else run.task.split,
        "reward": run.reward,
        "stop_reason": str(run.stop_reason),
        "tags": run.tags,
        "tools": [function for function in functions if function is not None],
        "task": {} if run.task is None else run.task.metadata,
        "imported": run.imported,
    }
    return {key: value for key, value in known.items() if value not in (None, [], {})}


def _target(run: Run) -> str | list[str]:
    target = run.target
    if isinstance(target, list) and all(isinstance(each, str) for each in target):
        return list(target)
    if target is None or isinstance(target, str):
        return target or ""
    return json_text(run, "target", target)


def _error(run: Run) -> Json | None:
    if run.error is None:
        return None
    text = f"{run.error.type}: {run.error.message}"
    return {"message": text, "traceback": text, "traceback_ansi": text}


def _limit(run: Run) -> Json | None:
    limits = {
        StopReason.max_turns: ("turn", float(len(run.trajectory.turns))),
        StopReason.max_tokens: ("token", float(run.usage.completion_tokens)),
        StopReason.timeout: ("time", run.seconds),
    }
    if run.stop_reason not in limits:
        return None
    kind, reached = limits[run.stop_reason]
    return {"type": kind, "limit": reached, "reason": f"the run ended by {run.stop_reason}"}


def pack_log(lines: Iterable[bytes], target: Path) -> None:
    """Write samples, each a line of JSON, as one log to a new file. Raises OSError."""
    summaries: list[Json] = []
    epochs = Counter[str]()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as log:
        for line in lines:
            sample: Json = load_json(line)
            epochs[sample["id"]] += 1
            sample["epoch"] = epochs[sample["id"]]
            name = f"samples/{sample['id']}_epoch_{sample['epoch']}.json"
            log.writestr(_entry(name), dump_json(sample))
            summaries.append(_summary(sample))
        header = _header(summaries)
        start = {name: header[name] for name in ("version", "eval", "plan")}
        log.writestr(_entry("_journal/start.json"), dump_json(start))
        log.writestr(_entry("summaries.json"), dump_json(summaries))
        log.writestr(_entry("header.json"), dump_json(header))
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, CHANGED)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _summary(sample: Json) -> Json:
    """Return a sample as the list shows it."""
    same = ("id", "epoch", "target", "scores", "model_usage", "uuid", "started_at", "completed_at",
            "total_time", "working_time", "turn_count")  # fmt: skip
    short = {
        key: value[:LONGEST] if isinstance(value, str) else value
        for key, value in sample["metadata"].items()
        if isinstance(value, str | int | float)
    }
    return {
        **{name: sample[name] for name in same},
        "input": text_of_input(sample["input"])[:LONGEST],
        "metadata": short,
        "error": sample["error"] and sample["error"]["message"][:LONGEST],
        "limit": sample["limit"] and sample["limit"]["type"],
        "completed": True,
        "message_count": len(sample["messages"]),
    }


def _header(summaries: list[Json]) -> Json:
    """Return the log's header: what was evaluated, and the mean of each score."""
    agents, models = (
        sorted({summary["metadata"].get(name, "") for summary in summaries})
        for name in ("agent", "model")
    )
    started = min((summary["started_at"] for summary in summaries), default=iso_time(0))
    ended = max((summary["completed_at"] for summary in summaries), default=iso_time(0))
    ids = sorted({summary["id"] for summary in summaries})
    name = digest([summary["uuid"] for summary in summaries], 22)
    scores = list(_means(summaries))
    loops = {summary["metadata"].get("loop") for summary in summaries} - {None}
    about = {"models": models, "agents": agents, "loops": sorted(loops)}
    return {
        "version": VERSION,
        "status": "success",
        "eval": {
            "eval_id": name,
            "run_id": name,
            "created": started,
            "task": _one(agents, "runs"),
            "task_id": name,
            "dataset": {"name": "runs", "samples": len(ids), "sample_ids": ids},
            "model": _one(models, "unknown"),
            "config": {"epochs": max((summary["epoch"] for summary in summaries), default=1)},
            "packages": {"cray-agents": version("cray-agents")},
            "metadata": about,
            "scorers": [{"name": score["name"]} for score in scores],
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(summaries),
            "completed_samples": sum(summary["error"] is None for summary in summaries),
            "scores": scores,
        },
        "stats": {
            "started_at": started,
            "completed_at": ended,
            "model_usage": _sum_usage(summaries),
        },
    }


def _means(summaries: list[Json]) -> Iterator[Json]:
    values: dict[str, list[float]] = defaultdict(list)
    for summary in summaries:
        for name, score in (summary["scores"] or {}).items():
            values[name].append(score["value"])
    for name, given in sorted(values.items()):
        mean = {"name": "mean", "value": sum(given) / len(given)}
        yield {
            "name": name,
            "scorer": name,
            "scored_samples": len(given),
            "unscored_samples": len(summaries) - len(given),
            "metrics": {"mean": mean},
        }


def _sum_usage(summaries: list[Json]) -> Json:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for summary in summaries:
        for model, usage in summary["model_usage"].items():
            counts[model].update(usage)
    return {model: dict(count) for model, count in counts.items()}


def _one(names: list[str], missing: str) -> str:
    return (names[0] or missing) if len(names) == 1 else SEVERAL if names else missing


def write_events(writer: "MessageWriter") -> tuple[list[Json], list[Json]]:
    """Return the events of a run's turns, and the pool of their messages.

    A call with messages that the format cannot carry is left out.
    """
    run, pool = writer.run, _Pool(writer)
    events: list[Json] = []
    for number, turn in enumerate(run.trajectory.turns):
        ended = run.started
        if turn.call is not None:
            ended = turn.call.started + turn.call.seconds
            try:
                events.append(_model_event(run, turn.call, f"turns[{number}]", pool))
            except BadInput:
                writer.losses.add("other_calls")
        events += (_tool_event(run, call, ended) for call in turn.tool_calls)
    return events, pool.messages


def iso_time(seconds: float) -> str:
    """Return unix seconds as Inspect writes times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class _Pool:
    """Different messages of a run, in the order in which calls first saw them."""

    def __init__(self, writer: "MessageWriter") -> None:
        self.writer = writer
        self.messages: list[Json] = []
        self._places: dict[bytes, int] = {}

    def ranges(self, path: str, messages: Sequence[Message], model: str) -> list[list[int]]:
        """Return where messages are, as ranges [start, end)."""
        ranges: list[list[int]] = []
        for index, message in enumerate(messages):
            place = self._place(f"{path}.messages[{index}]", message, model)
            if ranges and ranges[-1][1] == place:
                ranges[-1][1] += 1
            else:
                ranges.append([place, place + 1])
        return ranges

    def _place(self, path: str, message: Message, model: str) -> int:
        key = dump_json(message, sort_keys=True)
        if key not in self._places:
            self.messages.append(self.writer.write(path, message, model))
            self._places[key] = len(self.messages) - 1
        return self._places[key]


def _model_event(run: Run, call: ModelCall, path: str, pool: _Pool) -> Json:
    ranges = pool.ranges(path, call.messages, call.model)
    answer = pool.writer.write(f"{path}.message", call.message, call.model)
    usage = count_tokens(len(call.prompt_token_ids), len(call.token_ids))
    return {
        "event": "model",
        "uuid": call.id,
        "timestamp": iso_time(call.started),
        "working_start": max(0.0, call.started - run.started),
        "model": call.model,
        "input": [],
        "input_refs": ranges,
        "tools": [],
        "tool_choice": "auto",
        "config": {},
        "output": write_output(call.model, answer, call.finish_reason, usage),
        "completed": iso_time(call.started + call.seconds),
        "working_time": call.seconds,
    }


def _tool_event(run: Run, call: ToolCall, started: float) -> Json:
    result: Any = call.result
    event: Json = {
        "event": "tool",
        "id": call.id,
        "function": call.name,
        "arguments": sent_arguments(call.arguments),
        "result": result if isinstance(result, str) else dump_json(result).decode(),
        "timestamp": iso_time(started),
        "working_start": max(0.0, started - run.started),
    }
    if call.error:
        event["error"] = {"type": "unknown", "message": call.error}
    return event


@dataclass
class MessageWriter:
    """Writes a run's messages one after the other; `losses` gets the codes of what is left out."""

    run: Run
    losses: set[str]
    _functions: dict[str, str] = field(default_factory=dict)  # by the tool call's id

    def __post_init__(self) -> None:
        """Note which tool calls failed."""
        calls = [call for turn in self.run.trajectory.turns for call in turn.tool_calls]
        self._errors = {call.id: call.error for call in calls}

    def write(self, path: str, message: Message, model: str) -> Json:
        """Return a message; `model` made it if it is an answer. Raises BadInput, with `path`."""
        role = message.get("role")
        if role not in _ROLES:
            problem = f"is {role!r}, which this format does not have"
            raise unsupported(self.run, f"{path}.role", problem)
        if role == "developer":
            self.losses.add("developer_role")
        if other_fields(message):
            self.losses.add("message_fields")
        content = self._content(path, message)
        written: Json = {"role": "system" if role == "developer" else role, "content": content}
        if role == "assistant":
            written |= self._answer(path, message, model)
        elif role == "tool":
            call_id = str(message.get("tool_call_id") or "")
            written |= {"tool_call_id": call_id, "function": self._functions.get(call_id)}
            if self._errors.get(call_id):
                written["error"] = {"type": "unknown", "message": self._errors[call_id]}
        return written

    def _content(self, path: str, message: Message) -> Any:
        """Return the content as text, or as a list of parts in Inspect's shape."""
        content = message.get("content")
        pieces: list[Json] = []
        thought = reasoning_of(message)
        if thought and message.get("role") == "assistant":
            pieces.append({"type": "reasoning", "reasoning": str(thought)})
        if not pieces and (content is None or isinstance(content, str)):
            return content or ""
        if content is not None and not isinstance(content, str | list):
            problem = "is neither a text nor a list of parts"
            raise unsupported(self.run, f"{path}.content", problem)
        for part in with_parts("" if content is None else content):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            image = part.get("image_url") if isinstance(part, dict) else None
            url = image.get("url") if isinstance(image, dict) else None
            if (text := part_text(part)) is not None:
                pieces.append({"type": "text", "text": text})
            elif kind == "image_url" and isinstance(url, str):
                pieces.append({"type": "image", "image": url})
            else:
                problem = f"has a part of type {kind!r}, which this format does not have"
                raise unsupported(self.run, f"{path}.content", problem)
            if len(part) > 2:
                self.losses.add("message_fields")
        return pieces or ""

    def _answer(self, path: str, message: Message, model: str) -> Json:
        """Return the fields that an answer has beside its content."""
        answer: Json = {"model": model, "source": "generate"}
        calls = []
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                place = f"{path}.tool_calls[{index}]"
                raise unsupported(self.run, place, "is no call of a function")
            arguments = sent_arguments(function.get("arguments"))
            if "unparsed" in arguments:
                self.losses.add("tool_arguments")
            call_id = str(call.get("id") or "")
            self._functions[call_id] = function["name"]
            calls.append(
                {
                    "id": call_id,
                    "function": function["name"],
                    "arguments": arguments,
                    "type": "function",
                }
            )
        return {**answer, "tool_calls": calls} if calls else answer


def write_output(model: str, answer: Json | None, finish_reason: str | None, usage: Json) -> Json:
    """Return the output of a model: its answer as one choice, None if it gave none."""
    output: Json = {"model": model, "choices": [], "completion": ""}
    if answer is not None:
        content = answer["content"]
        text = (
            content if isinstance(content, str) else "\n".join(p.get("text", "") for p in content)
        )
        stop = _STOPS.get(finish_reason or "", "unknown")
        output["choices"] = [{"message": answer, "stop_reason": stop}]
        output["completion"] = text.strip("\n")
        output["usage"] = usage
    return output


def count_tokens(read: int, sampled: int) -> Json:
    """Return a usage in Inspect's shape."""
    return {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}


EVAL = LineFormat(
    name="eval",
    title="Log of Inspect AI",
    about="a sample per run with messages, tool calls, scores, errors, model usage and metadata",
    write_run=_write_run,
    suffix=".eval",
    pack=pack_log,
)
