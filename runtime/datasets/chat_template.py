"""Chat template: the only road from a conversation to a prompt.

The prompt equals vLLM's, text and tokens, but for control tokens. vLLM's own functions are not
called: their import takes torch and several seconds, and a process that builds datasets has
neither. tests/runtime/datasets/test_chat_templates.py holds this module against them instead, for
every chat template that an installed package ships.

A control token is a special token of the tokenizer, such as `<|im_end|>`. Where the template writes
it, it is that token. In a content, an argument or a tool's description it is text: else a tool's
result could end its turn and begin another. vLLM makes tokens of both.

What a template would leave out is found by rendering once more with a mark for each text, and
looking for the marks. Called by demonstrations.py. transformers is imported on first use because it
takes seconds.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.exact_json import read_arguments, sent_arguments
from cray_agents.processes import importing_much
from cray_agents.records import Message
from cray_agents.runtime.vllm_plugins.template_time import TemplateTooSlow, limit_template

# errors that transformers raises for damaged files and for unexpected JSON
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
#: Types of parts that vLLM reads as text -> the field that has it.
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_FIELDS = {"role", "content", "name", "task", "weight"}  # of any message; `weight` is for training
_OWN_FIELDS = {
    "assistant": {"tool_calls", "reasoning", "reasoning_content"},
    "tool": {"tool_call_id"},
    "developer": {"tools"},
}
_BILLING = "x-anthropic-billing-header"  # begins a line that vLLM drops, different in each request
_MASKS = 0x100000  # private use, plane 16: the first characters of control tokens in contents
_ALIASES = 0x108000  # ... and the control tokens that the template writes
_PRIVATE = re.compile("[\U00100000-\U0010fffd]")


def read_tokenizer(checkpoint: Path) -> Any:
    """Return a checkpoint's tokenizer, as transformers has it. Raises BadInput."""
    with importing_much():
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(checkpoint), local_files_only=True, trust_remote_code=False
        )
    except _UNREADABLE as error:
        message = f"no tokenizer can be read from {checkpoint}: {error}"
        raise BadInput(message, param="tokenizer") from error


