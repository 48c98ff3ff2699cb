"""Batches as OpenAI's own client sees them, on a scripted model and real worker processes."""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from openai.types import Batch

from cray_agents.errors import EngineError
from cray_agents.paths import Home
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.batches import chunks, claims, validation
from cray_agents.runtime.batches.batch_records import BatchFolder
from cray_agents.runtime.batches.board import Board
from cray_agents.runtime.batches.claims import Holder
from cray_agents.runtime.batches.queue import BatchQueue
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.views.view_records import BatchErrors
from cray_agents.server.compose import run_worker
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_gateway import served, until
from tests.support.scripted_platform import platform
from tests.support.waiting import wait_until

ENDPOINT: Any = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


def line(custom_id: Any = "a", content: str = "hi", **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body, **more}


def jsonl(*lines: Any) -> bytes:
    return b"".join(
        (each if isinstance(each, bytes) else orjson.dumps(each)) + b"\n" for each in lines
    )


def echo(request: dict[str, Any]) -> str:
    return f"you said {request['messages'][-1]['content']}"


class Client:
    """The official client, and what tests ask of it again and again."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self.home = Home(home)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.batches = self.openai.batches

    def upload(self, data: bytes, purpose: Any = "batch") -> str:
        return self.openai.files.create(file=("in.jsonl", data), purpose=purpose).id

    def submit(self, *lines: Any, **more: Any) -> Batch:
        asked = {"endpoint": ENDPOINT, "completion_window": "24h", **more}
        return self.batches.create(input_file_id=self.upload(jsonl(*lines)), **asked)

    def ended(self, batch: Batch) -> Batch:
        return self.until(batch, lambda batch: batch.status in ENDED)

    def until(self, batch: Batch, wanted: Callable[[Batch], bool]) -> Batch:
        deadline = time.monotonic() + 200
        while not wanted(batch := self.batches.retrieve(batch.id)):
            assert time.monotonic() < deadline, batch
            time.sleep(0.05)
        return batch

    def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """The lines of an output or error file by custom_id; none twice."""
        assert file_id
        found = [orjson.loads(each) for each in self.openai.files.content(file_id).iter_lines()]
        named = {each["custom_id"]: each for each in found}
        assert len(named) == len(found)
        return named


@contextmanager
def serving(tmp_path: Path, engine: ScriptedEngine, workers: int = 1) -> Iterator[Client]:
    with platform(tmp_path / "home", engine) as where, ExitStack() as running:
        for _ in range(workers):
            running.enter_context(worker(tmp_path / "home", where.url))
        client = Client(where.url, tmp_path / "home")
        running.enter_context(client.openai)
        yield client


@contextmanager
def worker(home: Path, url: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process; it must not have ended by itself."""
    argv = [sys.executable, "-m", "cray_agents.runtime.batches.worker", str(home), url, *words]
    process = subprocess.Popen([*argv, "--parent", str(os.getpid())])
    try:
        yield process
        wait_until(lambda: process.pid in pids(Home(home)) or process.poll() is not None)
        assert process.poll() is None, "the worker died"
        process.terminate()
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.wait()


def pids(home: Home) -> set[int]:
    """Of the workers that have begun, and hear signals."""
    paths = (home.batches / "workers").glob("worker_*.json")
    return {int(orjson.loads(path.read_bytes())["pid"]) for path in paths}


@pytest.mark.slow
def test_a_batch_from_upload_to_output(tmp_path: Path) -> None:
    with serving(tmp_path, ScriptedEngine(echo), workers=0) as client, ExitStack() as running:
        asked = [line(f"c{number}", f"number {number}") for number in range(1200)]
        first, *others = jsonl(*asked).splitlines()  # after a mark, as Windows programs write it
        batch = client.submit(BOM_UTF8 + first, *others, metadata={"who": "test"})
        assert (batch.status, batch.metadata) == ("validating", {"who": "test"})
        assert batch.expires_at == batch.created_at + 86400
        for _ in range(2):
            running.enter_context(worker(client.home.root, client.url))
        batch = client.ended(batch)
        assert batch.status == "completed", batch
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 1200, "completed": 1200, "failed": 0}
        assert batch.model == "m"
        assert batch.error_file_id is None
        assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
        answers = client.lines(batch.output_file_id)
        file = client.openai.files.retrieve(str(batch.output_file_id))
        folder = BatchFolder(client.home.batches / batch.id)
    assert list(answers) == [each["custom_id"] for each in asked]
    for number, answer in enumerate(answers.values()):
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        said = answer["response"]["body"]["choices"][0]["message"]["content"]
        assert said == f"you said number {number}"
    assert len({answer["id"] for answer in answers.values()}) == 1200
    assert file.purpose == "batch_output"
    used = [answer["response"]["body"]["usage"] for answer in answers.values()]
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in used)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in used)
    assert not folder.done.exists() and not folder.input.exists()


