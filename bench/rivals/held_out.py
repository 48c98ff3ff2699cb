"""Held-out success of a checkpoint at the calculator task: one measure, by transformers, for all.

The agent is that of cray_agents/cli/calculator_loop.py: the same prompt and tool, two turns,
greedy. Called by training_sides.py for every side's weights, outside all clocks.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from cray_agents.cli import calculator_loop
from cray_agents.errors import ToolError
from cray_agents.records import Message, Task
from cray_agents.tools.calculator import evaluate

AGENT = calculator_loop.agent
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def prompt_of(task: Task) -> list[Message]:
    """The conversation that a run begins with."""
    return [
        {"role": "system", "content": AGENT.instructions},
        {"role": "user", "content": task.input},
    ]


def success(network: Any, tokenizer: Any, tasks: Sequence[Task]) -> float:
    """The share of tasks whose last answer is the target and nothing else."""
    was_training = network.training
    network.eval()
    talks = [prompt_of(task) for task in tasks]
    answers = complete(network, tokenizer, talks)
    calls = {place: call for place, text in enumerate(answers) if (call := call_in(text))}
    for place, (message, result) in calls.items():
        talks[place] += [message, {"role": "tool", "tool_call_id": "call_0", "content": result}]
    second = complete(network, tokenizer, [talks[place] for place in calls])
    for place, text in zip(calls, second, strict=True):
        answers[place] = text
    network.train(was_training)
    return sum(a == task.target for a, task in zip(answers, tasks, strict=True)) / len(tasks)


def complete(network: Any, tokenizer: Any, talks: Sequence[list[Message]]) -> list[str]:
    """The most likely next message of each conversation."""
    import torch

    if not talks:
        return []
    texts = tokenizer.apply_chat_template(
        list(talks), tools=AGENT.tool_schemas, add_generation_prompt=True, tokenize=False
    )
    given = tokenizer(
        texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    with torch.no_grad():
        out = network.generate(
            input_ids=given["input_ids"],
            attention_mask=given["attention_mask"],
            max_new_tokens=AGENT.max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    new = out[:, given["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(new, skip_special_tokens=True))


def call_in(text: str) -> tuple[Message, str] | None:
    """The message with the tool call that a text holds, and the tool's result; None without."""
    if (match := TOOL_CALL.search(text)) is None:
        return None
    try:
        call = json.loads(match[1])
        name, arguments = call["name"], call["arguments"]
        if name != "calculator":
            raise ToolError(f"there is no tool {name}")
        result = str(evaluate(arguments["expression"]))
    except ToolError as error:
        result = f"error: {error}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # no call that could be carried out
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": "call_0", "type": "function", "function": function}
    content = text[: match.start()]
    return {"role": "assistant", "content": content, "tool_calls": [call]}, result
