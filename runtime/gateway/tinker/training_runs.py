"""Training runs of Tinker's scripts: their models, saved weights and samplers, as files.

A model is a job by commands. Its requests are numbered as the job's commands are, so that a future
is named by its request and found again after any crash. Weights that a script saves are a command
that published them. Where nothing was learned since, they are those published before. Every file is
written once and never changes, so a name that a script was given means the same weights for ever.
Only the name of weights that could not be written, as on a full disk, is free again.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.gateway.http.fields import ID
from cray_agents.training_commands import CommandResult

SCHEME = "tinker://"
Kind = TypeVar("Kind", bound=Record)
#: The result of a model's command by its number; None for one that has none yet.
ResultOf = Callable[[int], CommandResult | None]

BASE = 0  # as `published_by`: the model's base, which was not trained yet

#: The folder of weights, and their part of a path: to train on from, or to sample from.
SavedKind = Literal["weights", "sampler_weights"]
KINDS: tuple[SavedKind, ...] = ("weights", "sampler_weights")


class TinkerModel(Record):
    """A model that a script trains. `base` is the version `name@N` that it began from.

    `base_model` is the name that the script gave. `rank` is the adapter's; None: all weights.
    `owner` is the id of the API key that made it.
    """

    id: str
    job: str
    base: str
    base_model: str
    rank: int | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    created: float = Field(default_factory=time.time)
    owner: str = ""


class SavedWeights(Record):
    """Weights that a script saved with its request `sequence`.

    `published_by` is the command that wrote them. An ephemeral save is without a `name` and has the
    `sampler` that it was made for.
    """

    model: str
    kind: SavedKind
    sequence: int
    published_by: int
    name: str
    sampler: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    created: float = Field(default_factory=time.time)

    @property
    def path(self) -> str:
        """The name by which scripts refer to the weights."""
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


class Sampler(Record):
    """A version `name@N` that a script samples from; `owner` is its API key's id."""

    id: str
    version: str
    base_model: str
    path: str | None = None
    owner: str = ""


def name_of_sampler(session_id: str, sequence: int) -> str:
    """Return the id of the sampler that a session makes with a request. Raises BadInput."""
    return _name(f"{session_id}:sample:{sequence}")


def name_of_model(session_id: str, sequence: int) -> str:
    """Return the id of a session's model, as the client knows it. Raises BadInput."""
    return _name(f"{session_id}:train:{sequence}")


def session_of(model_id: str) -> str:
    """Return the session of a model."""
    return model_id.rpartition(":train:")[0]


def _name(name: str) -> str:
    if not ID.fullmatch(name):
        raise BadInput(f"{name[:200]!r} names no session", param="session_id")
    return name


