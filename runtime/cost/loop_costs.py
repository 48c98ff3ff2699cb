"""Loop costs: the training of each generation, and what it added to held-out success."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from cray_agents.errors import CrayError
from cray_agents.generation import Generation, promoted_holdout_success
from cray_agents.paths import Home
from cray_agents.records import ModelVersion
from cray_agents.runtime.cost.amount import Amount
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.views.generation_evidence import generation_records

POINT = 0.01  # a point of held-out success


class LoopStep(NamedTuple):
    """A loop and its generation; None: of no generation, as in live traffic."""

    loop: str
    generation: int | None


NO_LOOP = LoopStep("", None)


@dataclass
class LoopGains:
    """Held-out success of a loop: that of each generation's candidate, and what each one added."""

    success: dict[int, float] = field(default_factory=dict)
    gain: dict[int, float] = field(default_factory=dict)

    @property
    def whole_gain(self) -> float | None:
        """The promoted version's success less that of the first one; None without a generation."""
        return sum(self.gain.values()) if self.gain else None


def progress_of(records: list[Generation | None]) -> LoopGains:
    """Return the progress of a loop, by its records in order.

    A generation adds the success of the version that is promoted after it, less that of the one
    before; one whose candidate was rejected adds nothing.
    """
    done = [record for record in records if record is not None]
    progress = LoopGains()
    before: float | None = None
    for count, record in enumerate(done, 1):
        progress.success[record.generation] = record.holdout_success
        if not any(each.promoted for each in done[:count]):
            continue
        after = promoted_holdout_success(done[:count])
        progress.gain[record.generation] = 0.0 if before is None else after - before
        before = after
    return progress


def loops_of(home: Home) -> dict[str, list[Generation | None]]:
    """Return the records of every loop; None for a damaged one, which GET /v1/loops names."""
    folders = [path for path in home.loops.glob("*") if path.is_dir()]
    return {path.name: generation_records(path, []) for path in folders}


@dataclass
class LoopGenerations:
    """Generations of a loop, to find that of a job or a version.

    Runs that evaluate belong to versions, and name no generation. A version is of the generation
    whose candidate it was. One before the first generation's is of its warm-up, and so of
    generation 0. Any other is the candidate of the generation under way.
    """

    records: list[Generation | None]

    def of_version(self, version: str) -> int:
        """Return the generation of a version."""
        done = [record for record in self.records if record is not None]
        for record in done:
            if record.version == version:
                return record.generation
        name, number = _split(version)
        if done and name == _split(done[0].version)[0] and number < _split(done[0].version)[1]:
            return 0
        return len(self.records)

    def of_job(self, job: str) -> int | None:
        """Return the generation whose record names a job; None if no record does."""
        numbers = [r.generation for r in self.records if r is not None and r.job == job]
        return numbers[0] if numbers else None


def training_by_loop(
    home: Home, trained: dict[str, Amount], loops: dict[str, list[Generation | None]]
) -> dict[LoopStep, Amount]:
    """Return what jobs took by the loop and generation that they trained; ("", None): no loop's.

    A job is of the generation whose record names it, or of that of its version, if its session
    has the loop's name. Generation 0 may begin with a version that was trained elsewhere, so a job
    that only its record names is not its own.
    """
    amounts: dict[LoopStep, Amount] = defaultdict(Amount)
    versions: dict[str, str] | None = None
    for job, amount in trained.items():
        loop = _session_of(home, job)
        if loop not in loops:
            named = (
                (name, LoopGenerations(records).of_job(job)) for name, records in loops.items()
            )
            step = next((LoopStep(name, number) for name, number in named if number), NO_LOOP)
        else:
            generations = LoopGenerations(loops[loop])
            number = generations.of_job(job)
            if number is None:
                versions = _versions_by_job(home) if versions is None else versions
                number = generations.of_version(versions.get(job, ""))
            step = LoopStep(loop, number)
        amounts[step].add(amount)
    return amounts


def _versions_by_job(home: Home) -> dict[str, str]:
    """Return the first version that each job made."""
    versions: dict[str, str] = {}
    for path in sorted(home.models.glob("*/*.json"), key=lambda path: path.stem.zfill(9)):
        try:
            version = checksums.read_record(ModelVersion, path)
        except CrayError:
            continue  # the registry says so
        if version.job is not None:
            versions.setdefault(version.job, version.id)
    return versions


def _split(version: str) -> tuple[str, int]:
    """Return name and number of a version."""
    name, _, number = version.partition("@")
    return name, int(number) if number.isdecimal() else 0


def _session_of(home: Home, job: str) -> str:
    """Return the session that a job's spec names, which has its loop's name; "" without one."""
    try:
        return str(checksums.read_json(home.job(job) / "spec.json").get("session") or "")
    except (OSError, CrayError):
        return ""