def test_a_result_is_one_line_however_it_is_split(tmp_path: Path) -> None:
    odd = "one\x85two\u2028three\u2029four\x1cfive"
    with serving(tmp_path, ScriptedEngine(echo)) as client:
        batch = client.ended(client.submit(line(odd, odd)))
        text = client.openai.files.content(str(batch.output_file_id)).text
    (answer,) = [orjson.loads(each) for each in text.splitlines()]
    assert answer["custom_id"] == odd
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == f"you said {odd}"


def test_three_identical_lines_are_three_samples(tmp_path: Path) -> None:
    engine = ScriptedEngine(["one", "two", "three"])
    with serving(tmp_path, engine) as client:
        batch = client.ended(client.submit(line("a"), line("b"), line("c")))
        answers = client.lines(batch.output_file_id).values()
    assert len(engine.requests) == 3
    said = {each["response"]["body"]["choices"][0]["message"]["content"] for each in answers}
    assert said == {"one", "two", "three"}
    assert len({each["response"]["body"]["id"] for each in answers}) == 3


def test_lines_that_fail_are_in_the_error_file(tmp_path: Path) -> None:
    def moody(request: dict[str, Any]) -> Any:
        said = request["messages"][-1]["content"]
        return EngineError("no such thing", status=400) if said == "bad" else "fine"

    with serving(tmp_path, ScriptedEngine(moody)) as client:
        unknown = line("unknown")
        unknown["body"]["model"] = "nobody"
        batch = client.ended(client.submit(line("good"), line("bad", "bad"), unknown))
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
        assert batch.model is None
        failures = client.lines(batch.error_file_id)
        assert set(client.lines(batch.output_file_id)) == {"good"}
        with urllib.request.urlopen(f"{client.url}/v1/batches/{batch.id}/errors") as answer:
            errors = BatchErrors.model_validate_json(answer.read())
    assert (errors.lines, errors.failed, len(errors.data)) == (3, 2, 2)
    assert {each.status: each.examples[0].custom_id for each in errors.data} == {
        400: "bad",
        404: "unknown",
    }
    assert failures["bad"]["response"]["status_code"] == 400
    assert failures["bad"]["response"]["body"]["error"]["message"] == "no such thing"
    assert failures["bad"]["error"] is None
    assert failures["unknown"]["response"]["status_code"] == 404


@pytest.mark.slow
def test_what_says_nothing_of_a_line_is_asked_again(tmp_path: Path) -> None:
    turns: Any = iter([EngineError("away", status=503), EngineError("broken", status=500), "there"])
    with serving(tmp_path, ScriptedEngine(lambda _: next(turns))) as client:
        batch = client.ended(client.submit(line("a")))
        assert batch.status == "completed"
        answer = client.lines(batch.output_file_id)["a"]
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "there"


BAD_LINES = [
    (b"{", "invalid_json_line", None),
    (b"[1]", "invalid_json_line", None),
    (b'"\xff"', "invalid_json_line", None),
    ({"method": "POST", "url": ENDPOINT, "body": {}}, "missing_required_parameter", "custom_id"),
    (line(7), "invalid_value", "custom_id"),
    (line("x", method="GET"), "invalid_method", "method"),
    (line("x", url="/v1/embeddings"), "mismatched_endpoint", "url"),
    (line("x", body=None), "missing_required_parameter", "body"),
    (line("x", body={"messages": []}), "missing_required_parameter", "body.model"),
    (line("x", body={"model": "m", "stream": True}), "invalid_value", "body.stream"),
    (b'{"custom_id": "' + b"x" * validation.MAX_LINE + b'"}', "line_too_long", None),
    (line("good"), "duplicate_custom_id", "custom_id"),
]


