"""A server with OpenAI's API that answers at once: calls of a tool, then a text.

`python agent_server.py TURNS` says its URL on a line of its output. Started by agent_overhead.py.
"""

import socket
import sys
from typing import Any

import orjson
import uvicorn
import uvloop

CALL = {"name": "add", "arguments": '{"left": 47, "right": 385}'}


def completion(request: dict[str, Any], turns: int) -> dict[str, Any]:
    """The tool is called until its results and the answer make `turns` model calls."""
    done = sum(message["role"] == "tool" for message in request["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": "432"}
    if done < turns - 1:
        call = {"id": f"call_{done}", "type": "function", "function": CALL}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    finish = "tool_calls" if "tool_calls" in message else "stop"
    return {
        "id": f"chatcmpl-{done}",
        "object": "chat.completion",
        "created": 1,
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }


async def serve(turns: int) -> None:
    """Serve until it is terminated."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event.get("body", b""), event.get("more_body", False)
        known = scope["path"] == "/v1/chat/completions"
        answer = completion(orjson.loads(body), turns) if known else {"error": {"message": "no"}}
        start = {"type": "http.response.start", "status": 200 if known else 404}
        await send({**start, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": orjson.dumps(answer)})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", flush=True)
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=60)
        await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
