"""The gateway's event loop serves everybody: no client's request takes it for long.

Each kind of input is sent as large as it may be, and larger by one, to a gateway in a process of
its own. No callback of its loop may take more than LONGEST of its thread's processor time. Idle,
the slowest takes 0.03 s; what LONGEST is there to catch took seconds. A loaded host shares its
caches, which doubles a processor's time.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.corpus import AGENTS, write_corpus
from cray_agents.paths import Home
from cray_agents.runtime.gateway.http import bounds
from cray_agents.runtime.gateway.tinker.protobuf import write_bytes, write_whole
from tests.support.timed_gateway import TimedGateway, timed_gateway

pytestmark = pytest.mark.slow

LONGEST = 0.2  # seconds
RUNS = 3000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EVENTS = "/v1/trajectories/events"
RUN = "run-of-one"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TimedGateway]:
    home = tmp_path_factory.mktemp("timed") / "home"
    home.mkdir()
    write_corpus(Home(home), RUNS)
    with timed_gateway(home) as gateway:
        yield gateway


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def chat(messages: Any, **fields: Any) -> bytes:
    return dump({"model": "m", "messages": messages, **fields})


def text_of_size(
    size: int, head: bytes = b'{"model":"m","messages":[{"role":"user","content":"'
) -> bytes:
    """A body of so many bytes, of one text full of what could be JSON."""
    tail = b'"}]}'
    piece = rb"{ [a, \"b\"], {c} } "
    room = size - len(head) - len(tail)
    filled = piece * (room // len(piece))
    return head + filled + b" " * (room - len(filled)) + tail


def values(count: int) -> bytes:
    """A body that counts as so many values: the first is the object, the second the list."""
    return b'{"model":"m","prompt":[' + b",".join([b"77"] * (count - 2)) + b"]}"


def objects(count: int) -> bytes:
    parts = b",".join([b'{"type":"text","text":""}'] * (count - 2))
    return b'{"model":"m","messages":[{"role":"user","content":[' + parts + b"]}]}"


def settings(size: int) -> bytes:
    """A body of so many bytes, of as many objects as that may be."""
    parts = b",".join([b'{"a":"bbb"}'] * ((size - 40) // 12))
    return (b'{"metadata":[' + parts + b"]}").ljust(size)


def texts(count: int) -> bytes:
    """A body of so many texts; its names are five."""
    return b'{"model":"m","input":[' + b",".join([b'"a"'] * (count - 3)) + b"]}"


def events(kind: str, count: int, **body: Any) -> bytes:
    about = {"name": "quality", "value": 0.5, **body}
    if kind == "run":
        about = {"agent": "a", "model": "m@1", "input": "x" * 500, "stop_reason": "completed"}
    return dump(
        {
            "events": [
                {"kind": kind, "run_id": f"{RUN}-{n % 1000}", "id": f"{kind}-{n}", "body": about}
                for n in range(count)
            ]
        }
    )


def one_run(count: int) -> bytes:
    """The description of one run of so many turns and messages."""
    turns = [{"call_id": f"call-{n}"} for n in range(count)]
    messages = [{"role": "user", "content": "hello"}] * count
    body = {
        "agent": "a", "model": "m@1", "input": "x", "stop_reason": "completed",
        "trajectory": {"turns": turns, "messages": messages},
    }  # fmt: skip
    return dump({"events": [{"kind": "run", "body": body}]})


def sample(count: int) -> bytes:
    chunks = [{"tokens": [77] * count}]
    prompt = {"sampling_session_id": "no:sample:0", "seq_id": 1, "prompt": {"chunks": chunks}}
    return dump({**prompt, "sampling_params": {}})


def training_pass(count: int) -> bytes:
    """A pass on Tinker's wire whose one datum has so many tokens."""
    tokens = write_bytes(1, bytes(4 * count))
    tensor = write_bytes(1, bytes(8 * count)) + write_whole(3, 2)
    column = write_bytes(2, write_bytes(1, b"target_tokens") + write_bytes(2, tensor))
    datum = write_bytes(3, write_bytes(1, write_bytes(1, tokens)) + column)
    return (
        write_bytes(1, b"no:train:0") + write_whole(2, 1) + datum + write_bytes(4, b"cross_entropy")
    )