@pytest.mark.slow
def test_an_input_with_errors_fails_with_all_of_them(tmp_path: Path) -> None:
    engine = ScriptedEngine(echo)
    with serving(tmp_path, engine) as client:
        lines = [line("good"), b"", *(bad for bad, _, _ in BAD_LINES)]
        batch = client.ended(client.submit(*lines))
        empty = client.ended(client.submit(b"", b"  "))
        many = client.ended(client.submit(*[b"{"] * 500))
    assert batch.status == "failed"
    assert batch.failed_at and batch.errors and batch.errors.data
    problems = [(error.line, error.code, error.param) for error in batch.errors.data]
    assert problems == [(number, code, at) for number, (_, code, at) in enumerate(BAD_LINES, 3)]
    assert all(error.message for error in batch.errors.data)
    assert empty.errors and empty.errors.data and empty.errors.data[0].code == "empty_file"
    assert many.errors and many.errors.data and len(many.errors.data) == validation.MAX_ERRORS
    assert engine.requests == []


def test_what_cannot_be_a_batch_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, ScriptedEngine(echo), workers=0) as client:
        good: dict[str, Any] = {
            "input_file_id": client.upload(jsonl(line())),
            "endpoint": ENDPOINT,
            "completion_window": "24h",
        }
        other = client.upload(b"{}", purpose="user_data")
        odd: list[tuple[dict[str, Any], str]] = [
            ({"endpoint": "/v1/moderations"}, "endpoint"),
            ({"endpoint": 7}, "endpoint"),
            ({"completion_window": "31d"}, "completion_window"),
            ({"completion_window": "0h"}, "completion_window"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"input_file_id": other}, "input_file_id"),
            ({"input_file_id": "../x"}, "input_file_id"),
            ({"metadata": {"a": "x" * 513}}, "metadata"),
            ({"metadata": "x"}, "metadata"),
            ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ]
        for wrong, param in odd:
            with pytest.raises(openai.BadRequestError) as refused:
                client.batches.create(**good | wrong)
            assert refused.value.param == param
        with pytest.raises(openai.NotFoundError):
            client.batches.create(**{**good, "input_file_id": "file-nobody"})
        for unknown in ("batch_nobody", "workers", "batch_%2e%2e"):
            with pytest.raises(openai.NotFoundError):
                client.batches.retrieve(unknown)
        with pytest.raises(openai.NotFoundError):
            client.batches.cancel("batch_nobody")
        assert list(client.batches.list()) == []
        week = client.batches.create(**{**good, "completion_window": "7d"})
        assert week.expires_at == week.created_at + 7 * 86400


