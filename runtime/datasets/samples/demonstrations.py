"""Demonstrations: render conversations to imitate into training sequences.

The prompt of each assistant turn is rendered as the engine would render it. The text that the
template adds for the answer, up to and with the end-of-turn token, counts as sampled. The turns are
merged like those of a recorded run (run_samples.py), so both kinds of sample look the same. Called
by draft.py and selection.py. transformers is imported on first use because it takes seconds.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.exact_json import sent_arguments
from cray_agents.processes import importing_much
from cray_agents.records import Message
from cray_agents.runtime.datasets.samples.run_samples import TokenSample, TokenTurn, merge_turns
from cray_agents.runtime.vllm_plugins.template_time import TemplateTooSlow, limit_template

# errors that transformers raises for damaged files and for unexpected JSON
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@functools.lru_cache(maxsize=4)
def renderer_of(checkpoint: Path) -> "Renderer":
    """Return the Renderer of a checkpoint, cached because loading a tokenizer is slow."""
    return Renderer(checkpoint)


class Renderer:
    """A checkpoint's tokenizer and chat template. Raises BadInput if the directory lacks them."""

    def __init__(self, checkpoint: Path) -> None:
        with importing_much():
            from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(checkpoint), local_files_only=True, trust_remote_code=False
            )
        except _UNREADABLE as error:
            message = f"no tokenizer can be read from {checkpoint}: {error}"
            raise BadInput(message, param="tokenizer") from error
        if not self._tokenizer.chat_template:
            raise BadInput(f"the tokenizer in {checkpoint} has no chat template", param="tokenizer")
        self._ends = set(self._tokenizer.all_special_ids)

    def samples(
        self, conversation: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[TokenSample]:
        """Render a conversation. Only the assistant's tokens are trained on.

        A turn of `weight` 0 is only context for later turns. Raises BadInput if no turn is left, or
        if the template refuses the conversation or marks no end of a turn.
        """
        messages = [template_message(message) for message in conversation]
        signatures = [template_tool(tool) for tool in tools] or None
        turns = [
            self._turn(messages[: index + 1], signatures)
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and conversation[index].get("weight") != 0
        ]
        if not turns:
            raise BadInput(
                "a demonstration has no assistant message to train on", param="demonstrations"
            )
        return merge_turns(turns)

    def answer(
        self, conversation: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> TokenSample:
        """Render a conversation, and train only on its last message, the assistant's."""
        context = [{**message, "weight": 0} for message in conversation[:-1]]
        [sample] = self.samples([*context, {**conversation[-1], "weight": 1}], tools)
        return sample

    def _turn(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> TokenTurn:
        prompt = self._render(messages[:-1], tools, generation=True)
        full = self._render(messages, tools, generation=False)
        if not full.startswith(prompt):
            raise BadInput(
                "the chat template renders an answer differently from its generation prompt: "
                f"{full[-200:]!r} does not start with {prompt[-200:]!r}",
                param="tokenizer",
            )
        answer = self._tokens(full[len(prompt) :])
        ends = [index for index, token in enumerate(answer) if token in self._ends]
        if not ends:
            raise BadInput("the chat template ends a turn with no special token", param="tokenizer")
        sampled = answer[: ends[-1] + 1]
        return TokenTurn(self._tokens(prompt), sampled, [0.0] * len(sampled))

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, generation: bool
    ) -> str:
        from jinja2 import TemplateError

        try:
            with limit_template():
                return str(
                    self._tokenizer.apply_chat_template(
                        messages, tools=tools, add_generation_prompt=generation, tokenize=False
                    )
                )
        except TemplateTooSlow as error:
            raise BadInput(str(error), param="tokenizer") from error
        except (TemplateError, TypeError, ValueError) as error:  # raised by the template
            message = f"the chat template refuses a demonstration: {error}"
            raise BadInput(message, param="demonstrations") from error

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def template_message(message: Message) -> Message:
    """Convert a message as vLLM does for a chat template: arguments to a dict, text to a string."""
    rendered = {**message, "content": _text(message.get("content"))}
    rendered.pop("weight", None)  # for training only
    calls = rendered.pop("tool_calls", None)
    if calls:
        rendered["tool_calls"] = [
            {**call, "function": _with_object(call["function"])} for call in calls
        ]
    return rendered


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": sent_arguments(function.get("arguments"))}


def template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool as vLLM does for a chat template: fixed field order, None if missing."""
    function = tool["function"]
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        fields["strict"] = function["strict"]
    return {"type": "function", "function": fields}


def _text(content: Any) -> Any:
    """Return "" for None, and a list of text parts joined by newlines. Keep other content."""
    if content is None:
        return ""
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content
