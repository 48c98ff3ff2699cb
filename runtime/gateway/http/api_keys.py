"""API keys: made and revoked under the shared root, checked by the gateway for each request.

A key has up to two files, neither of which ever changes. `keys/<id>.json` holds its name and role.
`keys/<id>.revoked`, once it exists, ends the key. Only the SHA-256 of the secret is stored. A
password would need a slow, salted hash, because people choose guessable ones. A secret here is 256
random bits, which nobody can guess.

`cray-agents keys` (cli/keys.py) makes them; auth.py calls `check`.
"""

import logging
import re
import secrets
import time
from collections.abc import Iterator, Sequence, Set
from enum import IntEnum
from pathlib import Path

import orjson
from pydantic import Field, field_serializer, field_validator

from cray_agents.errors import BadInput, Corrupt, NotFound, StoreError
from cray_agents.paths import Home
from cray_agents.records import Record, new_id
from cray_agents.runtime.disk import checksums, durable

PREFIX = "sk-cray-"
PLATFORM_PREFIX = "sk-platform-"  # of a platform's own key, which is new for each of its processes
NO_KEY = "none"  # as a name: requests without a key
PLATFORM_ID = "platform"  # in the place of a key's id: the platform's own commands and processes
REFRESH_INTERVAL = 0.5  # until a key that another process made or revoked is noticed
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{40,200}}")
_RECORD = ".json"

log = logging.getLogger(__name__)


class Role(IntEnum):
    """The rights of a key; each role includes the ones before it."""

    use = 1  # call models; files, batches and trajectories
    train = 2  # ... datasets, jobs, fine-tuning, loops; register and stage versions
    admin = 3  # ... promote, the pool, everything else


class KeyRecord(Record):
    """A key without its secret."""

    id: str
    name: str
    role: Role
    sha256: str
    created: float = Field(default_factory=time.time)

    @field_validator("role", mode="before")
    @classmethod
    def _role(cls, value: object) -> object:
        return role_named(value) if isinstance(value, str) else value

    @field_serializer("role")
    def _role_name(self, role: Role) -> str:
        return role.name


def key_names(home: Home) -> dict[str, str]:
    """Return the name of every key that was ever made, by its id.

    "" is this host itself, and `platform` the platform's own processes, as loops of this host.
    """
    return {
        "": "",
        PLATFORM_ID: PLATFORM_ID,
        **{record.id: record.name for record, _ in Keys(home).list()},
    }


def id_of_key(id_or_name: str, names: dict[str, str]) -> str:
    """Return the id of a key: of this id, else the newest of this name. Raises NotFound.

    `none` is "", of requests without a key. `names`: as key_names returns them, oldest first.
    """
    if id_or_name in names:
        return id_or_name
    ids = [key for key, name in names.items() if name == id_or_name]
    if not ids and id_or_name == NO_KEY:
        return ""
    if not ids:
        raise NotFound(f"no key {id_or_name[:200]!r}; see `cray-agents keys list`", param="key")
    return ids[-1]


def role_named(name: str) -> Role:
    """Return the role of that name. Raises BadInput."""
    if name not in Role.__members__:
        raise BadInput(f"role {name!r} is not known; valid: {', '.join(Role.__members__)}")
    return Role[name]


