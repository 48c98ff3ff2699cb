"""Idempotency keys: a request repeated under its `Idempotency-Key` gets the recorded answer.

The answer comes from the record of the call, which is written before the answer ends. After any
crash a repeat either finds that record, or nothing was answered and it samples. Repeats wait for a
first request that is still running. A call that failed, was cut off or was forgotten is not
repeated: the request runs again. After a forgotten call the new one gets a new id, and later
repeats of the key find that one. Called by answer.py.

Where several gateways record to one store, a running request also holds a lock of this host, so
that its repeats at other gateways of the host wait as well. Repeats at another host's gateway do
not wait: they sample again while the first request runs, and the first record counts.
"""

import asyncio
import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json
from cray_agents.runtime.disk.host_lock import HostLock
from cray_agents.runtime.store import Store

SAMPLE_FIELDS = ("prompt_token_ids", "token_ids", "logprobs")
_LOCK_INTERVAL = 0.02  # seconds between two looks if another gateway's request has ended


def samples_member(samples: Iterable[dict[str, Any]]) -> bytes:
    """Return an answer's JSON member `samples`, with a comma before it, from calls' bodies."""
    rows = [{name: each[name] for name in SAMPLE_FIELDS} for each in samples]
    return b',"samples":' + orjson.dumps(rows)


def replay_of(reply: bytes, call: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a call's record that repeat its reply.

    Samples that the reply carries are those of the record: only their place is kept.
    """
    if b',"samples":' not in reply:
        return {"reply": reply.decode()}
    member = samples_member([call])
    if (at := reply.rfind(member)) < 0:  # those of several choices
        return {"reply": reply.decode()}
    rest = reply[:at] + reply[at + len(member) :]
    return {"reply": rest.decode(), "samples_at": len(reply[:at].decode())}


def _reply(record: dict[str, Any]) -> bytes:
    reply: str = record["reply"]
    at = record.get("samples_at")
    if at is None or record.get("redacted"):  # whose tokens are left out
        return reply.encode()
    return reply[:at].encode() + samples_member([record]) + reply[at:].encode()


class ReplayedAnswer(NamedTuple):
    """An answer that was given before."""

    run_id: str
    body: bytes


def key_of(caller: str, path: str, key: str) -> str:
    """Return the id of the call made under a key. It differs by caller and by API."""
    return hashlib.blake2b(f"{caller}\n{path}\n{key}".encode(), digest_size=16).hexdigest()


def fingerprint(request: dict[str, Any]) -> str:
    """Return a hash of a request, which must be the same when its key is used again."""
    content = dump_json(request, sort_keys=True)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _next_name(name: str) -> str:
    """Return the id of the call that replaces a forgotten one."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


class InFlightKey:
    """A keyed request that is running, under the id `name`. Its repeats wait until it leaves."""

    def __init__(self, running: "dict[str, InFlightKey]", call_id: str, name: str) -> None:
        self.ended = asyncio.Event()
        self.name = name
        self.lock: HostLock | None = None
        self._running = running
        self._call_id = call_id

    def leave(self) -> None:
        """End the request, whatever its outcome. Safe to call twice."""
        if not self.ended.is_set():
            self.ended.set()
            del self._running[self._call_id]
            if self.lock is not None:
                self.lock.close()


async def _lock_on_host(root: str, call_id: str) -> HostLock:
    """Wait until no other process of this host holds a call's lock, and return it."""
    lock = HostLock(f"call {call_id} of root {root}")
    try:
        while not lock.take():  # noqa: ASYNC110 - another process holds it
            await asyncio.sleep(_LOCK_INTERVAL)
    except BaseException:
        lock.close()
        raise
    return lock


class IdempotencyKeys:
    """Keyed requests that are running or in the store. For use on one event loop.

    `shared`: other gateways record to the same store.
    """

    def __init__(self, store: Store, *, shared: bool = False) -> None:
        self._store = store
        self.shared = shared
        self._running: dict[str, InFlightKey] = {}

    async def enter(self, prefix: str, name: str, request: str) -> "ReplayedAnswer | InFlightKey":
        """Return the recorded answer of the call `prefix` + `name`, or begin that call.

        `request` is a fingerprint. Raises BadInput if it differs from the first request's.
        """
        call_id = prefix + name
        while (running := self._running.get(call_id)) is not None:
            await running.ended.wait()
        in_flight = self._running[call_id] = InFlightKey(self._running, call_id, name)
        try:
            if self.shared:
                in_flight.lock = await _lock_on_host(self._store.identity, call_id)
                await asyncio.to_thread(self._store.refresh)  # others may have recorded it
            record = await self._read_record(prefix, in_flight)
            if record is None:
                return in_flight
            if record["fingerprint"] != request:
                raise BadInput(
                    "this Idempotency-Key was used for another request: send the same one again, "
                    "or choose another key",
                    param="Idempotency-Key",
                    code="idempotency_key_reused",
                )
        except BaseException:
            in_flight.leave()
            raise
        in_flight.leave()
        return ReplayedAnswer(record["run_id"], _reply(record))

    async def _read_record(self, prefix: str, in_flight: InFlightKey) -> dict[str, Any] | None:
        """Return the recorded call, or None and leave a free id in `in_flight.name`."""
        while self._store.known(prefix + in_flight.name):
            try:
                return await asyncio.to_thread(self._store.body, prefix + in_flight.name)
            except KeyError:  # forgotten
                in_flight.name = _next_name(in_flight.name)
        return None
