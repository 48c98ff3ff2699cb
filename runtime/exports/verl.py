"""`verl`: tasks as the Parquet that verl's RL trainers read, a row each: a prompt and its answer.

    data_source   string: metadata["data_source"] of the task, else the loop, else the agent
    prompt        list<struct<role, content>>: what the model read before its first answer
    ability       string: metadata["ability"] of the task, else the agent
    reward_model  struct<style "rule", ground_truth string>: the task's target
    extra_info    struct<index, split, task_id, run_id, agent, loop, generation, model>

verl picks its reward function by data_source, and hands it ground_truth and extra_info. The prompt
is that of the task's first run, as its first call read it. Called by tables.py; pyarrow is imported
when one is written.
"""

from functools import cache
from typing import Any

import orjson

from cray_agents.records import Message, Run
from cray_agents.runtime.exports.conversation import conversations_of
from cray_agents.runtime.exports.export_format import unsupported
from cray_agents.runtime.exports.line_formats import Written
from cray_agents.runtime.exports.parquet_files import TableFormat


@cache
def schema() -> Any:
    """The columns, as pyarrow has them."""
    import pyarrow as pa

    text, number = pa.string(), pa.int64()
    extra = {"index": number, "split": text, "task_id": text, "run_id": text, "agent": text,
             "loop": text, "generation": number, "model": text}  # fmt: skip
    return pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct(extra),
        }.items()
    )


def rows_of(run: Run, first: int) -> Written:
    """The run's task as a row. Raises BadInput (unsupported_export) for a prompt with no text."""
    task = run.task
    if task is None:
        return Written([], ("no_task",))
    losses = ["answers"]
    told = conversations_of(run)[0]
    if told.tools:
        losses.append("tools")
    target = task.target
    if target is None:
        losses.append("no_target")
    elif not isinstance(target, str):
        target = orjson.dumps(target, option=orjson.OPT_SORT_KEYS).decode()
        losses.append("json_target")
    extra = {
        "index": first,
        "split": task.split,
        "task_id": task.id,
        "run_id": run.id,
        "agent": run.agent,
        "loop": run.loop,
        "generation": run.generation,
        "model": run.model,
    }
    row = {
        "data_source": str(task.metadata.get("data_source") or run.loop or run.agent),
        "prompt": _prompt(run, told.messages, losses),
        "ability": str(task.metadata.get("ability") or run.agent),
        "reward_model": {"style": "rule", "ground_truth": target},
        "extra_info": extra,
    }
    return Written([row], tuple(dict.fromkeys(losses)))


def _prompt(run: Run, messages: list[Message], losses: list[str]) -> list[dict[str, str]]:
    """The messages before the first answer; the input, where none are known."""
    asked = messages or [{"role": "user", "content": run.input}]
    ends = (n for n, message in enumerate(asked) if message.get("role") == "assistant")
    asked = asked[: next(ends, len(asked))]
    if not asked:
        raise unsupported(run, "trajectory.messages", "begin with an answer: there is no prompt")
    return [
        {"role": str(message.get("role")), "content": _text(run, n, message, losses)}
        for n, message in enumerate(asked)
    ]


def _text(run: Run, place: int, message: Message, losses: list[str]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        where = f"messages[{place}].content"
        raise unsupported(run, where, "has parts that are no text, and verl's prompt has no others")
    losses.append("text_parts")
    return "".join(map(str, texts))


VERL = TableFormat(
    name="verl",
    title="verl Parquet",
    about="tasks for RL: data_source, prompt, ability, reward_model, extra_info; a row per task",
    schema=schema,
    of_run=rows_of,
    by_task=True,
)
