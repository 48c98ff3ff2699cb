"""Names for weights: `name@N` is one immutable set of them, `name` alone the promoted one.

History is append-only: a version or promotion is a small file that is created exclusively and never
changed. Called by the gateway, for each chat request too: answers come from memory, and the
directories are read again when they were last read a second ago.
"""

import re
import time
from pathlib import Path
from typing import TypeVar

import orjson
from pydantic import Field

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest, ModelVersion, Record
from cray_agents.runtime import checkpoints, durable

FRESH_SECONDS = 1.0  # how long another process's promotion may stay unseen
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NUMBER = re.compile(r"[1-9][0-9]{0,8}")  # of a version, as it is written

Numbered = TypeVar("Numbered", bound=Record)


class Promotion(Record):
    """From `time` on the bare `name` means `version`; `number` counts a name's promotions."""

    name: str
    number: int
    version: int
    who: str = ""
    reason: str = ""
    time: float = Field(default_factory=time.time)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, or not ours to look at
        return False


class _Model:
    """One name's history as it was read at `read_at` (monotonic seconds)."""

    def __init__(self, versions: dict[int, ModelVersion], promotions: dict[int, Promotion]) -> None:
        self.versions = versions
        self.promotions = promotions
        self.read_at = time.monotonic()


class Registry:
    """The versions and promotions under one home."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._models: dict[str, _Model] = {}

    def names(self) -> list[str]:
        """Every name that has a version."""
        if not self.home.models.is_dir():
            return []
        return sorted(p.name for p in self.home.models.iterdir() if NAME.fullmatch(p.name))

    def versions(self, name: str) -> list[ModelVersion]:
        """A name's versions, oldest first. Raises NotFound."""
        model = self._model(name)
        return [model.versions[number] for number in sorted(model.versions)]

    def promotions(self, name: str) -> list[Promotion]:
        """A name's promotions, oldest first. Raises NotFound."""
        model = self._model(name)
        return [model.promotions[number] for number in sorted(model.promotions)]

    def promoted(self, name: str) -> ModelVersion | None:
        """The version that the bare name means; None before the first promotion."""
        model = self._model(name)
        if not model.promotions:
            return None
        return model.versions[model.promotions[max(model.promotions)].version]

    def resolve(self, model: str) -> ModelVersion:
        """The version that `name` or `name@N` means. Raises NotFound, code `model_not_found`."""
        name, at, number = model.partition("@")
        if not at:
            version = self.promoted(name)
            if version is None:
                raise _unknown(model, f"no version of {name!r} is promoted yet")
            return version
        versions = self._model(name).versions
        if not NUMBER.fullmatch(number) or int(number) not in versions:
            have = ", ".join(f"{name}@{n}" for n in sorted(versions))
            raise _unknown(model, f"there is {have}")
        return versions[int(number)]

    def register(self, name: str, checkpoint_id: str, manifest: Manifest) -> ModelVersion:
        """The name's version with these weights; a new one unless there is one. Raises BadInput."""
        if not NAME.fullmatch(name):
            raise BadInput(
                f"{name!r} cannot name a model: use letters, digits, '.', '_' and '-'", param="name"
            )
        while True:
            versions = self._read(name).versions
            for version in versions.values():
                same = version.weights_sha256 == manifest.weights_sha256
                if same and version.checkpoint == checkpoint_id:
                    return version
            version = ModelVersion(
                name=name,
                number=max(versions, default=0) + 1,
                checkpoint=checkpoint_id,
                weights_sha256=manifest.weights_sha256,
                job=manifest.job,
            )
            if _create(self.home.models / name / f"{version.number}.json", version):
                self._read(name)
                return version

    def promote(self, name: str, number: int, *, who: str = "", reason: str = "") -> Promotion:
        """Let the bare name mean a version; the last promotion again if it means it already."""
        while True:
            model = self._read(name)
            if number not in model.versions:
                raise _unknown(f"{name}@{number}", f"{name!r} has {len(model.versions)} version(s)")
            last = max(model.promotions, default=0)
            if last and model.promotions[last].version == number:
                return model.promotions[last]
            promotion = Promotion(
                name=name, number=last + 1, version=number, who=who, reason=reason
            )
            path = self.home.models / name / "promotions" / f"{promotion.number}.json"
            if _create(path, promotion):
                self._read(name)
                return promotion

    def import_checkpoint(self, checkpoint: str | Path) -> tuple[str, Manifest]:
        """Take a checkpoint (a directory, or an id under the home) in, and prove it whole.

        Returns its id and manifest. Raises NotFound, BadInput (no safetensors), Corrupt.
        """
        return checkpoints.take_in(self.home, self.directory(str(checkpoint)))

    def directory(self, reference: str) -> Path:
        """Where a checkpoint lies: by directory, checkpoint id, `name@N` or `name`.

        Raises NotFound.
        """
        if NAME.fullmatch(reference) and self.home.checkpoint(reference).is_dir():
            return self.home.checkpoint(reference)
        path = Path(reference)
        if path.is_absolute() and _is_directory(path):
            return path
        if NAME.fullmatch(reference.partition("@")[0]):
            return self.home.checkpoint(self.resolve(reference).checkpoint)
        raise NotFound(f"no checkpoint at {reference!r}", param="checkpoint")

    def _model(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None or time.monotonic() - model.read_at > FRESH_SECONDS:
            model = self._read(name)
        if not model.versions:
            raise _unknown(name, f"there is {', '.join(self.names()) or 'none yet'}")
        return model

    def _read(self, name: str) -> _Model:
        if not NAME.fullmatch(name):
            return _Model({}, {})
        old = self._models.get(name)
        folder = self.home.models / name
        # promotions first: every version that they name is then there to be read
        promotions = _numbered(folder / "promotions", Promotion, old.promotions if old else {})
        model = _Model(_numbered(folder, ModelVersion, old.versions if old else {}), promotions)
        if model.versions:  # names that somebody guessed are not kept
            self._models[name] = model
        return model


def _numbered(
    folder: Path, kind: type[Numbered], known: dict[int, Numbered]
) -> dict[int, Numbered]:
    """The records `<n>.json` of a folder; what is known already is not read again."""
    if not folder.is_dir():
        return {}
    found = dict(known)
    for path in folder.glob("[0-9]*.json"):
        if path.stem.isdecimal() and int(path.stem) not in found:
            try:
                found[int(path.stem)] = kind.model_validate(orjson.loads(path.read_bytes()))
            except ValueError as error:
                raise Corrupt(f"{path} cannot be read: {error}") from error
    return found


def _create(path: Path, record: Record) -> bool:
    return durable.create_file(path, orjson.dumps(record.model_dump(mode="json")) + b"\n")


def _unknown(model: str, hint: str) -> NotFound:
    return NotFound(
        f"the model {model!r} does not exist: {hint}", param="model", code="model_not_found"
    )