Case = tuple[str, str, Callable[[int], bytes], int, int, str | None]
MIB = 2**20
#: What is sent where: key, path, body, its bound, the status at it, the code above it.
CASES: dict[str, Case] = {
    "messages": (
        "use", CHAT, lambda n: chat([{"role": "user", "content": "a"}] * n),
        bounds.MAX_MESSAGES, 200, "too_many_items",
    ),
    "short messages": (
        "use", CHAT, lambda n: chat([{"role": "a"}] * n), 9_000, 200, None,
    ),
    "messages of Anthropic's": (
        "use", "/v1/messages",
        lambda n: chat([{"role": "user", "content": "a"}] * n, max_tokens=1),
        bounds.MAX_MESSAGES, 200, "too_many_items",
    ),
    "items": (
        "use", "/v1/responses",
        lambda n: dump({"model": "m", "input": [{"role": "user", "content": "a"}] * n}),
        bounds.MAX_MESSAGES, 200, "too_many_items",
    ),
    "messages, streamed": (
        "use", CHAT,
        lambda n: chat([{"role": "user", "content": "b"}] * n, stream=True, max_tokens=8000),
        bounds.MAX_MESSAGES, 200, "too_many_items",
    ),
    "a text": ("use", CHAT, text_of_size, bounds.MAX_BODY, 200, "body_too_large"),
    "objects": ("use", CHAT, objects, bounds.MAX_OBJECTS, 200, "body_too_large"),
    "tokens": ("use", COMPLETIONS, values, bounds.MAX_VALUES, 200, "body_too_large"),
    "texts": ("use", "/v1/embeddings", texts, bounds.MAX_TEXTS, 400, "body_too_large"),
    "tokens to embed": (
        "use", "/v1/embeddings", lambda n: values(n).replace(b"prompt", b"input", 1),
        bounds.MAX_VALUES, 200, "body_too_large",
    ),
    "choices": (
        "use", CHAT, lambda n: chat([{"role": "user", "content": "a"}], n=n),
        bounds.MAX_CHOICES, 200, "invalid_value",
    ),
    "a text to tokenise": (
        "use", "/v1/tokenize", lambda n: text_of_size(n, b'{"model":"m","prompt":"')[:-3] + b"}",
        MIB, 200, None,
    ),
    "descriptions": (
        "one", EVENTS, lambda n: events("run", n), bounds.MAX_DESCRIPTIONS, 200, "too_many_items",
    ),
    "rewards": (
        "one", EVENTS, lambda n: events("reward", n), bounds.MAX_EVENTS, 200, "too_many_items",
    ),
    "rewards of one run": (
        "one", EVENTS, lambda n: events("reward", n, value=1.0), bounds.MAX_EVENTS, 200, None,
    ),
    "one description": (
        "one", f"/v1/trajectories/{RUN}/events", one_run, 30_000, 200, None,
    ),
    "a note of a loop": (
        "one", "/v1/loops/loop/journal/note", text_of_size, bounds.MAX_BODY, 200, "body_too_large",
    ),
    "a recipe": (
        "one", "/v1/datasets",
        lambda n: dump({"demonstrations": [[{"role": "user", "content": "a"}] * (n - 1)]}),
        bounds.MAX_OBJECTS, 400, "body_too_large",
    ),
    "a batch": ("use", "/v1/batches", settings, bounds.MAX_SETTINGS, 400, "body_too_large"),
    "an upload": ("use", "/v1/uploads", settings, bounds.MAX_SETTINGS, 400, "body_too_large"),
    "a fine-tuning job": (
        "one", "/v1/fine_tuning/jobs", settings, bounds.MAX_SETTINGS, 400, "body_too_large",
    ),
    "a sample on Tinker's wire": (
        "one", "/api/v1/asample", sample, bounds.MAX_VALUES - 8, 404, "body_too_large",
    ),
    "a pass on Tinker's wire": (
        "one", "/api/v1/forward_backward", training_pass, bounds.MAX_DATUM, 404, "too_many_items",
    ),
}  # fmt: skip


async def held(gateway: TimedGateway) -> None:
    """What was asked since the last time took no callback for long."""
    slowest = await gateway.ask("admin", "/slowest")
    assert slowest["seconds"] < LONGEST, slowest


async def post(gateway: TimedGateway, key: str, path: str, body: bytes) -> tuple[int, Any]:
    async with gateway.session(key) as http, http.post(path, data=body) as response:
        text = await response.text()
        return response.status, json.loads(text) if response.status >= 400 else text


@pytest.mark.parametrize("name", CASES)
async def test_no_body_takes_the_loop_for_long(gateway: TimedGateway, name: str) -> None:
    key, path, body, bound, status, code = CASES[name]
    await gateway.ask("admin", "/slowest")
    found, answer = await post(gateway, key, path, body(bound))
    assert found == status, answer
    await held(gateway)
    if code is not None:
        found, answer = await post(gateway, key, path, body(bound + 1))
        assert answer["error"]["code"] == code, answer
        assert found == (413 if code == "body_too_large" else 400)
        await held(gateway)


