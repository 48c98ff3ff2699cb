"""Requests whose fields only the engine can check: sampling, templates, schemas, tools."""

import json
from random import Random
from typing import Any

from tests.support.fuzz.bodies import SAYS, TOOL

PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAYS, "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": SAYS, "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/v1/tokenize": {"prompt": "hi"},
    "/v1/detokenize": {"tokens": [1, 2]},
    "/v1/messages/count_tokens": {"messages": SAYS},
}
_NAMES = """
temperature top_p top_k min_p n best_of max_tokens max_completion_tokens max_output_tokens
min_tokens stop stop_sequences stop_token_ids include_stop_str_in_output ignore_eos seed
logprobs top_logprobs prompt_logprobs return_token_ids return_tokens_as_token_ids
presence_penalty frequency_penalty repetition_penalty length_penalty use_beam_search logit_bias
bad_words allowed_token_ids response_format structured_outputs guided_json guided_regex
guided_choice guided_grammar text tools tool_choice parallel_tool_calls chat_template
chat_template_kwargs add_generation_prompt continue_final_message documents mm_processor_kwargs
truncate_prompt_tokens truncation priority user echo suffix detokenize skip_special_tokens
spaces_between_special_tokens add_special_tokens cache_salt request_id kv_transfer_params
vllm_xargs reasoning reasoning_effort thinking thinking_token_budget include include_reasoning
metadata store background previous_response_id service_tier stream stream_options dimensions
encoding_format input_type system instructions messages prompt input tokens prompt_embeds
prompt_token_ids modalities audio logits_processors return_sequences
"""
FIELDS = tuple(_NAMES.split())
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    0.5,
    -0.5,
    1e-9,
    1e308,
    2**31,
    2**63 - 1,
    2**64 - 1,
    -(2**63),
    10**6,
    "",
    "hi",
    "\0",
    "🎉",
    "auto",
    "none",
    "required",
    "x" * 5000,
    "{{ raise_exception('no') }}",
    "{% for x in range(100000000) %}{% endfor %}",
    "{{ 1/0 }}",
    "{{",
    "{{ messages[9].content.x.y }}",
    [],
    [[]],
    [None],
    [1],
    [-1],
    [2**31],
    [2**63],
    [10**6],
    ["a", ""],
    [""],
    ["x"] * 600,
    [1.5],
    [{}],
    [1, 2, 3] * 500,
    {},
    {"a": 1},
    {"1": 200},
    {"1": "x"},
    {"-1": 1.0},
    {"999999999": 1.0},
    {"type": "json_object"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/nowhere"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": "((("}}},
    {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}}},
    {"type": "nonsense"},
    {"type": "structural_tag", "format": {}},
    {"type": "function", "function": {"name": "f"}},
    {"type": "function", "function": {"name": "nobody"}},
    {"type": "tool", "name": "nobody"},
    {"include_usage": "x"},
    {"regex": "((("},
    {"regex": "(a+)+$", "json": "{"},
    {"choice": []},
    {"choice": [1]},
    {"grammar": "root ::= "},
    {"json": {"type": "object", "properties": 5}},
    [TOOL],
    [{"type": "function"}],
    [{"type": "function", "function": {"name": "", "parameters": {"type": "nonsense"}}}],
    [{"type": "function", "function": {"name": "f", "parameters": 5}}],
    [{"type": "web_search"}],
    [{"name": "f", "input_schema": {"type": "object"}}],
    [{"name": "f", "input_schema": 5}],
    [{"role": "nobody", "content": "hi"}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "nonsense", "x": 1}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/x"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"role": "assistant", "content": "hi"}],
    [{"role": "assistant", "tool_calls": []}],
    [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "5"}}]}],
    [{"role": "assistant", "tool_calls": [{"id": 5, "type": "x", "function": None}]}],
    [{"role": "tool", "content": "4"}],
    [{"role": "tool", "content": {"a": 1}, "tool_call_id": 5}],
    [{"role": "system", "content": "be"}, {"role": "system", "content": "be"}],
    [{"role": "user", "content": "word " * 3000}],
    [{"type": "function_call", "name": "f", "arguments": "{"}],
    [{"type": "function_call_output", "call_id": "c", "output": "4"}],
    [{"type": "item_reference", "id": "x"}],
    [{"type": "reasoning", "summary": []}],
    [{"type": "nonsense"}],
)


def sampling_body(rng: Random, path: str, model: str) -> bytes:
    """A short request with one to three fields that may make no sense."""
    body: dict[str, Any] = {"model": model, **PLAIN[path]}
    for _ in range(rng.choice((1, 1, 2, 3))):
        body[rng.choice(FIELDS)] = rng.choice(ODD)
    return json.dumps(body).encode()
