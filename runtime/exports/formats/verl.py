"""`verl`: tasks as Parquet for verl's RL trainers, a row per task: prompt and ground truth.

    data_source   string: metadata["data_source"] of the task, else the loop, else the agent
    prompt        list<struct<role, content>>: what the model read before its first answer, with the
                  messages of an input and an agent's examples
    ability       string: metadata["ability"] of the task, else the agent
    reward_model  struct<style "rule", ground_truth string>: the task's target
    extra_info    struct<index, split, task_id, run_id, agent, loop, iteration, model>

verl picks its reward function by data_source, and hands it ground_truth and extra_info. The prompt
is the one that the first call of the task's first run read. Called by export_files.py; pyarrow is
imported only when a file is written.
"""

from functools import cache
from typing import Any

from cray_agents.exact_json import dump_json
from cray_agents.messages import part_text, text_of, with_parts
from cray_agents.records import Message, Run
from cray_agents.runtime.exports.export_files import TableFormat
from cray_agents.runtime.exports.export_format import Written, text_losses, unsupported
from cray_agents.runtime.store.run_conversation import Conversation, conversations_of


@cache
def schema() -> Any:
    """Return the columns as a pyarrow schema."""
    import pyarrow as pa

    text, number = pa.string(), pa.int64()
    extra = {"index": number, "split": text, "task_id": text, "run_id": text, "agent": text,
             "loop": text, "iteration": number, "model": text}  # fmt: skip
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
    """Return the task as a row. Raises BadInput (unsupported_export) for a prompt without text."""
    task = run.task
    if task is None:
        return Written([], ("no_task",))
    losses = ["answers", *sorted(text_losses(run))]
    conversation = conversations_of(run)[0]
    if conversation.tools:
        losses.append("tools")
    target = task.target
    if target is None:
        losses.append("no_target")
    elif not isinstance(target, str):
        target = dump_json(target, sort_keys=True).decode()
        losses.append("json_target")
    extra = {
        "index": first,
        "split": task.split,
        "task_id": task.id,
        "run_id": run.id,
        "agent": run.agent,
        "loop": run.loop,
        "iteration": run.iteration,
        "model": run.model,
    }
    row = {
        "data_source": str(task.metadata.get("data_source") or run.loop or run.agent),
        "prompt": _prompt(run, conversation, losses),
        "ability": str(task.metadata.get("ability") or run.agent),
        "reward_model": {"style": "rule", "ground_truth": target},
        "extra_info": extra,
    }
    return Written([row], tuple(dict.fromkeys(losses)))


def _prompt(run: Run, conversation: Conversation, losses: list[str]) -> list[dict[str, str]]:
    """Return the messages before the first answer, or the run's input if it has no messages."""
    asked = run.input if run.task is None else run.task.input
    given = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    prompt, known = conversation.messages or given, conversation.history
    if conversation.messages:
        ends = (n for n, m in enumerate(prompt) if m.get("role") == "assistant" and n not in known)
        prompt = prompt[: next(ends, len(prompt))]
    if not prompt:
        raise unsupported(run, "trajectory.messages", "begin with an answer: there is no prompt")
    return [
        {"role": str(message.get("role")), "content": _text(run, n, message, losses)}
        for n, message in enumerate(prompt)
    ]


def _text(run: Run, index: int, message: Message, losses: list[str]) -> str:
    content = message.get("content")
    if message.get("tool_calls"):
        path = f"messages[{index}].tool_calls"
        raise unsupported(run, path, "are there, and verl's prompt has no field for them")
    if isinstance(content, str):
        return content
    if any(part_text(part) is None for part in with_parts(content)):
        path = f"messages[{index}].content"
        raise unsupported(run, path, "has parts that are no text, and verl's prompt has no others")
    losses.append("text_parts")
    return text_of(message)


VERL = TableFormat(
    name="verl",
    title="verl Parquet",
    about="tasks for RL: data_source, prompt, ability, reward_model, extra_info; a row per task",
    schema=schema,
    write_run=rows_of,
    by_task=True,
)
