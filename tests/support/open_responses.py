"""The Open Responses specification's own models, applied to a gateway's answers: for .venv-ogx.

    python open_responses.py URL

Prints one JSON object: what each request's answer or events have against the specification.
"""

import json
import sys
from typing import Any

import httpx
import openresponses_types
from openresponses_types import types
from pydantic import BaseModel, ValidationError

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
}
PAST: Any = [
    {"type": "message", "role": "system", "content": "Be brief."},
    {"type": "message", "role": "user", "content": "I am Ann."},
    {"type": "message", "role": "assistant", "content": "Hello Ann.", "phase": "final_answer"},
    {"type": "message", "role": "user", "content": "Who am I?"},
]
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"input": "Hi"},
    "conversation": {"input": PAST, "instructions": "In English.", "metadata": {"of": "a test"}},
    "tool": {"input": "Is it raining?", "tools": [WEATHER]},
    "cut off": {"input": "Hi", "max_output_tokens": 1},
    "keys": {"input": "Hi", "prompt_cache_key": "a", "safety_identifier": "b", "temperature": 0.5},
}


def events_of(name: str) -> type[BaseModel] | None:
    """The specification's model of an event, response.output_text.delta for instance."""
    words = name.removeprefix("response.").replace(".", "_").split("_")
    stem = "".join(word.title() for word in words)
    return getattr(types, f"Response{stem}StreamingEvent", None)


def against(model: type[BaseModel] | None, data: Any) -> list[str]:
    """The errors of a value."""
    if model is None:
        return [f"the specification has no event {data['type']}"]
    try:
        model.model_validate(data)
    except ValidationError as error:
        return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return []


def main(url: str) -> dict[str, Any]:
    """The errors of each request, whole and streaming, and how each response ended."""
    errors, ends = {}, {}
    with httpx.Client(base_url=url, timeout=300) as client:
        for name, request in REQUESTS.items():
            body = {"model": "calc", **request}
            answer = client.post("/v1/responses", json=body).json()
            errors[name] = against(types.ResponseResource, answer)
            ends[name] = answer.get("status")
            stream = client.post("/v1/responses", json={**body, "stream": True}).text
            lines = [line[6:] for line in stream.split("\n") if line.startswith("data: {")]
            for event in map(json.loads, lines):
                errors[name] += against(events_of(event["type"]), event)
                if "response" in event:
                    errors[name] += against(types.ResponseResource, event["response"])
    return {"spec": openresponses_types.__spec_version__, "errors": errors, "ends": ends}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