def test_the_same_key_makes_the_same_batch(tmp_path: Path) -> None:
    with serving(tmp_path, ScriptedEngine(echo), workers=0) as client:
        asked: Any = {
            "input_file_id": client.upload(jsonl(line())),
            "endpoint": ENDPOINT,
            "completion_window": "24h",
            "extra_headers": {"Idempotency-Key": "once"},
        }
        first = client.batches.create(**asked)
        assert client.batches.create(**asked).id == first.id
        other: Any
        for other in (
            {"input_file_id": client.upload(jsonl(line()))},
            {"endpoint": "/v1/completions"},
            {"completion_window": "25h"},
            {"metadata": {"of": "another"}},
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.batches.create(**asked | other)
            assert refused.value.code == "idempotency_key_reused"
        client.openai.files.delete(asked["input_file_id"])
        assert client.batches.create(**asked).id == first.id
        assert client.submit(line()).id != first.id
        assert len(list(client.batches.list())) == 2


async def test_keys_of_different_callers_make_different_batches(tmp_path: Path) -> None:
    async with served(tmp_path, api_keys="required") as gateway:
        keys = Keys(gateway.services.home)
        made = []
        for secret in [keys.create(name)[1] for name in ("ann", "bob")]:
            client = gateway.client(key=secret)
            file = await client.files.create(file=("in.jsonl", jsonl(line())), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id,
                endpoint=ENDPOINT,
                completion_window="24h",
                extra_headers={"Idempotency-Key": "once"},
            )
            made.append((batch.input_file_id == file.id, batch.id))
        assert [own for own, _ in made] == [True, True] and made[0][1] != made[1][1]


def test_batches_are_listed_in_pages(tmp_path: Path) -> None:
    with serving(tmp_path, ScriptedEngine(echo), workers=0) as client:
        made = [client.submit(line()).id for _ in range(5)]
        page = client.batches.list(limit=2)
        assert [batch.id for batch in page.data] == made[:2:-1]
        assert page.has_more
        assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
        with pytest.raises(openai.NotFoundError):
            client.batches.list(after="batch_nobody")
        for limit in (0, 101):
            with pytest.raises(openai.BadRequestError):
                client.batches.list(limit=limit)


@pytest.mark.slow
def test_a_cancelled_batch_keeps_what_is_done(tmp_path: Path) -> None:
    answered, cancelled = 0, False

    async def slow(request: dict[str, Any]) -> str:
        nonlocal answered
        answered += 1
        while answered > 200 and not cancelled:  # noqa: ASYNC110 - set in another thread
            await asyncio.sleep(0.02)
        return "done"

    with serving(tmp_path, ScriptedEngine(slow)) as client:
        batch = client.submit(*(line(f"c{number}") for number in range(2000)))
        client.until(batch, lambda _: answered > 200)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        cancelled = True
        batch = client.ended(batch)
        assert batch.status == "cancelled"
        assert batch.cancelling_at and batch.cancelled_at
        good, bad = client.lines(batch.output_file_id), client.lines(batch.error_file_id)
        assert client.batches.cancel(batch.id).status == "cancelled"
    assert len(good) + len(bad) == 2000
    assert good and bad
    counts = batch.request_counts
    assert counts and (counts.completed, counts.failed) == (len(good), len(bad))
    assert {each["error"]["code"] for each in bad.values()} == {"batch_cancelled"}
    assert {each["response"] for each in bad.values()} == {None}


@pytest.mark.slow
def test_cancelled_before_a_worker_looked_and_after_the_end(tmp_path: Path) -> None:
    with serving(tmp_path, ScriptedEngine(echo), workers=0) as client:
        early, late = client.submit(line()), client.submit(line())
        assert client.batches.cancel(early.id).status == "cancelling"
        with worker(client.home.root, client.url):
            early, late = client.ended(early), client.ended(late)
        assert (early.status, early.output_file_id) == ("cancelled", None)
        with pytest.raises(openai.BadRequestError):
            client.batches.cancel(late.id)


@pytest.mark.slow
def test_an_expired_batch_says_which_lines_were_not_asked(tmp_path: Path) -> None:
    async def stuck(request: dict[str, Any]) -> str:
        await asyncio.sleep(0 if request["messages"][-1]["content"] == "quick" else 600)
        return "done"

    with serving(tmp_path, ScriptedEngine(stuck), workers=0) as client:
        for seconds in (3, 30, 150):  # a busy machine may not answer a line within the first
            batch = client.submit(line("quick", "quick"), line("stuck"), line("stuck too"))
            soon(client, batch, seconds)
            with worker(client.home.root, client.url):
                batch = client.ended(batch)
            assert batch.status == "expired"
            assert batch.expired_at
            if batch.output_file_id:
                break
        assert set(client.lines(batch.output_file_id)) == {"quick"}
        bad = client.lines(batch.error_file_id)
    assert {each["error"]["code"] for each in bad.values()} == {"batch_expired"}
    assert set(bad) == {"stuck", "stuck too"}


def soon(client: Client, batch: Batch, seconds: int) -> None:
    """Let a batch expire earlier than the least window, before any worker has seen it."""
    path = BatchFolder(client.home.batches / batch.id).request_file
    record = checksums.read_json(path) | {"expires_at": int(time.time()) + seconds}
    durable.replace_file(path, checksums.with_crc(json.dumps(record).encode()))


@pytest.mark.slow
def test_a_small_batch_does_not_wait_for_a_huge_one(tmp_path: Path) -> None:
    with serving(tmp_path, ScriptedEngine(echo, delay=0.2)) as client:
        huge = client.submit(*(line(f"c{number}") for number in range(3000)))
        client.until(huge, lambda batch: bool(batch.request_counts.completed))  # type: ignore[union-attr]
        small = client.ended(client.submit(line("a"), line("b")))
        assert small.status == "completed"
        assert client.batches.retrieve(huge.id).status == "in_progress"
        client.batches.cancel(huge.id)
        client.ended(huge)


@pytest.mark.slow
def test_the_input_may_be_deleted_once_it_is_queued(tmp_path: Path) -> None:
    with serving(tmp_path, ScriptedEngine(echo), workers=0) as client:
        batch = client.submit(line("a"))
        client.openai.files.delete(batch.input_file_id)
        with worker(client.home.root, client.url):
            assert client.ended(batch).status == "completed"


def queued(tmp_path: Path, lines: int) -> tuple[Home, BatchFolder]:
    """A batch that is validated, without any gateway."""
    home = Home(tmp_path)
    files = Files(home)
    with files.blobs.draft() as draft:
        draft.write(jsonl(*(line(f"c{number}") for number in range(1, lines + 1))))
        blob = draft.publish()
    file = files.publish(blob, filename="in.jsonl", purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
    folder = BatchFolder(home.batches / BatchQueue(home, files).create(asked).id)
    validation.validate(folder, folder.request())
    return home, folder


def test_a_dead_workers_chunk_is_taken_over_with_its_results(tmp_path: Path) -> None:
    home, folder = queued(tmp_path, 3)
    elsewhere = dead_holder(home, folder)
    answer = chunks.result_line(folder.id, 2, "c2", 200, "req", b'{"usage":{"total_tokens":5}}')[0]
    torn = answer[: len(answer) // 2]
    (folder.results / "00000000.1-0000.jsonl").write_bytes(answer + b"\n" + torn)
    board = Board(home, Holder(home.batches / "workers"))
    board.refresh()
    work = board.claim("oldest")
    assert work is not None
    assert (work.chunk, work.fence) == (0, 2)
    found = chunks.results_so_far(folder, 0)
    assert {number: result.tokens[4] for number, result in found.items()} == {2: 5}
    assert board.claim("oldest") is None, "a living worker's claim is its own"
    assert elsewhere.exists()


def dead_holder(home: Home, folder: BatchFolder) -> Path:
    """A claim on chunk 0 by a worker whose process has ended."""
    script = (
        "import os, sys; from pathlib import Path; from cray_agents.runtime.batches.claims import"
        " Holder; Holder(Path(sys.argv[1])).take(Path(sys.argv[2]), '00000000', 0)"
    )
    words = [str(home.batches / "workers"), str(folder.claims)]
    subprocess.run([sys.executable, "-c", script, *words], check=True)
    return folder.claims / "00000000.1"


def test_a_claim_from_another_machine_holds_for_its_lease(tmp_path: Path) -> None:
    home, folder = queued(tmp_path, 3)
    claim = dead_holder(home, folder)
    record = orjson.loads(claim.read_bytes()) | {"machine": "elsewhere"}
    claim.write_bytes(orjson.dumps(record))
    holder = Holder(home.batches / "workers", lease=30)
    assert holder.take(folder.claims, "00000000", 1) is None
    os.utime(claim, (holder.path.stat().st_mtime - 31,) * 2)
    assert holder.take(folder.claims, "00000000", 1) == 2
    assert claims.fences(folder.claims) == {"00000000": 2}


def test_a_chunk_is_sealed_once(tmp_path: Path) -> None:
    _, folder = queued(tmp_path, 3)
    lines = chunks.requests(folder, validation.read_index(folder.index)[0])
    assert chunks.seal(folder, 0, lines, {}, "expired")
    first = chunks.seal_path(folder, 0).read_bytes()
    assert not chunks.seal(folder, 0, lines, {}, "cancelled")
    assert chunks.seal_path(folder, 0).read_bytes() == first
    assert first.count(b"batch_expired") == 3


@pytest.mark.slow
async def test_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    keeper = BackgroundTasks()
    keeper.keep("batch worker", partial(run_worker, home, "http://127.0.0.1:9"))
    (first,) = await until(lambda: pids(home))
    os.kill(first, 9)
    (second,) = await until(lambda: pids(home) - {first})
    await keeper.close()
    assert not Path(f"/proc/{second}").exists()


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(line("a", "hi"), line("b", "ho")))

    def cli(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "cray_agents", "batch", *words, "--url", client.url]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)

    with serving(tmp_path, ScriptedEngine(echo)) as client:
        done = cli("run", "in.jsonl", "--json")
        assert done.returncode == 0, done.stderr
        batch = json.loads(done.stdout)
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 2)
        assert "completed" in cli("status").stdout
        assert json.loads(cli("status", batch["id"], "--json").stdout)["id"] == batch["id"]
        assert "you said ho" in cli("status", batch["id"], "-o", "-").stdout
        assert cli("status", batch["id"], "-o", "out.jsonl").returncode == 0
        refused = cli("status", "--cancel", batch["id"])
        absent = cli("status", "batch_nobody")
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 2
    assert refused.returncode == 2
    assert "cannot be cancelled" in " ".join(refused.stderr.split())
    assert absent.returncode == 2
