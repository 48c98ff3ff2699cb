"""Whatever is sent, the gateway answers soon, and with a reason: never a 5xx, never a hang.

A failure names the case: `case(SEED, number, known)` makes the same request again. CRAY_TEST_FUZZ
multiplies how much is sent (`make soak`).
"""

import asyncio
import json
import os
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation

from cray_agents.paths import Home
from cray_agents.runtime.gateway.app import routes
from cray_agents.runtime.gateway.http.routing import document
from cray_agents.runtime.gateway.model_calls.apis import chat, messages, responses
from cray_agents.runtime.store import Store
from tests.support.fuzz.bodies import BODIES, CHAT, FORMS, SAYS
from tests.support.fuzz.cases import IN_RUNS, case, request
from tests.support.fuzz.gateway import fuzzed
from tests.support.fuzz.shapes import SHAPES
from tests.support.fuzz.wire import LONGEST_WAIT, Hang, Reply, Wire
from tests.support.store.plain_reader import events_of

TIMES = int(os.environ.get("CRAY_TEST_FUZZ", "1"))
SEED = 7
CASES = 3_000 * TIMES
CONNECTIONS = 24
EXAMPLES = 3 * TIMES  # for each operation
#: Refusals that no field is to blame for.
NO_FIELD = {
    "unknown_url",
    "method_not_allowed",
    "invalid_json",
    "invalid_http",
    "body_too_large",
    "headers_too_large",
    "request_timeout",
    "host_not_allowed",
    "origin_not_allowed",
    "empty_dataset",
    "corrupt",
    "swap_failed",
    "pool_busy",
}
SAMPLING_PATHS = {api.path for api in (chat.CHAT, chat.COMPLETIONS, messages.MESSAGES)}
SAMPLING_PATHS.add(responses.RESPONSES.path)
ANSWERED = re.compile(rb'"id":"((?:chatcmpl-|cmpl-|resp_)[0-9a-f]+)"')
RECORDED = re.compile(r"(?:chatcmpl-|cmpl-|resp_)[0-9a-f]+")


