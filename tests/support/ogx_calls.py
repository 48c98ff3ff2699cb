"""OGX's client, unmodified, against a gateway: run by .venv-ogx's Python as a script.

    python ogx_calls.py URL

Prints one JSON object of what each API answered.
"""

import json
import sys
import time
from typing import Any

import ogx_client
from ogx_client import OgxClient

SAYS: Any = [{"role": "user", "content": "Hi"}]
FUNCTION: Any = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
}
CHAT = "/v1/chat/completions"


def main(url: str) -> dict[str, Any]:
    """What every API answers that OGX shares with OpenAI and the gateway has."""
    client = OgxClient(base_url=url, api_key="none")
    chat, create = client.chat.completions.create, client.responses.create
    tools: Any = [{"type": "function", "function": FUNCTION}]
    called = chat(model="calc", messages=SAYS, tools=tools, temperature=0).choices[0]
    chunks = [
        c
        for chunk in chat(model="calc", messages=SAYS, stream=True, temperature=0)
        for c in chunk.choices
    ]
    scored = chat(model="calc", messages=SAYS, logprobs=True, top_logprobs=2).choices[0]
    asked = create(
        model="calc", input="Hi", tools=[{"type": "function", **FUNCTION}], temperature=0
    )
    item = asked.output[0]
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
    call = {"type": "function_call", **item.to_dict()}
    turns: Any = [{"role": "user", "content": "Hi"}, call, result]
    again = create(model="calc", input=turns, temperature=0)
    events = [
        event if isinstance(event, dict) else event.to_dict()
        for event in create(model="calc", input="Hi", stream=True, temperature=0)
    ]
    completions = client.completions
    # the model may end an answer to what it was not trained on at once
    whole: Any = {"max_tokens": 4, "extra_body": {"ignore_eos": True}}
    pieces = completions.create(model="calc", prompt="Hi", stream=True, **whole)
    messages: Any = client.messages
    return {
        "python": sys.version_info[:2],
        "models": [model.id for model in client.models.list().actual_instance.data],
        "chat": chat(model="calc", messages=SAYS, temperature=0).choices[0].message.content,
        "tool": called.message.tool_calls[0].function.to_dict(),
        "streamed": "".join(choice.delta.content or "" for choice in chunks),
        "logprobs": [at.logprob for at in scored.logprobs.content],
        "completion": completions.create(model="calc", prompt="Hi", **whole).usage.to_dict(),
        "pieces": sum(len(piece.choices) for piece in pieces),
        "response_tool": item.arguments,
        "response": again.output[0].content[0].text,
        "response_id": again.id,
        "events": [event["type"] for event in events],
        "event_text": events[-1]["response"]["output"][0]["content"][0].text,
        "anthropic": messages.message_v1_messages_post(
            model="calc", max_tokens=20, messages=SAYS, temperature=0
        ).content[0].text,
        "counted": messages.message_tokens_v1_messages_count_tokens_post(
            model="calc", messages=SAYS
        ).input_tokens,
        "unknown": _refusal(client),
        "batch": _batch(client),
    }  # fmt: skip


def _refusal(client: OgxClient) -> Any:
    try:
        client.chat.completions.create(model="nobody", messages=SAYS)
    except ogx_client.NotFoundError as error:
        return json.loads(error.body)["error"]["code"]
    return None


def _batch(client: OgxClient) -> dict[str, Any]:
    """A file up, a batch over it, its answers down; another one cancelled."""
    body = {"model": "calc", "messages": SAYS}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}) + "\n"
    file = client.files.create(file=("in.jsonl", line.encode()), purpose="batch")
    given: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    cancelled = client.batches.cancel(client.batches.create(**given).id)
    batch = client.batches.create(**given)
    until = time.monotonic() + 240
    while batch.status != "completed" and time.monotonic() < until:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    answers = [json.loads(client.files.content(batch.output_file_id))]
    same = client.files.content(file.id) == line
    return {
        "answers": answers,
        "same_file": same and client.files.retrieve(file.id).bytes == len(line),
        "files": file.id in [one.id for one in client.files.list().data],
        "batches": {cancelled.id, batch.id} <= {one.id for one in client.batches.list().data},
        "cancelled": cancelled.status in ("cancelling", "cancelled"),
        "deleted": client.files.delete(file.id).deleted,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
