"""Seed model: make a tiny untrained Qwen3, the starting point of the demo, without a download.

Tests call `make_seed_model`, the demo and the cookbook `make_tiny_model`. vLLM, transformers and
the Megatron trainer then read the directory like any other Hugging Face model. Two choices matter
to the reader of a run:

* The chat template repeats sampled tokens exactly: it renders a tool call from its parsed form in
  the one spelling that the demonstrations use. So the prompt of an agent's second turn starts with
  the tokens of its first, and one run is one training sequence.
* Digits are single tokens, hence an unseen number is only an unseen order of known tokens.

`make_tiny_model` makes one for a loop's own demonstrations: see `cray_agents.testing`.
The same seed and corpus give the same bytes. Importing this module is light: functions import
torch and tokenizers themselves. Read next: `cray_agents/cli/calculator_loop.py`.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cray_agents.errors import BadInput, SetupError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer
    from torch import Tensor

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not special: the hermes parser must find them in the decoded text (as in Qwen's own tokenizer).
TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"

CHAT_TEMPLATE = """\
{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}\
{%- endmacro %}
{%- if messages[0].role == 'system' or tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content }}
    {%- endif %}
    {%- for tool in tools or [] %}
        {%- set arguments = tool.function.parameters.properties | list %}
        {{- '\\n' + tool.function.name + '(' + arguments | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {%- if arguments is not string %}
                {%- set arguments = arguments | tojson %}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- arguments + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a seed model; the defaults make 0.43M parameters.

    `head_size` must be one of vLLM's attention sizes on CPU (32, 64, 80, 96, 112, 128).
    Embeddings are untied: vLLM's in-place reload on CPU would miss a tied output layer.
    """

    vocabulary: int = 512
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    feed_forward: int = 256
    context: int = 1024
    rope_theta: float = 10_000.0
    init_std: float = 0.02


DEFAULT_SHAPE = ModelShape()


def make_seed_model(
    directory: Path, *, seed: int, corpus: Iterable[str], shape: ModelShape = DEFAULT_SHAPE
) -> None:
    """Write a randomly initialised model with its own tokenizer as a Hugging Face directory.

    The tokenizer learns its merges from `corpus`, usually the rendered demonstrations. Raises
    ValueError if it is empty.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus, shape.vocabulary)
    _write_tokenizer(directory, tokenizer, shape.context)
    _write_model(directory, tokenizer, seed, shape)


def make_tiny_model(
    directory: Path | str,
    demonstrations: Iterable[tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
    shape: ModelShape = DEFAULT_SHAPE,
) -> Path:
    """Write an untrained model with the words of these demonstrations; return its directory.

    The model is written whole or not at all, so a killed call can be repeated. An existing
    directory stays unchanged. The weights are random: warm the model up (WarmUp) before a loop.

    Args:
        directory: path of the new Hugging Face directory.
        demonstrations: pairs of messages and metadata, as for a Loop.
        tools: schemas of the tools that the demonstrations call, `agent.tool_schemas`.
        seed: seed of the weights.
        shape: sizes; the default has 0.43M parameters, and learns one pattern in a minute.

    Raises BadInput without demonstrations, SetupError if torch is not installed.
    """
    directory = Path(directory)
    if directory.exists():
        return directory
    pairs = list(demonstrations)
    if not pairs:
        raise BadInput(
            "a model's words come from demonstrations: give some", param="demonstrations"
        )
    draft = directory.with_name(f"{directory.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        corpus = [render(messages, tools) for messages, _ in pairs]
        make_seed_model(draft, seed=seed, corpus=corpus, shape=shape)
    except ModuleNotFoundError as error:
        raise SetupError(
            f"to make a model takes {error.name}: pip install 'cray-agents[cpu]' or "
            "'cray-agents[gpu]'; see `cray-agents doctor`"
        ) from error
    return draft.rename(directory)


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """Render one conversation with the chat template; such texts make a good corpus."""
    return str(_template().render(messages=messages, tools=tools, add_generation_prompt=False))


@lru_cache(maxsize=1)
def _template() -> Template:
    """Compile the chat template as transformers does, whose import would take a second."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


def train_tokenizer(corpus: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE that never merges digits; unused ids have no token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = list(corpus)
    if not texts:
        raise ValueError("the tokenizer's corpus is empty: pass the demonstrations' texts")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [AddedToken(mark, special=True, normalized=False) for mark in (PAD, START, END)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 2,  # room for the two tool marks below
        special_tokens=marks,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_marks(texts), trainer)
    tokenizer.add_tokens(
        [AddedToken(mark, special=False, normalized=False) for mark in (TOOL_CALL, TOOL_CALL_END)]
    )
    return tokenizer


def _without_marks(texts: Iterable[str]) -> Iterator[str]:
    """Replace the added tokens by line breaks: the trainer would learn merges of their letters."""
    for text in texts:
        for mark in (PAD, START, END, TOOL_CALL, TOOL_CALL_END):
            text = text.replace(mark, "\n")
        yield text


def _write_tokenizer(directory: Path, tokenizer: Tokenizer, context: int) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_model(directory: Path, tokenizer: Tokenizer, seed: int, shape: ModelShape) -> None:
    """Write the files that transformers' Qwen3 writes, to the byte. Its import takes seconds."""
    from safetensors.torch import save_file

    ends: dict[str, Any] = {
        "eos_token_id": tokenizer.token_to_id(END),
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        **ends,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": shape.init_std,
        "intermediate_size": shape.feed_forward,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": shape.context,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }
    generation: dict[str, Any] = {
        "_from_model_config": True,
        "output_attentions": False,
        "output_hidden_states": False,
        "use_cache": True,
        **ends,
    }
    for name, settings in (("config", config), ("generation_config", generation)):
        settings["transformers_version"] = importlib.metadata.version("transformers")
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (directory / f"{name}.json").write_text(text, encoding="utf-8")
    weights = _draw_weights(seed, shape, ends["pad_token_id"])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _draw_weights(seed: int, shape: ModelShape, pad: int) -> dict[str, Tensor]:
    """Return the tensors by their names in Qwen3, drawn in the order of transformers.

    Each layer of torch draws its weights when it is made, and the model draws them anew.
    """
    import torch
    from torch.nn import Embedding, Linear

    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    names = {
        "self_attn.q_proj": (shape.hidden, queries),
        "self_attn.k_proj": (shape.hidden, keys),
        "self_attn.v_proj": (shape.hidden, keys),
        "self_attn.o_proj": (queries, shape.hidden),
        "mlp.gate_proj": (shape.hidden, shape.feed_forward),
        "mlp.up_proj": (shape.hidden, shape.feed_forward),
        "mlp.down_proj": (shape.feed_forward, shape.hidden),
    }
    norms = {
        "self_attn.q_norm": shape.head_size,
        "self_attn.k_norm": shape.head_size,
        "input_layernorm": shape.hidden,
        "post_attention_layernorm": shape.hidden,
    }
    weights = {"model.norm": torch.ones(shape.hidden)}
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # the caller's draws stay as they are
        torch.manual_seed(seed)
        body: dict[str, Embedding | Linear] = {
            "model.embed_tokens": Embedding(shape.vocabulary, shape.hidden)
        }
        for layer in range(shape.layers):
            stem = f"model.layers.{layer}."
            weights |= {stem + name: torch.ones(size) for name, size in norms.items()}
            body |= {stem + name: Linear(*sizes, bias=False) for name, sizes in names.items()}
        for name, module in body.items():
            weights[name] = module.weight.normal_(0.0, shape.init_std)
        weights["model.embed_tokens"][pad] = 0.0
        head = Linear(shape.hidden, shape.vocabulary, bias=False)
        weights["lm_head"] = head.weight.normal_(0.0, shape.init_std)
    return {f"{name}.weight": weight.detach() for name, weight in weights.items()}