class ChatTemplate:
    """A checkpoint's tokenizer and chat template. Raises BadInput if the directory lacks them."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer: Any = read_tokenizer(checkpoint)
        if not self.tokenizer.chat_template:
            raise BadInput(f"the tokenizer in {checkpoint} has no chat template", param="tokenizer")
        known = inspect.signature(self.tokenizer.apply_chat_template).parameters
        self.reserved = {*known, "messages"} - {"documents"}
        added = self.tokenizer.added_tokens_decoder.items()
        self._control = {token.content: number for number, token in added if token.special}
        self.special_ids = {*self._control.values(), *self.tokenizer.all_special_ids}
        longest_first = sorted(map(re.escape, self._control), key=len, reverse=True)
        #: as `tokenizers` finds them: the leftmost, of these the longest
        self._controls = re.compile("|".join(longest_first) or r"(?!)")
        #: their beginnings, with which a text may end: the template may write another behind it
        self._cut = tuple({word[:end] for word in self._control for end in range(1, len(word))})
        begun = "|".join(map(re.escape, self._cut)) or r"(?!)"
        self._begins = re.compile(f"(?=(?:{self._controls.pattern})|(?:{begun})\\Z)(.)", re.DOTALL)
        firsts = sorted({word[0] for word in self._control})
        self._masks = {first: chr(_MASKS + index) for index, first in enumerate(firsts)}
        self._unmasks = str.maketrans({mask: first for first, mask in self._masks.items()})

    def masked(self, value: Any) -> Any:
        """Return messages or tools without a control token: the first character is replaced."""
        if isinstance(value, str):
            if self._controls.search(value) is None and not value.endswith(self._cut):
                return value
            return self._begins.sub(lambda match: self._masks[match[1]], value)
        if isinstance(value, list):
            return [self.masked(item) for item in value]
        if isinstance(value, dict):
            return {self.masked(key): self.masked(item) for key, item in value.items()}
        return value

    def unmasked(self, text: str) -> str:
        """Return a rendered text with the characters that `masked` replaced."""
        return text.translate(self._unmasks)

    def tokens(self, text: str, *, is_masked: bool) -> list[int]:
        """Return the tokens of a rendered text; what was masked in it is text. Raises BadInput."""
        if not is_masked:
            try:
                return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            except (TypeError, ValueError) as error:  # half a surrogate pair
                message = f"a conversation cannot be encoded: {error}"
                raise BadInput(message, param="demonstrations") from error
        backend, numbers = self._blind
        aliased = self._controls.sub(lambda match: chr(_ALIASES + self._control[match[0]]), text)
        ids = backend.encode(self.unmasked(aliased), add_special_tokens=False).ids
        return [numbers.get(number, number) for number in ids]

    @functools.cached_property
    def _blind(self) -> tuple[Any, dict[int, int]]:
        """A tokenizer that takes control tokens for text, and their aliases' numbers for them.

        The whole text goes through it at once, so nothing else changes at a token's borders.
        """
        from tokenizers import AddedToken

        backend = copy.deepcopy(getattr(self.tokenizer, "backend_tokenizer", None))
        if backend is None or max(self._control.values()) >= 0x10FFFD - _ALIASES:
            message = "this tokenizer cannot encode control tokens in contents as text"
            raise BadInput(message, param="tokenizer")
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        numbers = {}
        for number, token in self.tokenizer.added_tokens_decoder.items():
            if token.special:
                alias = chr(_ALIASES + number)
                sides = {"lstrip": token.lstrip, "rstrip": token.rstrip}
                backend.add_tokens([AddedToken(alias, normalized=False, special=False, **sides)])
                numbers[backend.token_to_id(alias)] = number
        return backend, numbers


class Chat:
    """A conversation as the template gets it. `losses` names what it is not given, or leaves out.

    Raises BadInput, as its methods do.
    """

    def __init__(
        self,
        template: ChatTemplate,
        conversation: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._template, self._kwargs = template, kwargs or {}
        if reserved := sorted(template.reserved & self._kwargs.keys()):
            message = f"chat_template_kwargs cannot set {reserved[0]!r}"
            raise BadInput(message, param="chat_template_kwargs")
        plain_tools = [_template_tool(tool) for tool in tools] or None
        try:
            self._source: str = template.tokenizer.get_chat_template(None, tools=plain_tools)
        except ValueError as error:  # several templates, and none is the default
            raise BadInput(f"{error}", param="tokenizer") from error
        takes_parts, self.losses = _takes_parts(self._source), set[str]()
        plain = [
            _template_message(message, f"messages[{index}]", takes_parts, self.losses)
            for index, message in enumerate(conversation)
        ]
        self.messages = [{**template.masked(m), "role": m["role"]} for m in plain]
        self._tools = template.masked(plain_tools)
        self._plain: tuple[list[Message], Any] | None = None
        if (self.messages, self._tools) != (plain, plain_tools):
            self._plain = plain, plain_tools
            if _PRIVATE.search(f"{plain}{plain_tools}"):
                message = "it has control tokens and characters of plane 16: both cannot be encoded"
                raise BadInput(message, param="demonstrations")

    def text(self, count: int, *, generation: bool) -> str:
        """Render the first messages. Raises BadInput."""
        text = self._render(self.messages[:count], self._tools, generation)
        if self._plain is not None:
            messages, tools = self._plain
            plain = self._render(messages[:count], tools, generation)
            if self._template.unmasked(text) != plain:
                raise BadInput(
                    "the chat template acts upon a control token within a content, which is to be"
                    " text",
                    param="demonstrations",
                )
        return text

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text of this conversation. Raises BadInput."""
        return self._template.tokens(text, is_masked=self._plain is not None)

    def hidden(self, count: int) -> tuple[set[str], set[str]]:
        """Return what the template leaves out of the first messages, of which the last is trained.

        The first set makes an answer meaningless. Of earlier answers only the calls are looked for:
        the rest of them an engine would leave out, too.
        """
        marks: dict[str, tuple[str, bool]] = {}

        def mark(what: str, vital: bool = True) -> str:
            name = f"w{len(marks)}w"
            marks[name] = what, vital
            return name

        names: dict[str, str] = {}
        tools = copy.deepcopy(self._tools)
        for tool in tools or ():
            name = tool["function"]["name"]
            tool["function"]["name"] = names[name] = mark("definitions of tools", False)
        messages = []
        for index, message in enumerate(self.messages[:count]):
            messages.append(marked := {**message})
            role, is_answer = message["role"], index == count - 1
            place, calls = f"messages[{index}] ({role})", message.get("tool_calls") or []
            if is_answer and calls:
                text_mark = functools.partial(mark, "texts beside tool calls", False)
            else:
                text_mark = functools.partial(mark, f"the content of {place}")
            if is_answer or role != "assistant":
                marked["content"] = _marked(message["content"], text_mark)
            if is_answer and str(message.get("reasoning") or "").strip():
                thought = mark("thoughts of answers", False)
                marked |= {"reasoning": thought, "reasoning_content": thought}
            if name := message.get("name"):
                known = role == "tool" and names.get(name, name)
                marked["name"] = known or mark("names of messages", False)
            if calls:
                marked["tool_calls"] = []
            for call in calls:
                name, values = call["function"]["name"], mark(f"a tool call of {place}")
                if name not in names:
                    names[name] = mark(f"a tool call of {place}")
                function = {**call["function"], "name": names[name], "arguments": {values: values}}
                marked["tool_calls"].append({**call, "function": function})
        text = self._render(messages, tools, False)
        lost = [(what, vital) for name, (what, vital) in marks.items() if name not in text]
        return {w for w, vital in lost if vital}, {w for w, vital in lost if not vital}

    def says(self, index: int, answer: str) -> bool:
        """Tell whether a rendered answer has the texts of its message as they are."""
        content = self.messages[index]["content"]
        texts = [part["text"] for part in content] if isinstance(content, list) else [content]
        return all(text.strip() in answer for text in texts)

    def opener(self, role: str) -> list[int]:
        """Return the tokens of a message that follows an answer, as the template begins it."""
        answer: Message = {"role": "assistant", "content": "a"}
        if role == "tool":
            function = {"name": "f", "arguments": {"a": "a"}}
            answer["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
        question, reply = {"role": "user", "content": "a"}, {"role": role, "content": "a"}
        chat = Chat(self._template, [question, answer, {**reply, "tool_call_id": "c"}], [])
        before, after = (chat.text(count, generation=False) for count in (2, 3))
        return chat.tokens(after[len(before) :]) if after.startswith(before) else []

    def _render(self, messages: list[Message], tools: Any, generation: bool) -> str:
        from jinja2 import TemplateError

        if any(message["role"] == "developer" for message in messages) and not (
            '"developer"' in self._source or "'developer'" in self._source
        ):
            messages = _one_system(messages)
        options = {**self._kwargs, "tools": tools, "add_generation_prompt": generation}
        apply = self._template.tokenizer.apply_chat_template
        try:
            with limit_template():
                return str(apply(messages, chat_template=self._source, tokenize=False, **options))
        except TemplateTooSlow as error:
            raise BadInput(str(error), param="tokenizer") from error
        except (TemplateError, TypeError, ValueError) as error:  # raised by the template
            message = f"the chat template refuses a demonstration: {error}"
            raise BadInput(message, param="demonstrations") from error


def _template_message(message: Message, place: str, takes_parts: bool, losses: set[str]) -> Message:
    """Convert a message as vLLM does for a chat template. Raises BadInput, naming its place."""
    role, own = message["role"], _OWN_FIELDS.get(message["role"], set())
    for name in sorted(message.keys() - _FIELDS - own):
        if message[name] and name in ("refusal", "function_call", "audio"):
            raise BadInput(f"{place} has {name!r}: it cannot be rendered", param="demonstrations")
        if message[name]:
            losses.add(f"`{name}` of messages")
    pieces = _text_parts(message.get("content"), place)
    if role == "system":
        pieces = [kept for part in pieces for kept in _without_billing(part)]
    joined = "\n".join(part["text"] for part in pieces)
    converted: Message = {"role": role, "content": joined}
    if takes_parts and role != "tool":
        converted["content"] = pieces
    if calls := message.get("tool_calls"):
        trained = message.get("weight") != 0
        converted["tool_calls"] = [_call(call, place, trained) for call in calls]
    thought = message.get("reasoning")
    thought = message.get("reasoning_content") if thought is None else thought
    if role == "assistant" and thought is not None:
        converted |= {"reasoning": thought, "reasoning_content": thought}
    names = ("name", "task", *(("tool_call_id",) if role == "tool" else ()))
    converted |= {name: message[name] for name in names if isinstance(message.get(name), str)}
    if role == "developer" and message.get("tools"):
        converted["tools"] = message["tools"]
    return converted


def _text_parts(content: Any, place: str) -> list[Message]:
    """Return a content as text parts. Raises BadInput if it has others."""
    if not isinstance(content, list):
        content = [] if content is None else [content]
    pieces = []
    for part in content:
        kind = "text" if isinstance(part, str) else None
        if isinstance(part, dict):
            kind, part = part.get("type"), part.get(_TEXTS.get(str(part.get("type")), ""))
        if part is None and kind in ("text", "refusal"):
            continue  # as vLLM does
        if kind not in _TEXTS or not isinstance(part, str):
            message = f"{place} has content of type {kind or type(part).__name__!r}: not text"
            raise BadInput(message, param="demonstrations")
        pieces.append({"type": "text", "text": part})
    return pieces


def _without_billing(part: Message) -> list[Message]:
    """Return a system part without the line that Claude Code begins it with, as vLLM does."""
    if not part["text"].startswith(_BILLING):
        return [part]
    rest = part["text"].partition("\n")[2]
    return [{**part, "text": rest}] if rest else []


def _call(call: dict[str, Any], place: str, trained: bool) -> dict[str, Any]:
    """Convert a tool call: its arguments become an object, as the model would read them again."""
    function = call.get("function")
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise BadInput(f"{place} has a tool call that is no function's", param="demonstrations")
    given = function.get("arguments") or {}
    if trained and read_arguments(given) is None:
        message = f"{place} calls {function.get('name')} with arguments that are no JSON object"
        raise BadInput(message, param="demonstrations")
    return {**call, "function": {**function, "arguments": sent_arguments(given)}}


def _marked(content: Any, mark: Callable[[], str]) -> Any:
    """Return a content with a mark for each of its texts that is not blank."""
    if isinstance(content, list):
        return [{**part, "text": _marked(part["text"], mark)} for part in content]
    return mark() if content.strip() else content


def _template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool as vLLM does for a chat template: fixed field order, None if missing."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadInput(f"{str(tool)[:200]} is no function's definition", param="tools")
    fields = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        fields["strict"] = function["strict"]
    return {"type": "function", "function": fields}


def _one_system(messages: list[Message]) -> list[Message]:
    """Make the developer's messages the system's, and all of the system's one, as vLLM does."""
    systems = [{**m, "role": "system"} for m in messages if m["role"] in ("system", "developer")]
    if messages[0]["role"] == "developer" and len(systems) == 1:
        return [*systems, *messages[1:]]
    texts = ["\n".join(p["text"] for p in c) if isinstance(c, list) else c
             for c in (m["content"] for m in systems)]  # fmt: skip
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(m for m in messages if m["role"] not in ("system", "developer"))]


