"""Clients of a cluster under faults: questions, agents with a tool, and a training over two nodes.

Each is a thread that goes on until `ended` is set, and keeps what it was promised.
"""

import asyncio
import threading
import time
import uuid

import openai

from cray_agents import Agent, Platform
from cray_agents.errors import EngineError, NoController, StoreError, TooManyRequests
from cray_agents.records import Run, StopReason
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.session.command_journal import CommandJournal
from tests.support.faults.cluster import TRAINED, Cluster, ask
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
            time.sleep(0.05)

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
