"""A request that is sent again under the same `Idempotency-Key` gets the recorded answer.

The record is that of the call itself, made before the answer ends: after a crash of anything, the
repeat finds it, or nothing was answered and it is sampled. Repeats that come while the first is
still running wait for it. A call that failed, was cut off or was forgotten is not repeated but made
anew; that of a forgotten one has another id, which the repeats of the key then lead to.
Called by answers.py.
"""

import asyncio
import hashlib
from typing import Any, NamedTuple

import orjson

from cray_agents.errors import BadInput
from cray_agents.runtime.store import Store


class ReplayedAnswer(NamedTuple):
    """An answer that was given before."""

    run_id: str
    body: bytes


def key_of(caller: str, path: str, key: str) -> str:
    """What names the call that is made under a key: it is one caller's and one API's alone."""
    return hashlib.blake2b(f"{caller}\n{path}\n{key}".encode(), digest_size=16).hexdigest()


def fingerprint(request: dict[str, Any]) -> str:
    """What tells whether a key is used for the same request again."""
    content = orjson.dumps(request, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _next(name: str) -> str:
    """What names the call that takes the place of a forgotten one."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


class InFlightKey:
    """A keyed request that runs, as `name`; those that repeat it wait until it leaves."""

    def __init__(self, running: "dict[str, InFlightKey]", call_id: str, name: str) -> None:
        self.ended = asyncio.Event()
        self.name = name
        self._running = running
        self._call_id = call_id

    def leave(self) -> None:
        """The request has ended, whatever came of it. May be said twice."""
        if not self.ended.is_set():
            self.ended.set()
            del self._running[self._call_id]


class IdempotencyKeys:
    """The keyed requests that run now, and those that the store knows. One event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: dict[str, InFlightKey] = {}

    async def enter(self, prefix: str, name: str, request: str) -> "ReplayedAnswer | InFlightKey":
        """What was answered in the keyed call `prefix` + `name`; or the caller's turn to ask.

        `request` is its fingerprint. Raises BadInput where it is another than the first time.
        """
        call_id = prefix + name
        while (running := self._running.get(call_id)) is not None:
            await running.ended.wait()
        turn = self._running[call_id] = InFlightKey(self._running, call_id, name)
        try:
            found = await self._found(prefix, turn)
            if found is None:
                return turn
            if found["fingerprint"] != request:
                raise BadInput(
                    "this Idempotency-Key was used for another request: send the same one again, "
                    "or choose another key",
                    param="Idempotency-Key",
                    code="idempotency_key_reused",
                )
        except BaseException:
            turn.leave()
            raise
        turn.leave()
        return ReplayedAnswer(found["run_id"], found["reply"].encode())

    async def _found(self, prefix: str, turn: InFlightKey) -> dict[str, Any] | None:
        """What is recorded; where that is nothing, the turn has the name of a call to be made."""
        while self._store.known(prefix + turn.name):
            try:
                return await asyncio.to_thread(self._store.body, prefix + turn.name)
            except KeyError:  # it was forgotten
                turn.name = _next(turn.name)
        return None
