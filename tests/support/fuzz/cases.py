"""Broken requests, made from good ones. A seed and a number name each for ever.

`case` is the entry; it draws from bodies.py and odd_values.py. Read next: wire.py, which sends
them, and shapes.py, with bytes that are not even HTTP.
"""

import json
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from cray_agents.runtime.registry.registry import NAME
from tests.support.fuzz import odd_values
from tests.support.fuzz.bodies import BODIES, CHAT, FORMS, PLAIN

NO_NAMES = tuple(name for name in odd_values.IDS if not NAME.fullmatch(name))
IN_RUNS = tuple(BODIES)[:8]  # what is there under a run's own base URL too
GETS = (
    "/v1/models",
    "/v1/models/{model}",
    "/v1/models/{name}/versions",
    "/v1/models/{name}/history",
    "/v1/models/{name}/lineage",
    "/v1/models/{name}/canary",
    "/v1/trajectories",
    "/v1/trajectories/{run_id}",
    "/v1/trajectories/{run_id}/outline",
    "/v1/trajectories/{run_id}/turns",
    "/v1/trajectories/{run_id}/turns/{number}/tokens",
    "/v1/trajectories/stats",
    "/v1/trajectories/diff",
    "/v1/datasets/diff",
    "/v1/datasets/diff/runs",
    "/v1/datasets/{dataset_id}/histograms",
    "/v1/datasets/{dataset_id}/samples",
    "/v1/jobs/{job_id}/series",
    "/v1/jobs/{job_id}/hardware",
    "/v1/jobs/{job_id}/timeline",
    "/v1/loops",
    "/v1/loops/{loop}/iterations/{number}/timeline",
    "/v1/batches/{batch_id}/errors",
    "/v1/models/lineage",
    "/v1/queue",
    "/v1/usage",
    "/v1/cost",
    "/v1/keys",
    "/v1/whoami",
    "/v1/health/warnings",
    "/v1/datasets/{dataset_id}",
    "/v1/jobs",
    "/v1/jobs/{job_id}",
    "/v1/jobs/{job_id}/events",
    "/v1/jobs/{job_id}/logs",
    "/v1/jobs/{job_id}/pause",
    "/v1/fine_tuning/jobs",
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}",
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/events",
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/checkpoints",
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/cancel",
    "/v1/loops/{loop}/iterations",
    "/v1/loops/{loop}/journal/{entry}",
    "/v1/rollouts",
    "/v1/rollouts/{run_id}",
    "/v1/files",
    "/v1/files/{file_id}",
    "/v1/files/{file_id}/content",
    "/v1/uploads/{upload_id}",
    "/v1/batches",
    "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
    "/api/v1/training_runs",
    "/api/v1/training_runs/{model_id}",
    "/api/v1/training_runs/{model_id}/checkpoints",
    "/api/v1/samplers/{sampler_id}",
    "/health",
    "/health/ready",
    "/v1/platform",
    "/v1/pool",
    "/metrics",
    "/openapi.json",
    "/",
    "/v1",
    "//",
    "/v1/nothing",
    "/docs",
    "/v1/chat",
)


class Case(NamedTuple):
    """A request. `template`: the route it is for."""

    template: str
    method: str
    request: bytes


class Raw(str):
    """JSON text that is put in as it is."""


def case(seed: int, number: int, known: Mapping[str, str]) -> Case:
    """A request by its number: nine in ten have a body.

    `known`: what placeholders such as `known-batch-file` stand for in the gateway that is asked.
    """
    rng = Random(f"{seed}-{number}")
    kind = rng.random()
    if kind < 0.8:
        return _json_case(rng, known)
    return _form_case(rng, known) if kind < 0.9 else _odd_case(rng, known)


def json_body(rng: Random, template: str) -> bytes:
    """A body for a route that takes JSON, mostly not as it should be."""
    body = json.loads(json.dumps(BODIES[template]))
    if "stream" in body and rng.random() < 0.4:
        body["stream"] = True
    if rng.random() < 0.9:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            body = _mutated(rng, body)
    content = _encoded(rng, body)
    return _damaged(rng, content) if rng.random() < 0.2 else content