@dataclass
class Site:
    """The gateway that is fuzzed. `known`: what it has, by the placeholders in the bodies."""

    url: str
    home: Home
    known: dict[str, str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A gateway that stands it: it still works, ended in good order, and wrote at home alone."""
    folder = tmp_path_factory.mktemp("fuzzed")
    home = folder / "within" / "home"
    home.mkdir(parents=True)
    (folder / "beside").write_text("as it was")
    log = folder / "log"
    with fuzzed(home, log) as url:
        site = Site(url, Home(home), {})
        asyncio.run(_furnish(site))
        yield site
        assert asyncio.run(_good(site)).status == 200
    assert "Traceback" not in log.read_text()
    assert {path.name for path in folder.iterdir()} == {"within", "beside", "log"}
    assert [path.name for path in (folder / "within").iterdir()] == ["home"]
    assert (folder / "beside").read_text() == "as it was"
    assert Store(Home(home)).problems == []


async def _good(site: Site) -> Reply:
    body = orjson.dumps({"model": "m", "messages": SAYS})
    return await Wire(site.port).ask(request("POST", CHAT, body, {"x-run-id": "run_1"}))


async def _furnish(site: Site) -> None:
    """Make one of each thing, so that ids are also of what is there."""
    wire = Wire(site.port)

    async def made(path: str, content: bytes, kind: str = "application/json") -> Any:
        reply = await wire.ask(request("POST", path, content, {"content-type": kind}, site.known))
        assert reply.status == 200, reply
        return json.loads(reply.body)

    def form(purpose: str, content: bytes) -> bytes:
        parts = f'name="purpose"\r\n\r\n{purpose}', 'name="file"; filename="f"\r\n\r\n'
        head = "".join(f"--x\r\nContent-Disposition: form-data; {part}\r\n" for part in parts)
        return head[:-2].encode() + content + b"\r\n--x--\r\n"

    good = await _good(site)
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m"}}
    kind = "multipart/form-data; boundary=x"
    file = await made("/v1/files", form("batch", orjson.dumps(line)), kind)
    site.known["known-batch-file"] = file["id"]
    file = await made("/v1/files", form("fine-tune", b'{"messages": []}'), kind)
    site.known["known-file"] = file["id"]
    for name, path in (
        ("known-upload", "/v1/uploads"),
        ("known-batch", "/v1/batches"),
        ("", "/v1/trajectories/run_1/events"),
        ("known-tuning", "/v1/fine_tuning/jobs"),
    ):
        template = path.replace("run_1", "{run_id}")
        answer = await made(path, orjson.dumps(BODIES[template]))
        if name:
            site.known[name] = answer["id"]
    turn = {"call_id": json.loads(good.body)["id"]}
    run = {**BODIES["/v1/trajectories/{run_id}/events"]["events"][0], "id": "e2", "time": 2.0}
    run["body"] = {**run["body"], "trajectory": {"messages": SAYS, "turns": [turn]}}
    await made("/v1/trajectories/run_1/events", orjson.dumps({"events": [run]}))
    dataset = await made("/v1/datasets", orjson.dumps({"loop": "l"}))
    site.known["known-dataset"] = dataset["id"]
    job = await made("/v1/jobs", orjson.dumps(BODIES["/v1/jobs"]))
    site.known["known-job"] = job["id"]
    for name, number in (("create_model", 0), ("create_model", 8), ("create_sampling_session", 0)):
        body = {**BODIES[f"/api/v1/{name}"], "model_seq_id": number}
        await made(f"/api/v1/{name}", orjson.dumps(body))
    wire.close()


def _check(reply: Reply, template: str, head: bool = False) -> None:
    """What is true of every answer."""
    assert reply.status < 500, reply
    if reply.status >= 400 and not head:
        error = reply.error
        assert error["param"] is not None or error["code"] in NO_FIELD, reply
        assert len(reply.body) < 20_000, reply


def test_the_fuzz_knows_every_route_that_takes_a_body() -> None:
    taking = {
        path
        for path, methods in document(routes())["paths"].items()
        if "requestBody" in methods.get("post", {})
    }
    assert {*BODIES, *FORMS, *(f"/runs/{{run_id}}{path}" for path in IN_RUNS)} == taking
    model_calls = {each.path for each in routes() if each.rate_limited}
    assert model_calls & set(BODIES) <= set(IN_RUNS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_paths_that_no_file_can_have(site: Site) -> None:
    """In the place of each text of each body."""

    async def ask_all() -> None:
        wire, root = Wire(site.port), site.home.root
        for path in ("/a\0b/c", f"{root}/a\0/b", "/\ud800/" + "x" * 300):
            odd = json.dumps(path)
            for template, body in BODIES.items():
                for number in range(len(places_of(body))):
                    changed = json.loads(json.dumps(body))
                    holder, key = places_of(changed)[number]
                    holder[key] = "THE PATH"
                    content = json.dumps(changed).replace('"THE PATH"', odd).encode()
                    target = template.replace("{run_id}", "run_1")
                    _check(
                        await wire.ask(request("POST", target, content, {}, site.known)), template
                    )
        wire.close()

    asyncio.run(ask_all())


def places_of(body: Any) -> list[tuple[Any, Any]]:
    """Where a JSON value has texts: their lists or objects, and indexes or keys."""
    inner = body.items() if isinstance(body, dict) else enumerate(body)
    places = []
    for key, value in list(inner):
        if isinstance(value, str):
            places.append((body, key))
        elif isinstance(value, dict | list):
            places += places_of(value)
    return places


@pytest.mark.slow
@pytest.mark.timeout(900 + 120 * TIMES)
def test_random_requests(site: Site) -> None:
    statuses: Counter[tuple[str, int]] = Counter()
    answered: list[str] = []

    async def fuzz() -> None:
        numbers = iter(range(CASES))

        async def connection() -> None:
            wire = Wire(site.port)
            for number in numbers:
                sent = case(SEED, number, site.known)
                head = sent.method == "HEAD"
                try:
                    reply = await wire.ask(sent.request, head=head)
                    _check(reply, sent.template, head)
                except (AssertionError, Hang) as error:
                    short = sent.request[:300]
                    raise AssertionError(f"case({SEED}, {number}): {short!r}: {error}") from error
                statuses[sent.template, reply.status] += 1
                replayed = "x-idempotent-replayed" in reply.headers
                if (
                    sent.template in SAMPLING_PATHS
                    and reply.status == 200
                    and not replayed
                    and not head
                ):
                    answered.extend(found.decode() for found in ANSWERED.findall(reply.body)[:1])
            wire.close()

        await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))

    asyncio.run(fuzz())
    accepted = sum(
        n for (path, status), n in statuses.items() if path in SAMPLING_PATHS and status == 200
    )
    # neither all good nor all bad, on any route; nobody can guess what a part is called, and
    # where there are two replicas nobody has a lease; the job that is known takes no commands, and
    # sends no weights
    unfit = {"/v1/uploads/{upload_id}/complete", "/v1/pool/lease", "/v1/jobs/{job_id}/commands"}
    unfit.add("/v1/jobs/{job_id}/receive")
    # the engine gives no logprobs of a prompt
    unfit.add("/v1/trajectories/{run_id}/turns/{number}/score")
    unfit.add("/v1/dashboard/sign_ins/exchange")  # nor a token
    unfit |= {f"/v1/rollouts/{{run_id}}/{end}" for end in ("renew", "result")}  # nor their lease
    for template in sorted({*BODIES, *FORMS} - unfit):
        seen = {status // 100 for path, status in statuses if path == template}
        assert seen >= {2, 4}, (template, statuses)
    assert len(answered) > accepted * 0.9
    recorded = _recorded(site.home)
    assert all(recorded[call_id] == 1 for call_id in answered)
    assert len(set(answered)) == len(answered)


def _recorded(home: Home) -> Counter[str]:
    """How often each call stands in the store."""
    calls = [event["id"] for event in events_of(home) if event["kind"] == "call"]
    return Counter(call_id for call_id in calls if RECORDED.fullmatch(call_id))


@pytest.mark.slow
def test_bytes_that_are_not_http(site: Site) -> None:
    async def fuzz() -> dict[str, int | None]:
        async def one(sent: bytes, ends: bool) -> int | None:
            reply = await Wire(site.port).try_ask(sent, ends=ends)
            if reply is None:
                return None
            _check(reply, "")
            return reply.status

        replies = await asyncio.gather(*(one(*shape) for shape in SHAPES.values()))
        return dict(zip(SHAPES, replies, strict=True))

    seen = asyncio.run(fuzz())
    silent = {name for name, status in seen.items() if status is None}
    assert silent == {  # who says nothing whole, or leaves, is told nothing
        "longer, ends",
        "chunks cut off",
        "nothing",
        "line ends",
        "a head without an end",
    }
    taken = {name for name, status in seen.items() if status == 200}
    assert taken == {"no version", "a web socket"}
    assert {seen["a long header"], seen["many headers"]} == {431}
    assert {seen["longer"], seen["longer form"], seen["chunks without an end"]} == {408}
    assert {seen["very long"], seen["very long form"]} == {413}


FORBIDDEN: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/messages", {name: value}) for name, value in (
        ("system", {}), ("system", [1]), ("max_tokens", "5"), ("max_tokens", True),
        ("stream_options", "x"), ("tools", [1]), ("messages", []),
    )),
    ("/v1/responses", {"instructions": {}}),
    *(("/v1/embeddings", {"input": value}) for value in (None, 1, {}, [{}], [["a"]], [True])),
]  # fmt: skip
FORBIDDEN += [
    ("/v1/messages/count_tokens", more) for path, more in FORBIDDEN if path == "/v1/messages"
]
FORBIDDEN += [(path, {}) for path in sorted({path for path, _ in FORBIDDEN})]  # as they should be


@pytest.mark.slow
def test_what_the_document_forbids_is_refused_of_a_model_that_is_there(site: Site) -> None:
    """Made-up names of models hide it: Schemathesis hits the right one once in many runs."""
    answers = {}
    for path, more in FORBIDDEN:
        data = json.dumps(BODIES[path] | more).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(site.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=LONGEST_WAIT) as answer:
                answers[path, str(more)] = answer.status
        except urllib.error.HTTPError as refused:
            answers[path, str(more)] = refused.code
    assert answers == {(path, str(more)): 400 if more else 200 for path, more in FORBIDDEN}


CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.mark.slow
@pytest.mark.timeout(900 + 120 * TIMES)
def test_it_answers_as_its_document_says(site: Site) -> None:
    """Schemathesis makes requests of the document, and reads the answers by it."""
    load_all_checks()
    checks = CHECKS.get_by_names(CHECKED)
    problems: dict[str, str] = {}
    schema = schemathesis.openapi.from_url(f"{site.url}/openapi.json")
    for result in schema.exclude(path="/v1/events").get_all_operations():  # it has no end
        operation = result.ok()
        assert operation is not None, result.err()
        try:
            _explore(operation, checks)
        except BaseExceptionGroup as group:
            problems[operation.label] = str(group.exceptions[0])[:3000]
        except AssertionError as error:
            problems[operation.label] = str(error)[:3000]
    assert not problems, "\n\n".join(f"{name}: {text}" for name, text in problems.items())


def _explore(operation: APIOperation, checks: list[Any]) -> None:
    good = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(sent=good)
    def explore(sent: schemathesis.Case) -> None:
        reply = sent.call(timeout=LONGEST_WAIT)
        sent.validate_response(reply, checks=checks)
        if reply.status_code >= 400 and operation.method != "head":
            error = reply.json()["error"]
            assert error["message"] and error["code"], reply.text

    explore()
