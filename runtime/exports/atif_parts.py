"""The parts of an ATIF step: contents and tool calls. Called by atif.py."""

from typing import Any

import orjson

from cray_agents.records import Run, ToolCall
from cray_agents.runtime.exports.export_format import Json, json_text, unsupported

_IMAGES = {
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "png": "image/png",
    "gif": "image/gif",
    "webp": "image/webp",
}


def plain(record: Json) -> Json:
    """The record without what is None."""
    return {name: value for name, value in record.items() if value is not None}


def content_of(run: Run, where: str, content: Any) -> str | list[Json] | None:
    """A message's content: a text, or parts that are texts and images.

    Prompts of /v1/completions that are token ids or several texts become their JSON. Raises
    BadInput for parts that this version of the schema does not have, such as audio.
    """
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return [_part(run, where, part) for part in content]
    return json_text(run, f"{where}.content", content)


def _part(run: Run, where: str, part: Json) -> Json:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    url = _image_url(part)
    if url is None:
        problem = f"has a part of type {part.get('type')!r}, neither text nor image"
        raise unsupported(run, f"{where}.content", problem)
    media_type = _media_type(url)
    if media_type not in _IMAGES.values():
        problem = f"has an image that is not known to be JPEG, PNG, GIF or WebP: {url[:80]}"
        raise unsupported(run, f"{where}.content", problem)
    return {"type": "image", "source": {"media_type": media_type, "path": url}}


def has_more(content: Any) -> bool:
    """Whether parts of a content have fields that are not carried, such as an image's detail."""
    if not isinstance(content, list):
        return False
    parts = [part for part in content if isinstance(part, dict)]
    images = [part["image_url"] for part in parts if isinstance(part.get("image_url"), dict)]
    return any(len(part) > 2 for part in parts) or any(len(image) > 1 for image in images)


def _image_url(part: Json) -> str | None:
    """The URL of an image in OpenAI's or in Anthropic's shape; its data may stand in it."""
    source = part.get("source")
    if part.get("type") == "image" and isinstance(source, dict):
        if source.get("type") == "base64":
            return f"data:{source.get('media_type')};base64,{source.get('data')}"
        url = source.get("url")
    else:
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else None


def _media_type(url: str) -> str | None:
    if url.startswith("data:"):
        return url[len("data:") :].split(",", 1)[0].split(";", 1)[0].lower()
    path = url.split("?", 1)[0].split("#", 1)[0]
    return _IMAGES.get(path.rpartition(".")[2].lower())


def tool_call_of(asked: Json, raw: Json, done: ToolCall | None, told: bool) -> Json:
    """A tool call as the run's message has it; what is known beyond that in `extra`.

    `raw` is the same call as the model wrote it, whose arguments may be no JSON object. `told`:
    whether its result stands in the observation.
    """
    function = asked.get("function") or asked.get("custom") or {}
    given = function.get("arguments", function.get("input"))
    arguments = _object(given)
    call: Json = {
        "tool_call_id": str(asked.get("id") or ""),
        "function_name": str(function.get("name") or ""),
        "arguments": arguments if arguments is not None else {},
    }
    written = (raw.get("function") or {}).get("arguments", given)
    extra: Json = {}
    if arguments is None or _object(written) != arguments:
        extra["arguments"] = written
    if done is not None:
        extra |= {"seconds": done.seconds} | ({"error": done.error} if done.error else {})
        if done.result is not None and not (told and isinstance(done.result, str)):
            extra["result"] = done.result
    if extra:
        call["extra"] = extra
    return call


def _object(arguments: Any) -> Json | None:
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    return arguments if isinstance(arguments, dict) else None