@functools.lru_cache(maxsize=32)
def _takes_parts(source: str) -> bool:
    """Tell whether a template loops over the parts of a content. It is given text if not.

    These are vLLM's rules: it reads the template's syntax and runs nothing.
    """
    from jinja2 import TemplateError, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        root = _compile_jinja_template(source).environment.parse(source)
    except TemplateError:
        return False  # to render it will say why

    def reads(node: Any, names: set[str], key: str | None = None) -> bool:
        """Tell whether a node is one of the variables, or its `key`: filtered, tested or sliced."""
        while isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        if key is not None:
            attribute = isinstance(node, nodes.Getattr) and node.attr == key
            item = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const)
            if not attribute and not (item and node.arg.value == key):
                return False
            node = node.node
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names

    assigns, loops = list(root.find_all(nodes.Assign)), list(root.find_all(nodes.For))
    lists = {"messages"}
    while new := {
        getattr(a.target, "name", "") for a in assigns if reads(a.node, lists)
    }.difference(lists, {""}):
        lists |= new
    items = {getattr(loop.target, "name", "") for loop in loops if reads(loop.iter, lists)}
    within: dict[int, set[str]] = {}  # by loop: its macro's parameters that a content is passed as
    for macro in root.find_all(nodes.Macro):
        passed = set()
        for call in root.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given = [*zip((p.name for p in macro.args), call.args, strict=False)]
                given += [(k.key, k.value) for k in call.kwargs]
                passed |= {name for name, value in given if reads(value, items, "content")}
        for loop in macro.find_all(nodes.For):
            within[id(loop)] = passed | within.get(id(loop), set())
    return any(
        reads(loop.iter, items, "content")
        or (
            isinstance(loop.iter, nodes.Name)
            and loop.iter.name in within.get(id(loop), {"content"})
        )
        for loop in loops
    )