def request(
    method: str,
    path: str,
    content: bytes = b"",
    headers: Mapping[str, str] | None = None,
    known: Mapping[str, str] | None = None,
) -> bytes:
    """The bytes of a request."""
    for placeholder, name in (known or {}).items():
        content = content.replace(placeholder.encode(), name.encode())
        path = path.replace(placeholder, name)
    given = {"host": "127.0.0.1", **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    lines += [f"content-length: {len(content)}"] if content or method == "POST" else []
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


def _json_case(rng: Random, known: Mapping[str, str]) -> Case:
    template = rng.choice([*BODIES, *(CHAT,) * 6])
    content = json_body(rng, template)
    headers = {"content-type": "application/json"}
    if rng.random() < 0.15:
        headers |= _headers(rng)
    path = _path(rng, template, 0.1)
    if template in IN_RUNS and rng.random() < 0.1:
        path = f"/runs/{_quoted(rng.choice((*odd_values.IDS, 'run_1')))}{path}"
    return Case(template, "POST", request("POST", path, content, headers, known))


def _form_case(rng: Random, known: Mapping[str, str]) -> Case:
    template = rng.choice(list(FORMS))
    content, kind = _form(rng, FORMS[template])
    headers = {"content-type": kind}
    if rng.random() < 0.1:
        headers |= _headers(rng)
    path = _path(rng, template, 0.1)
    return Case(template, "POST", request("POST", path, content, headers, known))


def _odd_case(rng: Random, known: Mapping[str, str]) -> Case:
    """A weird id, query, method or header, mostly without a body."""
    template = rng.choice([*BODIES, *FORMS, *GETS, *GETS])
    method = rng.choice(odd_values.METHODS) if rng.random() < 0.4 else "GET"
    path = _path(rng, template, 0.5)
    if rng.random() < 0.6:
        path += "?" + _query(rng)
    headers = _headers(rng) if rng.random() < 0.4 else {}
    content = rng.choice((b"", b"", b"{}", b"\xff\x00"))
    return Case(template, method, request(method, path, content, headers, known))


def _path(rng: Random, template: str, share: float) -> str:
    path = template
    while "{" in path:
        before, _, rest = path.partition("{")
        name, _, after = rest.partition("}")
        # a version of another name could be promoted, and requests for the first would wait for it
        ids = NO_NAMES if name == "name" else odd_values.IDS
        path = before + (rng.choice(ids) if rng.random() < share else PLAIN[name]) + after
    return _quoted(path)


def _quoted(path: str) -> str:
    return quote(path, safe="/%:@;+*?=&-._~'!$()")


def _query(rng: Random) -> str:
    if rng.random() < 0.1:
        return rng.choice(odd_values.QUERIES)
    many = rng.choice((1, 1, 2, 3))
    pairs = [(rng.choice(odd_values.PARAMETERS), rng.choice(odd_values.GIVEN)) for _ in range(many)]
    return urlencode(pairs + pairs[:1] * (rng.random() < 0.2))


def _headers(rng: Random) -> dict[str, str]:
    found = {}
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice((*odd_values.HEADERS, *odd_values.NAMES, *odd_values.NAMES))
        found[name] = rng.choice(odd_values.HEADERS.get(name, odd_values.VALUES))
    return found


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container within a value, with each of its keys."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found += [(value, key), *_places(value[key])]
    return found


def _mutated(rng: Random, body: Any) -> Any:
    """The value with one thing in it changed."""
    places = _places(body)
    if not places or rng.random() < 0.03:
        return _weird(rng)
    where, key = rng.choice(places)
    act = rng.random()
    if act < 0.15:
        del where[key]
    elif act < 0.25 and isinstance(where, dict):
        keys = (*odd_values.WORDS[:-1], "temperature", "logit_bias", "user")
        where[rng.choice(keys)] = _weird(rng)
    elif act < 0.3:
        where[key] = [where[key]]
    elif act < 0.35:
        where[key] = {"x": where[key]}
    elif act < 0.38 and isinstance(where, list) and len(places) < 100:
        where.extend([where[key]] * rng.choice((1, 20)))
    else:
        where[key] = _weird(rng)
    return body


def _weird(rng: Random) -> Any:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(odd_values.WORDS)
    if kind < 0.65:
        return rng.choice(odd_values.NUMBERS)
    if kind < 0.9:
        return json.loads(rng.choice(odd_values.NOTHING))
    if kind < 0.97:
        deep = rng.choice(odd_values.DEPTHS)
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
        return Raw(opening * deep + "1" + closing * deep)
    if kind < 0.998:
        return Raw(rng.choice(odd_values.TEXTS))
    return "z" * rng.choice((1_000_000, 10_000_000))


def _encoded(rng: Random, body: Any) -> bytes:
    """JSON text, also of what JSON has no word for."""
    raw: list[str] = []

    def hold(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(str(value))
            return f"<raw {len(raw) - 1}>"
        if isinstance(value, dict):
            return {key: hold(inner) for key, inner in value.items()}
        return [hold(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(hold(body), ensure_ascii=rng.random() < 0.5)
    for number, value in enumerate(raw):
        text = text.replace(f'"<raw {number}>"', value)
    return text.encode("utf-8", "surrogatepass")


def _damaged(rng: Random, content: bytes) -> bytes:
    """Text that is no JSON any more, or hardly."""
    at = rng.randrange(len(content) + 1)
    pieces = (b"\xff", b"\xc3(", b"\x00", b"\xed\xa0\x80", b"NaN", b"}", b'"', b",", b"//")
    return rng.choice(
        (
            content[:at],
            content[:at] + rng.choice(pieces) + content[at:],
            content + content,
            content + b"\x00",
            b"\xef\xbb\xbf" + content,
            content.decode("utf-8", "replace").encode("utf-16", "surrogatepass"),
            b"",
            b" " * 1000,
            b"null",
            b"[" + content + b"]",
            b'{"model":"m","model":["m"],' + content[1:],  # a name that stands there twice
            rng.randbytes(rng.choice((1, 10, 1000))),
            b"[" * 100_000,
            b'{"a":' * 100_000,
        )
    )


def _form(rng: Random, field: str) -> tuple[bytes, str]:
    """A body and its content type, hardly ever both as they should be."""
    boundary = rng.choice(odd_values.BOUNDARIES)
    purpose = rng.choice((b"batch", b"fine-tune", b"x", b"\xff", b""))
    parts = [
        (f'form-data; name="{field}"; filename="a.txt"', b"content"),
        ('form-data; name="purpose"', purpose),
    ]
    parts += [('form-data; name="sha256"', b"0" * 64)] * (rng.random() < 0.2)
    for _ in range(rng.choice((0, 1, 1, 2))):
        parts = _odd_parts(rng, field, parts)
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: {disposition}\r\n\r\n".encode() + content + b"\r\n"
        for disposition, content in parts
    )
    body += f"--{boundary}--\r\n".encode()
    if rng.random() < 0.3:
        body = _damaged(rng, body)
    kind = f'multipart/form-data; boundary="{boundary}"'
    if rng.random() < 0.15:
        kind = rng.choice((*odd_values.TYPES, kind.replace("x", "w")))
    return body, kind


def _odd_parts(rng: Random, field: str, parts: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """A form's parts (disposition, content) with one of them changed."""
    at = rng.randrange(len(parts))
    disposition, content = parts[at]
    bomb = "".join(f"\r\nx-{n}: y" for n in range(rng.choice((5, 2000))))
    name = "n" * rng.choice((300, 100_000))
    changed = (
        [(disposition.partition("; filename")[0], content)],
        [parts[at], parts[at]],
        [(f'form-data; name="{name}"', content)],
        [(f'form-data; name="{field}"; filename="{rng.choice(odd_values.FILENAMES)}"', content)],
        [(rng.choice(odd_values.DISPOSITIONS), content)],
        [(disposition, rng.randbytes(rng.choice((1, 70_000))))],
        [parts[at]] * 40,
        [parts[at], ('form-data; name="expires_after[seconds]"', rng.choice(odd_values.SECONDS))],
        [(disposition + bomb, content)],
        [],
    )
    return [*parts[:at], *rng.choice(changed), *parts[at + 1 :]] or [("form-data", b"")]
