"""Clients of a cluster under faults: questions, batches, agents with a tool, and trainings.

All but the batches are threads that go on until `ended` is set. Each keeps what it was promised.
"""

import asyncio
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import openai
import orjson

from cray_agents import Agent, Platform
from cray_agents.errors import EngineError, NoController, StoreError, TooManyRequests
from cray_agents.records import Run, StopReason
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.job.journal import CommandJournal
from tests.support.faults.cluster import TRAINED, VLLM, Cluster, ask
from tests.support.killable_session import ONE_STEP, STEPS, train

COMMANDS = STEPS * len(ONE_STEP) + 1
_AGAIN = (EngineError, NoController, StoreError, TooManyRequests)  # that a client may try again


class Client(threading.Thread):
    """Ask one question after the other, each until it is answered."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__(daemon=True)
        self.answers: dict[str, tuple[str, str, str]] = {}  # by question
        self.retries = 0
        self.failure: Exception | None = None
        self.ended = threading.Event()
        self._cluster, self._number = cluster, number
        self.start()

    def run(self) -> None:
        count = 0
        while not self.ended.is_set() and self.failure is None:
            count += 1
            self._ask(f"client {self._number}, question {count}")
            time.sleep(0.2)

    def _ask(self, text: str) -> None:
        key = uuid.uuid4().hex
        while self.failure is None:
            try:
                self.answers[text] = ask(self._cluster.client(), text, key)
                return
            except openai.APIStatusError as error:
                if error.status_code < 500 and error.status_code not in (401, 409, 429):
                    self.failure = error
            except openai.OpenAIError:
                pass
            self.retries += 1
            time.sleep(0.2)


class Batches:
    """A first batch, and a tenth of its lines again and again: the queue is never long empty."""

    def __init__(self, cluster: Cluster, lines: int) -> None:
        self.lines: list[int] = []  # of each batch
        self.ids: list[str] = []
        self._cluster, self._first = cluster, lines
        self.submit()

    def submit(self) -> None:
        """Put a batch into the queue, once."""
        number = len(self.lines)
        self.lines.append(self._first if not number else max(1, self._first // 10))
        self._cluster.until(lambda: self._submit(number), "a batch in the queue")

    def _submit(self, number: int) -> bool:
        client, name = self._cluster.client(), {"number": str(number)}
        with suppress(openai.OpenAIError):
            made = [batch.id for batch in client.batches.list() if batch.metadata == name]
            if not made:
                content = b"\n".join(
                    orjson.dumps(_line(number, n)) for n in range(self.lines[number])
                )
                file = client.files.create(file=("lines.jsonl", content), purpose="batch")
                made = [
                    client.batches.create(
                        input_file_id=file.id,
                        endpoint="/v1/chat/completions",
                        completion_window="24h",
                        metadata=name,
                    ).id
                ]
            self.ids += made
            return True
        return False

    def keep_one(self) -> None:
        """Submit another one if all are completed."""
        if self.answered(len(self.ids) - 1) == self.lines[-1]:
            self.submit()

    def answered(self, number: int) -> int:
        """The lines of a batch with an answer; -1: nobody says. All: it is completed."""
        with suppress(openai.OpenAIError):
            batch = self._cluster.client().batches.retrieve(self.ids[number])
            assert batch.status not in ("failed", "expired", "cancelled"), batch
            done = batch.request_counts.completed if batch.request_counts else 0
            return done if batch.status == "completed" else min(done, self.lines[number] - 1)
        return -1

    def finish(self) -> None:
        """Wait for the last one's end."""
        last, before = len(self.ids) - 1, -1

        def goes_on() -> bool:
            return self.answered(last) > before

        while before < self.lines[-1]:
            self._cluster.until(goes_on, "a batch's answers")
            before = self.answered(last)

    def texts(self) -> list[str]:
        """The question of each line."""
        return [_text(batch, n) for batch, lines in enumerate(self.lines) for n in range(lines)]

    def check(self) -> None:
        """Each line has one answer, that of its question."""
        client = self._cluster.client()
        for number, batch in enumerate(self.ids):
            output = client.batches.retrieve(batch).output_file_id
            assert output is not None
            content = client.files.content(output).content
            lines = [orjson.loads(line) for line in content.splitlines()]
            assert sorted(line["custom_id"] for line in lines) == sorted(
                f"c{n}" for n in range(self.lines[number])
            )
            for line in lines:
                said = line["response"]["body"]["choices"][0]["message"]["content"]
                text = _text(number, int(line["custom_id"][1:]))
                assert VLLM or said.endswith(f": {text}"), line


def _text(batch: int, line: int) -> str:
    return f"batch {batch}, line {line}"


def _line(batch: int, line: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": _text(batch, line)}]
    return {"custom_id": f"c{line}", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": messages}}  # fmt: skip


def twice(number: int) -> int:
    """Double a number.

    Args:
        number: an integer.
    """
    return 2 * number


class Agents(threading.Thread):
    """Run an agent again and again; each run calls its tool once and answers."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.runs: dict[str, Run] = {}  # that ended and were recorded, by id
        self.cut_off = 0  # runs that a fault ended
        self.failure: Exception | None = None
        self.ended = threading.Event()
        self._cluster = cluster
        self.start()

    def run(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception as error:  # noqa: BLE001 - a thread's edge: the test raises it
            self.failure = error

    async def _work(self) -> None:
        count = 0
        while not self.ended.is_set():
            count += 1
            platform = Platform(self._cluster.url)
            agent = Agent(name="doubler", model="m", tools=[twice], engine=platform.engine())
            try:
                run = await agent.run(f'call twice {{"number": {count}}}')
            except _AGAIN:
                self.cut_off += 1
            else:
                if run.stop_reason == StopReason.completed:
                    assert str(run.output).endswith(f": {2 * count}"), run.output
                    self.runs[run.id] = run
                else:
                    self.cut_off += 1
            finally:
                await platform.close()
            await asyncio.sleep(0.2)


class Training(threading.Thread):
    """Train one session after the other, over two nodes; all must end alike."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.ends: list[tuple[object, ...]] = []  # results and files of each session
        self.retries = 0
        self.failure: Exception | None = None
        self.ended = threading.Event()
        self._cluster = cluster
        self.start()

    @property
    def done(self) -> int:
        """The number of commands, of all sessions, that have results."""
        return sum(CommandJournal(job).done for job in self._cluster.home.jobs.glob("job-*"))

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                asyncio.run(self._train(f"mine-{len(self.ends)}"))
        except Exception as error:  # noqa: BLE001 - a thread's edge: the test raises it
            self.failure = error

    async def _train(self, name: str) -> None:
        while True:
            platform = Platform(self._cluster.url)
            try:
                versions = await train(platform, name, model=TRAINED, ranks=2, pause=0.5)
            except _AGAIN:
                self.retries += 1
                await asyncio.sleep(0.5)
            else:
                self.ends.append(self._end(versions))
                return
            finally:
                await platform.close()

    def _end(self, versions: list[str]) -> tuple[object, ...]:
        registry, home = Registry(self._cluster.home), self._cluster.home
        manifests = [read_manifest(home.checkpoint(registry.resolve(v).checkpoint))
                     for v in versions]  # fmt: skip
        [job] = {manifest.job for manifest in manifests}
        journal = CommandJournal(home.job(str(job)))
        results = [journal.result(number) for number in range(1, COMMANDS + 1)]
        kept = {"seconds", "checkpoint"}
        return (
            [result and result.model_dump(exclude=kept) for result in results],
            [manifest.files for manifest in manifests],
        )
