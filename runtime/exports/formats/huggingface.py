"""`huggingface`: a folder that `datasets.load_dataset` reads: Parquet shards and a card.

    data/train-00000-of-0000N.parquet    a row per run: its conversation, rewards and origin. If
                                         its calls saw different system messages or tools, as
                                         after a handoff, a row for each, `part` 0, 1, ...
    README.md                            the card; its front matter names the shards (`configs`)

Tool calls, tools, metadata and targets are JSON texts, because Arrow would fill fields that some of
them lack with nulls. The folder holds no time of its making, so the same runs give the same bytes.
Called by export_files.py; pyarrow is imported only when a folder is written.
"""

from functools import cache
from typing import Any

from cray_agents.exact_json import dump_json
from cray_agents.messages import other_fields, reasoning_of
from cray_agents.records import Message, Run
from cray_agents.runtime.disk import durable
from cray_agents.runtime.exports.export_files import FolderContents, TableFormat
from cray_agents.runtime.exports.export_format import Written, describe_losses, text_losses
from cray_agents.runtime.store.run_conversation import conversations_of

ABOUT = {
    "id": "The run's id.",
    "part": "Which of the run's conversations, from 0: one for each system message and tools.",
    "messages": "The conversation; tool_calls is a JSON text in OpenAI's shape.",
    "tools": "The definitions of the tools offered, a JSON text.",
    "input": "What the agent was asked.",
    "output": "What it answered; JSON where that is no text.",
    "reward": "The sum of the rewards; null without any.",
    "rewards": "Each reward: name, value, who gave it, and the turn (from 0) if it is for one.",
    "agent": "The agent's name.",
    "model": "The model, name@version.",
    "stop_reason": "Why the run ended.",
    "error": "The type of the error it ended with, if any.",
    "error_message": "What that error said.",
    "task_id": "The task's id.",
    "target": "The task's target; JSON where that is no text.",
    "metadata": "The task's metadata, a JSON text.",
    "split": "The task's split: train, holdout or test.",
    "loop": "The loop that made the run.",
    "iteration": "Its iteration there.",
    "attempt": "Which attempt at the task.",
    "tags": "Its tags.",
    "started": "Unix seconds.",
    "seconds": "How long it took.",
    "prompt_tokens": "Tokens read, over all model calls.",
    "completion_tokens": "Tokens sampled, over all model calls.",
}


#: Columns that are fields of a run.
SAME = ("id", "input", "reward", "agent", "model", "loop", "iteration", "attempt", "tags",
        "started", "seconds")  # fmt: skip


@cache
def schema() -> Any:
    """Return the columns as a pyarrow schema."""
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    message = {"role": text, "content": text, "tool_calls": text, "tool_call_id": text,
               "name": text, "reasoning": text}  # fmt: skip
    reward = pa.struct({"name": text, "value": real, "source": text, "turn": whole})
    kinds = {
        "messages": pa.list_(pa.struct(message)),
        "reward": real,
        "rewards": pa.list_(reward),
        "tags": pa.list_(text),
        "started": real,
        "seconds": real,
        **dict.fromkeys(("part", "iteration", "attempt"), whole),
        **dict.fromkeys(("prompt_tokens", "completion_tokens"), whole),
    }
    return pa.schema([(name, kinds.get(name, text)) for name in ABOUT])


def rows_of(run: Run, first: int) -> Written:
    """Return a run as a row per conversation, and their losses."""
    task, usage = run.task, run.usage
    losses = ["exact_tokens"] if usage.calls else []
    if run.trajectory.turns:
        losses.append("call_details")
    losses += sorted(text_losses(run))
    about = {
        **{name: getattr(run, name) for name in SAME},
        "output": _text(run.output),
        "rewards": [
            {"name": r.name, "value": r.value, "source": r.source, "turn": r.turn}
            for r in run.rewards
        ],
        "stop_reason": run.stop_reason.value,
        "error": run.error.type if run.error else None,
        "error_message": run.error.message if run.error else None,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    if task is not None:
        about |= {"task_id": task.id, "target": _text(task.target), "split": task.split,
                  "metadata": _json(task.metadata)}  # fmt: skip
    rows = []
    for part, conversation in enumerate(conversations_of(run)):
        if conversation.other_turns:
            losses.append("other_calls")
        messages = [_message(message, losses) for message in conversation.messages]
        tools = _json(conversation.tools)
        rows.append({**about, "part": part, "messages": messages, "tools": tools})
    return Written(rows, tuple(dict.fromkeys(losses)))


def _message(message: Message, losses: list[str]) -> dict[str, Any]:
    """Return a message as a row of texts; content in several parts becomes JSON."""
    if other_fields(message):
        losses.append("message_fields")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        losses.append("content_parts")
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role")),
        "content": _text(content),
        "tool_calls": _json(calls) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
        "reasoning": _text(reasoning_of(message)),
    }


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return dump_json(value).decode()


def finish(folder: FolderContents) -> None:
    """Write the card beside the shards."""
    source, rows = folder.source, sum(folder.rows)
    columns = "\n".join(f"| `{column}` | {about} |" for column, about in ABOUT.items())
    lost = [f"- {loss.count:,} of them: {loss.sentence}" for loss in
            describe_losses(folder.losses).values()]  # fmt: skip
    losses = "\n".join(["What the rows do not carry:", "", *lost]) if lost else "Nothing is lost."
    card = f"""---
configs:
- config_name: default
  data_files:
  - split: {source.split}
    path: data/{source.split}-*.parquet
tags:
- agents
- trajectories
- cray-agents
---

# {source.name}

{source.description[0].upper()}{source.description[1:]}, exported by cray-agents: \
{rows:,} rows in {len(folder.rows)} files.

| column | |
|---|---|
{columns}

{losses}

```python
from datasets import load_dataset

rows = load_dataset(".", split="{source.split}")  # or this folder's path
```
"""
    durable.write_file(folder.path / "README.md", card.encode())


HUGGINGFACE = TableFormat(
    name="huggingface",
    title="Hugging Face dataset folder",
    about="a folder for datasets.load_dataset: Parquet shards and a card",
    schema=schema,
    write_run=rows_of,
    within="data",
    finish=finish,
)