LISTS = {
    "a search": "/v1/trajectories?text=nobody-said-this&limit=1000",
    "a search that finds": "/v1/trajectories?text=e&limit=1000",
    "a list with tokens": "/v1/trajectories?limit=1000&tokens=true",
    "a list of summaries": "/v1/trajectories?limit=1000&view=summary",
    "statistics": (
        "/v1/trajectories/stats?by=agent,model,task&bucket=1h&limit=10000&bins=200"
        "&facets=agent,model,loop,tag,error&histograms=reward,seconds,turns,tokens"
    ),
    "the usage": "/v1/usage?by=key,model&bucket=1h",
    "warnings": "/v1/health/warnings?since=0",
    "an entry of a loop": "/v1/loops/loop/journal/note",
    "a run": f"/v1/trajectories/{RUN}",
    "the turns of a run": f"/v1/trajectories/{RUN}/turns?limit=200&full=true",
    "the outline of a run": f"/v1/trajectories/{RUN}/outline",
}


@pytest.fixture(scope="module")
def filled(gateway: TimedGateway) -> TimedGateway:
    """With a note and a run that are large."""

    async def fill() -> None:
        for path, body in (
            ("/v1/loops/loop/journal/note", text_of_size(8 * MIB)),
            (f"/v1/trajectories/{RUN}/events", one_run(20_000)),
        ):
            assert (await post(gateway, "one", path, body))[0] == 200

    asyncio.run(fill())
    return gateway


@pytest.mark.parametrize("name", LISTS)
async def test_no_answer_takes_the_loop_for_long(filled: TimedGateway, name: str) -> None:
    await filled.ask("admin", "/slowest")
    async with filled.session("one") as http, http.get(LISTS[name]) as response:
        assert response.status == 200, await response.text()
        content = await response.read()
        assert len(content) == int(response.headers["content-length"]) and json.loads(content)
    await held(filled)


async def test_a_page_ends_where_it_weighs_too_much(gateway: TimedGateway) -> None:
    """And has more, so that a client goes on."""
    for number in range(3):
        body = text_of_size(bounds.ANSWER // 2)
        path = f"/runs/heavy-{number}{CHAT}"
        assert (await post(gateway, "one", path, body))[0] == 200
    seen: list[str] = []
    after = ""
    while True:
        page = await gateway.ask("one", f"/v1/trajectories?model=m@1&text={{c}}&limit=3{after}")
        seen += [run["id"] for run in page["data"]]
        if not page["has_more"]:
            break
        assert len(page["data"]) < 3
        after = f"&after={page['last_id']}"
    assert {f"heavy-{number}" for number in range(3)} <= set(seen)
    assert len(seen) == len(set(seen))


SEARCH = f"/v1/trajectories?text=nobody-said-this&agent={AGENTS[0]}"


async def works(gateway: TimedGateway, are: Callable[[int, int], bool]) -> list[str]:
    """Wait until this is so of the client works that have begun and that wait; all that is told."""
    async with asyncio.timeout(300):
        while True:
            found = await gateway.ask("admin", "/works")
            if are(found["begun"], found["waiting"]):
                return list(found["told"])
            await asyncio.sleep(0.02)


async def search(gateway: TimedGateway, key: str) -> None:
    async with gateway.session(key) as http, http.get(SEARCH) as response:
        assert response.status == 200 and (await response.json())["data"] == []


@asynccontextmanager
async def many_searches(gateway: TimedGateway) -> AsyncIterator[None]:
    """So many of one key that more than 30 wait, also after this process stood still."""

    async def search_on() -> None:
        while True:
            await search(gateway, "one")

    many = [asyncio.create_task(search_on()) for _ in range(40)]
    await works(gateway, lambda begun, waiting: waiting > 30)
    yield
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)
    assert all(task.cancelled() for task in many)


async def test_a_keys_searches_do_not_keep_anothers_waiting(gateway: TimedGateway) -> None:
    async with many_searches(gateway):
        await search(gateway, "other")
    told = await works(gateway, lambda begun, waiting: begun == waiting == 0)
    assert told[told.index("other comes") : told.index("other ends")].count("one ends") <= 8


async def test_searches_end_when_their_clients_leave(gateway: TimedGateway) -> None:
    for _ in range(5):  # where this process stood still before they left, all were answered
        async with many_searches(gateway):
            pass
        told = await works(gateway, lambda begun, waiting: begun == waiting == 0)
        if told.count("one leaves") > 10:
            return
    raise AssertionError(told)
