"""Contents and tool calls of an ATIF step. Called by atif.py."""

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


def without_none(record: Json) -> Json:
    """Return the record without fields that are None."""
    return {name: value for name, value in record.items() if value is not None}


def content_of(run: Run, path: str, content: Any) -> str | list[Json] | None:
    """Return a message's content: a text, or a list of text and image parts.

    A prompt of /v1/completions that is token ids or several texts becomes its JSON. Raises
    BadInput for parts that this version of the schema lacks, such as audio.
    """
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return [_part(run, path, part) for part in content]
    return json_text(run, f"{path}.content", content)


def _part(run: Run, path: str, part: Json) -> Json:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    url = _image_url(part)
    if url is None:
        problem = f"has a part of type {part.get('type')!r}, neither text nor image"
        raise unsupported(run, f"{path}.content", problem)
    media_type = _media_type(url)
    if media_type not in _IMAGES.values():
        problem = f"has an image that is not known to be JPEG, PNG, GIF or WebP: {url[:80]}"
        raise unsupported(run, f"{path}.content", problem)
    return {"type": "image", "source": {"media_type": media_type, "path": url}}


def has_uncarried_fields(content: Any) -> bool:
    """Tell whether parts of a content have fields that are not carried, such as image detail."""
    if not isinstance(content, list):
        return False
    objects = [part for part in content if isinstance(part, dict)]
    images = [part["image_url"] for part in objects if isinstance(part.get("image_url"), dict)]
    return any(len(part) > 2 for part in objects) or any(len(image) > 1 for image in images)


def _image_url(part: Json) -> str | None:
    """Return the URL of an image in OpenAI's or Anthropic's shape; it may be a data URL."""
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


def tool_call_of(call: Json, raw: Json, done: ToolCall | None, observed: bool) -> Json:
    """Return a tool call of the run's message, with further facts in `extra`.

    `raw` is the same call as the model wrote it; its arguments may be no JSON object. `observed`
    tells that the call's result stands in the observation.
    """
    function = call.get("function") or call.get("custom") or {}
    value = function.get("arguments", function.get("input"))
    arguments = _parse_object(value)
    record: Json = {
        "tool_call_id": str(call.get("id") or ""),
        "function_name": str(function.get("name") or ""),
        "arguments": arguments if arguments is not None else {},
    }
    written = (raw.get("function") or {}).get("arguments", value)
    extra: Json = {}
    if arguments is None or _parse_object(written) != arguments:
        extra["arguments"] = written
    if done is not None:
        extra |= {"seconds": done.seconds} | ({"error": done.error} if done.error else {})
        if done.result is not None and not (observed and isinstance(done.result, str)):
            extra["result"] = done.result
    if extra:
        record["extra"] = extra
    return record


def _parse_object(arguments: Any) -> Json | None:
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    return arguments if isinstance(arguments, dict) else None