class TinkerFiles:
    """The files below `tinker/` in the home. One process at a time has them."""

    def __init__(self, home: Home) -> None:
        self._folder = home.tinker
        self._replacing = threading.Lock()

    # ---- models
    def add_model(self, model: TinkerModel) -> TinkerModel:
        """Record a model, or return the one of its id."""
        _create(self._model(model.id) / "model.json", model)
        return self.model(model.id)

    def model(self, model_id: str) -> TinkerModel:
        """Return a model. Raises NotFound."""
        return _read(
            TinkerModel, self._model(model_id) / "model.json", f"no model {model_id!r}", "model_id"
        )

    def models(self) -> checksums.Listing[TinkerModel]:
        """Return all models, newest first."""
        names = (path.parent.name for path in (self._folder / "models").glob("*/model.json"))
        listing = checksums.list_whole(names, self.model)
        models = sorted(listing.rows, key=lambda model: model.created, reverse=True)
        return checksums.Listing(models, listing.damaged)

    # ---- requests
    def note_step(self, model_id: str, sequence: int) -> None:
        """Note that a request changes the model's weights."""
        durable.create_file(
            self._model(model_id) / "steps" / f"{sequence}.json", checksums.with_crc(b"{}")
        )

    def add_saved(
        self,
        model_id: str,
        kind: SavedKind,
        sequence: int,
        name: str = "",
        *,
        result_of: ResultOf,
        sampler: str = "",
        metadata: dict[str, Any] | None = None,
    ) -> SavedWeights:
        """Record that a request saves weights; the same request again finds the same record.

        Raises BadInput for a name that another request has taken, unless that one failed.
        """
        name = name or f"ephemeral-{sequence}"
        if not ID.fullmatch(name):
            raise BadInput(
                f"{name[:200]!r} cannot name weights: letters, digits and '._:@-', at most 200",
                param="path",
            )
        existing = self._saved_of(model_id, kind, sequence)
        if existing is None:
            saved = SavedWeights(
                model=model_id,
                kind=kind,
                sequence=sequence,
                published_by=self._publisher(model_id, sequence, result_of),
                name=name,
                sampler=sampler,
                metadata=metadata or {},
            )
            path = self._saved(saved)
            with self._replacing:
                if not _create(path, saved) and _is_lost(_read_saved(path), result_of):
                    durable.replace_file(path, checksums.record_text(saved))
            existing = _read_saved(path)
        if existing.sequence != sequence or existing.name != name:
            raise BadInput(
                f"{existing.path} was saved by request {existing.sequence}: saved weights never"
                " change, so give others another name",
                param="path",
            )
        return existing

    def saved(self, path: str) -> SavedWeights:
        """Return the weights at a path `tinker://MODEL/weights/NAME`. Raises BadInput, NotFound."""
        names = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(names) != 3 or names[1] not in KINDS:
            raise BadInput(
                f"{path[:200]!r} is no path of weights: {SCHEME}MODEL/weights/NAME or"
                f" {SCHEME}MODEL/sampler_weights/NAME",
                param="path",
            )
        model_id, kind, name = names
        missing = f"no weights at {path[:200]!r}"
        if not ID.fullmatch(name):
            raise NotFound(missing, param="path")
        return _read(SavedWeights, self._model(model_id) / kind / f"{name}.json", missing, "path")

    def list_saved(self, model_id: str) -> checksums.Listing[SavedWeights]:
        """Return the weights that were saved of a model, oldest first. Raises NotFound."""
        folder = self._model(model_id)
        names = [f"{kind}/{path.stem}" for kind in KINDS for path in folder.glob(f"{kind}/*.json")]
        listing = checksums.list_whole(names, lambda name: _read_saved(folder / f"{name}.json"))
        saved = sorted(listing.rows, key=lambda saved: saved.sequence)
        return checksums.Listing(saved, listing.damaged)

    def all_saved(self, model_id: str) -> list[SavedWeights]:
        """Return the same, for decisions that need them all. Raises NotFound, Corrupt."""
        listing = self.list_saved(model_id)
        if listing.damaged:
            raise Corrupt(listing.damaged[0]["reason"])
        return listing.rows

    def _saved_of(self, model_id: str, kind: SavedKind, sequence: int) -> SavedWeights | None:
        same = (s for s in self.all_saved(model_id) if (s.kind, s.sequence) == (kind, sequence))
        return next(same, None)

    def _publisher(self, model_id: str, sequence: int, result_of: ResultOf) -> int:
        """Return the command that writes the weights as they are before a request.

        That is the request itself, unless nothing was learned since an earlier one wrote them, or
        will do so.
        """
        folder = self._model(model_id) / "steps"
        steps = [int(path.stem) for path in folder.glob("*.json")]
        last_step = max((step for step in steps if step < sequence), default=BASE)
        if last_step == BASE:
            return BASE
        published = {s.published_by for s in self.all_saved(model_id) if s.sequence < sequence}
        later = sorted((p for p in published if p > last_step), reverse=True)
        return next((p for p in later if _may_have_written(result_of(p))), sequence)

    # ---- samplers
    def add_sampler(self, sampler: Sampler) -> Sampler:
        """Record a sampler, or return the one of its id. Raises BadInput if that is another."""
        path = self._sampler(sampler.id)
        _create(path, sampler)
        existing = checksums.read_record(Sampler, path)
        if existing.version != sampler.version:
            raise BadInput(
                f"the sampler {sampler.id} is one of {existing.version} already",
                param="sampling_session_seq_id",
            )
        return existing

    def sampler(self, sampler_id: str) -> Sampler:
        """Return a sampler. Raises NotFound."""
        return _read(
            Sampler, self._sampler(sampler_id), f"no sampler {sampler_id!r}", "sampling_session_id"
        )

    # ---- paths
    def _model(self, model_id: str) -> Path:
        if not ID.fullmatch(model_id):
            raise NotFound(f"no model {model_id[:200]!r}", param="model_id")
        return self._folder / "models" / model_id

    def _saved(self, saved: SavedWeights) -> Path:
        return self._model(saved.model) / saved.kind / f"{saved.name}.json"

    def _sampler(self, sampler_id: str) -> Path:
        if not ID.fullmatch(sampler_id):
            raise NotFound(f"no sampler {sampler_id[:200]!r}", param="sampling_session_id")
        return self._folder / "samplers" / f"{sampler_id}.json"


def _is_lost(saved: SavedWeights, result_of: ResultOf) -> bool:
    """Return True for weights that a request could not write: nobody was told of them."""
    own = result_of(saved.sequence)
    if own is not None and own.error is not None:
        return True
    return saved.published_by != BASE and not _may_have_written(result_of(saved.published_by))


def _may_have_written(result: CommandResult | None) -> bool:
    return result is None or result.checkpoint is not None


def _create(path: Path, record: Record) -> bool:
    return durable.create_file(path, checksums.record_text(record))


def _read_saved(path: Path) -> SavedWeights:
    return checksums.read_record(SavedWeights, path)


def _read(kind: type[Kind], path: Path, missing: str, param: str) -> Kind:
    try:
        return checksums.read_record(kind, path)
    except FileNotFoundError:
        raise NotFound(missing, param=param) from None