class Keys:
    """The keys of one home, also those of other processes. Not for several threads at once."""

    def __init__(self, home: Home) -> None:
        self._folder = home.keys
        self._names: frozenset[str] = frozenset()  # of the files, as last seen
        self._live: dict[str, KeyRecord] = {}  # by the secret's hash
        self._read_at = float("-inf")

    def create(
        self, name: str, role: Role = Role.use, secret: str | None = None
    ) -> tuple[KeyRecord, str]:
        """Make a key. Return it and its secret, which is stored nowhere.

        `secret`: one that was made elsewhere, at random. Raises BadInput if it is too short, and
        for an invalid name, or one that a working key has.
        """
        if not NAME.fullmatch(name):
            raise BadInput(
                f"{name!r} cannot name a key: letters, digits and '._@-', at most 100", param="name"
            )
        if any(record.name == name and not ended for record, ended in self.list()):
            raise BadInput(f"there is a key {name!r}: revoke it, or choose another", param="name")
        secret = PREFIX + secrets.token_urlsafe(32) if secret is None else secret
        if not SECRET.fullmatch(secret):
            raise BadInput(
                f"a secret is {PREFIX} and 40 random letters, digits, '_' or '-', or more",
                param="secret_file",
            )
        record = KeyRecord(id=new_id("key"), name=name, role=role, sha256=_hash(secret))
        data = checksums.with_crc(orjson.dumps(record.model_dump(mode="json"))) + b"\n"
        if not durable.create_file(self._folder / f"{record.id}.json", data):
            raise StoreError(f"{self._folder / record.id}.json exists: try again")
        self._read_at = float("-inf")
        return record, secret

    def find(self, secret: str) -> tuple[KeyRecord, bool] | None:
        """Return the key that was made with this secret, and whether it was revoked."""
        return next((pair for pair in self.list() if pair[0].sha256 == _hash(secret)), None)

    def revoke(self, id_or_name: str) -> Sequence[KeyRecord]:
        """End the key of that id, or every key of that name, and return them; idempotent.

        Raises NotFound.
        """
        records = [record for record, _ in self.list() if id_or_name in (record.id, record.name)]
        if not records:
            raise NotFound(f"no key {id_or_name!r}; see `cray-agents keys list`", param="key")
        for record in records:
            when = checksums.with_crc(orjson.dumps({"time": time.time()})) + b"\n"
            durable.create_file(self._folder / f"{record.id}.revoked", when)
        self._read_at = float("-inf")
        return records

    def list(self) -> Sequence[tuple[KeyRecord, bool]]:
        """Return every key ever made, oldest first, and whether it was revoked."""
        names = self._listing()
        pairs = [(record, _revocation(record.id) in names) for record in self._records(names)]
        return sorted(pairs, key=lambda pair: pair[0].created)  # finer than the ids' milliseconds

    def damaged(self) -> Sequence[dict[str, str]]:
        """Return the ids of records that cannot be read, which are no keys, with the reasons."""
        names = sorted(name for name in self._listing() if name.endswith(_RECORD))
        return checksums.list_whole(names, lambda name: _read(self._folder / name)).damaged

    def check(self, secret: str) -> KeyRecord | None:
        """Return the working key with this secret, from memory no older than REFRESH_INTERVAL.

        The time this takes depends on the secret's hash at most, which does not reveal the secret.
        """
        self._refresh()
        return self._live.get(_hash(secret))

    @property
    def ever(self) -> bool:
        """A key was made here once, revoked since or not."""
        self._refresh()
        return any(name.endswith(_RECORD) for name in self._names)

    @property
    def working(self) -> bool:
        """At least one key works."""
        self._refresh()
        return bool(self._live)

    def _refresh(self) -> None:
        """Read the folder again if the last time is old. Files never change: names are enough.

        The folder's mtime would not do: two changes within its grain look like one.
        """
        now = time.monotonic()
        if now - self._read_at < REFRESH_INTERVAL:
            return
        names = self._listing()
        self._read_at = now
        if names != self._names:
            records = self._records({name for name in names if _revocation(name) not in names})
            self._live = {record.sha256: record for record in records}
            self._names = names

    def _records(self, names: Set[str]) -> Iterator[KeyRecord]:
        """Yield the records, oldest first; log one that cannot be read, which is no key."""
        known = {record.id: record for record in self._live.values()}
        for name in sorted(names):
            if name.endswith(_RECORD):
                try:
                    key_id = name.removesuffix(_RECORD)
                    yield known.get(key_id) or _read(self._folder / name)
                except Corrupt as error:
                    log.error("a key does not work: %s", error)

    def _listing(self) -> frozenset[str]:
        """Return the names of the files, without drafts of a crash, which begin with a dot."""
        try:
            return frozenset(p.name for p in self._folder.iterdir() if p.name[0] != ".")
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be read: {error.strerror}") from error


def _hash(secret: str) -> str:
    return durable.sha256(secret.encode(errors="replace"))


def _revocation(name: str) -> str:
    """Return the name of the file that ends the key of this id, or of this file."""
    return name.removesuffix(_RECORD) + ".revoked"


def _read(path: Path) -> KeyRecord:
    record = checksums.read_record(KeyRecord, path)
    if record.id != path.stem:  # so that a copy does not bring a revoked key back
        raise Corrupt(f"{path} holds the key {record.id!r}: it was renamed or copied")
    return record
