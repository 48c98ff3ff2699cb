"""Ownership: an API key owns the runs, files, uploads and batches that it made.

The same holds for the samplers and models of Tinker's scripts.

A record keeps the key's id as its `owner`. Only that key or an admin may change the record; every
key may read it. The owner "" is this host itself. It owns records made without keys, by the
platform's commands, or before owners were recorded, and only admins change them. Without keys every
caller is an admin, so nothing is refused.

A run belongs to its first writer. Ids that can be guessed (of a loop's, a batch's or imported runs)
are closed to keys of role `use`, which could otherwise write first. Such a key may describe its own
runs. It may not claim that a run is a loop's, imported, or on a held-out task: these claims alone
decide on training data. Called by model_calls/answer.py and routes/; read next: http/auth.py.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable

from starlette.requests import Request

from cray_agents.errors import AccessDenied, NotFound
from cray_agents.records import Run
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import Caller, caller_of
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.index import RunFacts

ON_BEHALF_OF = "x-on-behalf-of"  # header with the id of the key that the batch worker acts for
PIECE = 1000  # runs that are looked at in one go
MAX_CACHED = 100_000  # runs whose owner is in memory
#: Run ids as rollouts, runtime/batches and runtime/imports derive them.
DERIVED_ID = re.compile(r"run_[0-9a-f]{24}(-retry\d+)?|batch_.*|imported-.*")


def owner_of(request: Request) -> str:
    """Return the owner of records that a request makes: its key, or the key an admin acts for."""
    caller = caller_of(request)
    if caller.role is Role.admin:
        return request.headers.get(ON_BEHALF_OF, caller.key_id)
    return caller.key_id


def check_owner(caller: Caller, owner: str, what: str) -> None:
    """Raise AccessDenied if the caller may not change records of this owner."""
    if caller.role is not Role.admin and caller.key_id != owner:
        raise AccessDenied(
            f"{what} was made with another API key: only that key, or one of role 'admin', "
            "changes it",
            status=403,
            code="not_the_owner",
        )


def check_claims(caller: Caller, run: Run, at: str) -> None:
    """Raise AccessDenied if a run's description makes claims that need the role `train`."""
    if caller.role >= Role.train:
        return
    held_out = run.task is not None and run.task.split != "train"
    claims = (("loop", run.loop is not None), ("imported", run.imported is not None),
              ("task.split", held_out))  # fmt: skip
    for name, claimed in claims:
        if claimed:
            raise AccessDenied(
                f"{at}.{name}: a key of role {caller.role.name!r} describes runs of its own, on no "
                "held-out task; this decides what is trained on, and needs 'train'",
                status=403,
                code="insufficient_permissions",
                param=f"{at}.{name}",
            )


class RunOwners:
    """The owners of runs. One per gateway, for use on its event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: OrderedDict[str, str] = OrderedDict()  # by run, also of runs just beginning

    async def check_call(self, caller: Caller, run_id: str) -> None:
        """Raise AccessDenied if a caller may not add a call to the run of this id.

        A new run belongs to the caller from now on, before its first call is recorded.
        """
        if caller.role is not Role.admin:
            if run_id not in self._cache:
                facts = await asyncio.to_thread(self._facts, [run_id])
                self._cache_owner(caller, run_id, facts[run_id])
            check_owner(caller, self._cache[run_id], f"run {run_id!r}")

    async def owners(
        self, caller: Caller, described: Iterable[str], rewarded: Iterable[str]
    ) -> dict[str, str]:
        """Return the owner of each run that events describe or reward.

        Raises AccessDenied if the caller is not the owner, or describes a run that a loop has
        taken over. Raises NotFound for a reward of an unknown run.
        """
        described, rewarded = set(described), set(rewarded)
        run_ids = sorted(described | rewarded)
        facts = await asyncio.to_thread(self._facts, run_ids)
        owners: dict[str, str] = {}
        for number, run_id in enumerate(run_ids):
            if number % PIECE == PIECE - 1:
                await asyncio.sleep(0)  # others are served
            known = facts[run_id]
            if caller.role is Role.admin:
                owners[run_id] = known.owner if known is not None else caller.key_id
                continue
            if known is None and run_id not in described:
                raise NotFound(f"no run {run_id!r} is recorded: tell of it first", param="run_id")
            owners[run_id] = self._cache_owner(caller, run_id, known)
            check_owner(caller, owners[run_id], f"run {run_id!r}")
            loop = None if known is None else known.loop
            if loop is not None and run_id in described and caller.role < Role.train:
                raise AccessDenied(
                    f"run {run_id!r} is of loop {loop!r} now, and is not described again; it may "
                    "still be rewarded",
                    status=403,
                    code="not_the_owner",
                )
        return owners

    def _facts(self, run_ids: list[str]) -> dict[str, RunFacts | None]:
        self._store.refresh()
        return {run_id: self._store.index.run(run_id) for run_id in run_ids}

    def _cache_owner(self, caller: Caller, run_id: str, known: RunFacts | None) -> str:
        """Return a run's owner and remember it. An unknown run becomes the caller's.

        Raises AccessDenied if the caller may not begin a run of this id.
        """
        if known is not None:
            owner = known.owner
        elif run_id in self._cache:
            owner = self._cache[run_id]
        elif caller.role < Role.train and DERIVED_ID.fullmatch(run_id):
            raise AccessDenied(
                f"{run_id!r} is a name as loops, batches and imports give: choose another, or use "
                "the key that begins that run",
                status=403,
                code="not_the_owner",
            )
        else:
            owner = caller.key_id
        self._cache[run_id] = owner
        self._cache.move_to_end(run_id)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return owner
