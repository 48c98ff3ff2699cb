"""Worker: leases runs of one environment from a platform, and gives each to a slot.

A lease has a deadline, which the worker moves on while the run goes on. If the worker dies, the
platform records the run as failed by its worker, and the loop runs it again under the next id of
its retries. Outcomes are posted once: with a lease that was lost nothing is recorded. Each slot is
a process, so an environment that hangs is killed, and the other slots go on. Started by
launcher.py.
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cray_agents.env_worker.adapters import ADAPTERS, UsageError, make_adapter
from cray_agents.env_worker.chat import HttpClient, RequestRefused, ServerUnreachable
from cray_agents.env_worker.slot import LOOK_SECONDS, SlotDied, SlotProcess, serve, write_tasks

URL = "http://127.0.0.1:8000"
WAIT = 10.0  # seconds that the platform may keep a request for a run waiting
FIELDS = ("run_id", "task", "model", "sampling", "seconds")
LAUNCHER = Path(__file__).with_name("launcher.py")


@dataclass
class EnvironmentWorker:
    """The slots of one environment. `lease`: seconds of a lease, renewed at a third of them."""

    name: str
    command: list[str]
    url: str
    api_key: str
    slots: int
    lease: float
    done: int = 0
    failed: int = 0
    unusable: str = ""
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._label = f"{socket.gethostname()}.{os.getpid()}"
        self._client = HttpClient(f"{self.url}/v1/rollouts", self.api_key, timeout=60.0)

    def run(self) -> None:
        """Carry out runs until it is stopped. Raises UsageError where none can be."""
        threads = [threading.Thread(target=self._keep_slot) for _ in range(self.slots)]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # a signal that a slot's thread took would not end a join
                thread.join(LOOK_SECONDS)
        if self.unusable:
            raise UsageError(self.unusable)

    def _keep_slot(self) -> None:
        slot: SlotProcess | None = None
        try:
            while not self.stopping.is_set():
                if slot is None:
                    slot = self._started()
                leased = None if slot is None else self._leased()
                if slot is not None and leased is not None and not self._carry_out(slot, leased):
                    slot.end()
                    slot = None
        except RequestRefused as error:
            self._give_up(str(error))
        finally:
            if slot is not None:
                slot.end()

    def _started(self) -> SlotProcess | None:
        slot = SlotProcess(self.command)
        try:
            slot.wait_ready(self.stopping.is_set)
        except (UsageError, SlotDied, TimeoutError) as error:
            slot.end()
            if not self.stopping.is_set():
                self._give_up(f"{error}" or "the environment was not loaded in time")
            return None
        return slot

    def _give_up(self, why: str) -> None:
        self.unusable = self.unusable or why
        self.stopping.set()

    def _leased(self) -> dict[str, Any] | None:
        """Lease a run; None if there is none at the moment, or no platform."""
        body = {"environment": self.name, "worker": self._label, "seconds": self.lease}
        try:
            leased = self._client.post("/lease", {**body, "wait": WAIT}, retries=0)["rollout"]
            return leased and {**{key: leased[key] for key in FIELDS}, "lease": leased["lease"]}
        except ServerUnreachable:
            pass
        except (LookupError, TypeError) as error:
            _log(f"the platform's answer has an unknown form: {error!r}")
        except RequestRefused as error:
            if error.status < 500 and error.status != 429:
                raise
        self.stopping.wait(1.0)
        return None

    def _carry_out(self, slot: SlotProcess, leased: dict[str, Any]) -> bool:
        """Carry out a run and post its outcome; False: the slot is to be replaced."""
        run_id, seconds = leased["run_id"], float(leased["seconds"])
        request = {key: leased[key] for key in FIELDS}
        request |= {"base_url": f"{self.url}/runs/{run_id}/v1", "api_key": self.api_key}
        renewal = _Renewal(self._client, leased, self.lease)
        usable = True
        try:
            answer = slot.ask(request, seconds, renewal.keep, self.stopping.is_set)
            if leaked := slot.leaks():
                usable = False
                _log(f"{run_id}: {leaked} processes were left behind, and are ended")
        except TimeoutError:
            usable = False
            answer = _error("EnvironmentTimeout", f"the run took more than {seconds:g} s")
        except SlotDied as error:
            usable = False
            kind = "WorkerStopped" if self.stopping.is_set() else "EnvironmentDied"
            answer = _error(kind, str(error))
        if renewal.lost:
            _log(f"{run_id}: the lease was lost; the platform has recorded its end")
        else:
            self._post(leased, answer)
        return usable

    def _post(self, leased: dict[str, Any], answer: dict[str, Any]) -> None:
        error = answer.get("error")
        self.done, self.failed = self.done + (error is None), self.failed + (error is not None)
        if error is not None:
            _log(f"{leased['run_id']}: {error['message']}")
        path = f"/{leased['run_id']}/result"
        try:
            self._client.post(path, {"lease": leased["lease"], **answer}, retries=10)
        except RequestRefused as refused:
            _log(f"{leased['run_id']}: {refused}")
            if refused.code != "lease_lost" and error is None:  # such as a reward above the limit
                failure = _error(
                    "EnvironmentFailed", f"the platform refused the outcome: {refused}"
                )
                self._post(leased, failure)
        except ServerUnreachable as lost:
            _log(f"{leased['run_id']}: {lost}")


class _Renewal:
    """The renewals of one lease."""

    def __init__(self, client: HttpClient, leased: dict[str, Any], seconds: float) -> None:
        self.lost = False
        self._client, self._seconds = client, seconds
        self._path = f"/{leased['run_id']}/renew"
        self._body = {"lease": leased["lease"], "seconds": seconds}
        self._next = time.monotonic() + seconds / 3

    def keep(self) -> None:
        """Renew the lease if it is time."""
        if self.lost or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._seconds / 3
        try:
            self._client.post(self._path, self._body, retries=0)
        except RequestRefused as refused:
            self.lost = refused.code in ("lease_lost", "not_found")
        except ServerUnreachable:
            pass


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message}}


def _log(text: str) -> None:
    print(f"env-worker: {text}", file=sys.stderr, flush=True)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="env-worker", description=__doc__.split("\n")[0])
    parser.add_argument("--adapter", required=True, choices=list(ADAPTERS))
    parser.add_argument("--env", required=True, help="the environment, as its adapter names it")
    parser.add_argument("--name", help="the name in WorkerEnvironment(NAME); default: the adapter")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--slots", type=int, default=4, help="runs at a time, a process each")
    parser.add_argument("--lease", type=float, default=60.0, help="seconds of a lease")
    parser.add_argument("--url", default=os.environ.get("CRAY_AGENTS_URL") or URL)
    parser.add_argument("--tasks", metavar="FILE", help="write the tasks to FILE, and end")
    parser.add_argument("--slot", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run the worker, one of its slots, or write the tasks. Returns the exit code."""
    given = parse(words)
    try:
        if any("=" not in option for option in given.option) or given.slots < 1:
            raise UsageError("--option takes KEY=VALUE, and --slots at least 1")
        options = dict(option.split("=", 1) for option in given.option)
        if given.slot is not None:
            serve(given.adapter, given.env, options, given.slot)
        elif given.tasks:
            made = make_adapter(given.adapter, given.env, options)
            _log(f"{write_tasks(made, given.tasks)} tasks written to {given.tasks}")
        else:
            _serve_until_stopped(given)
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _serve_until_stopped(given: argparse.Namespace) -> None:
    command = [str(LAUNCHER), "--adapter", given.adapter, "--env", given.env]
    command += [word for option in given.option for word in ("--option", option)]
    worker = EnvironmentWorker(
        name=given.name or given.adapter,
        command=[*command, "--slot"],
        url=given.url.rstrip("/").removesuffix("/v1"),
        api_key=os.environ.get("CRAY_AGENTS_API_KEY") or "none",
        slots=given.slots,
        lease=given.lease,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stopping.set())
    _log(f"{worker.slots} slots of {given.env} wait for runs of {worker.url}")
    worker.run()
    _log(f"ended: {worker.done} runs done, {worker.failed} failed")
