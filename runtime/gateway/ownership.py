"""Whose a run, a file, an upload or a batch is: the API key's that made it. Reading is everybody's.

A record keeps the id of that key as its `owner`. Who may change it: a request with that key, or an
admin's. An owner that no key has ("") is this host itself: what was made while there were no keys,
by the platform's commands, or before owners were kept; only admins change it. Without keys
everybody is an admin, so nothing is refused.

A run is its first writer's, who must not be able to come before the rightful one: ids that follow
from what is known to others (a loop's runs, a batch's, imported ones) are not given to keys of role
`use`. What such a key tells of its run is taken, but it makes no run a loop's, an imported one, or
one on a held-out task: these are training data, or decide what is, by nothing but a claim.
Called by answers.py and routes/; read next: auth.py, who calls.
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

ON_BEHALF_OF = "x-on-behalf-of"  # of the key of this id the batch worker asks
MOST = 100_000  # runs whose owner is remembered
#: As rollouts.py, batches/asking.py and imports/making.py name runs.
DERIVED = re.compile(r"run_[0-9a-f]{24}(-retry\d+)?|batch_.*|imported-.*")


def owner_of(request: Request) -> str:
    """The owner of what a request makes: the id of its key; an admin may make it for another."""
    caller = caller_of(request)
    if caller.role is Role.admin:
        return request.headers.get(ON_BEHALF_OF, caller.key_id)
    return caller.key_id


def check_owner(caller: Caller, owner: str, what: str) -> None:
    """Raise AccessDenied where the caller may not change what this owner made."""
    if caller.role is not Role.admin and caller.key_id != owner:
        raise AccessDenied(
            f"{what} was made with another API key: only that key, or one of role 'admin', "
            "changes it",
            status=403,
            code="not_the_owner",
        )


def check_claims(caller: Caller, run: Run, at: str) -> None:
    """Raise AccessDenied where a description claims what only who may train can say."""
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
    """Whose the runs are. One for a gateway; asked on its event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, str] = OrderedDict()  # by run; also those being begun

    async def check_call(self, caller: Caller, run_id: str) -> None:
        """Raise AccessDenied where a caller may not add a call to the run of this id.

        The first to ask has it, from now on and not when its call is recorded.
        """
        if caller.role is not Role.admin:
            if run_id not in self._known:
                await self._look_up(caller, run_id)
            check_owner(caller, self._known[run_id], f"run {run_id!r}")

    async def owners(
        self, caller: Caller, described: Iterable[str], rewarded: Iterable[str]
    ) -> dict[str, str]:
        """The owner of each run that events describe or reward.

        Raises AccessDenied where it is not the caller, who also gives no run another description
        once a loop has taken it; and NotFound for a reward of a run that is not there.
        """
        described, rewarded = set(described), set(rewarded)
        wanted = sorted(described | rewarded)
        facts = await asyncio.to_thread(self._facts, wanted)
        found: dict[str, str] = {}
        for run_id in wanted:
            known = facts[run_id]
            if caller.role is Role.admin:
                found[run_id] = known.owner if known is not None else caller.key_id
                continue
            if known is None and run_id not in described:
                raise NotFound(f"no run {run_id!r} is recorded: tell of it first", param="run_id")
            found[run_id] = self._claimed(caller, run_id, known)
            check_owner(caller, found[run_id], f"run {run_id!r}")
            if run_id in described and known is not None and known.loop is not None:
                _check_free(caller, known)
        return found

    async def _look_up(self, caller: Caller, run_id: str) -> None:
        facts = await asyncio.to_thread(self._facts, [run_id])
        self._claimed(caller, run_id, facts[run_id])

    def _facts(self, run_ids: list[str]) -> dict[str, RunFacts | None]:
        self._store.refresh()
        return {run_id: self._store.index.run(run_id) for run_id in run_ids}

    def _claimed(self, caller: Caller, run_id: str, known: RunFacts | None) -> str:
        """The run's owner; of one that is not there, the caller, if the name may be its own."""
        if known is not None:
            owner = known.owner
        elif run_id in self._known:
            owner = self._known[run_id]
        elif caller.role < Role.train and DERIVED.fullmatch(run_id):
            raise AccessDenied(
                f"{run_id!r} is a name as loops, batches and imports give: choose another, or use "
                "the key that begins that run",
                status=403,
                code="not_the_owner",
            )
        else:
            owner = caller.key_id
        self._known[run_id] = owner
        self._known.move_to_end(run_id)
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        return owner


def _check_free(caller: Caller, known: RunFacts) -> None:
    """Raise AccessDenied for another description of a run that a loop has taken over."""
    if caller.role < Role.train:
        raise AccessDenied(
            f"run {known.run_id!r} is of loop {known.loop!r} now, and is not described again; it "
            "may still be rewarded",
            status=403,
            code="not_the_owner",
        )
