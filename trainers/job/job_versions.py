"""Versions of a job: its weights, published as `name@N` in the background while it trains.

The ranks copy and probe the weights between two steps. A thread of each then writes its share, as
of a resume point, and rank 0's thread publishes and registers the whole. A version that could not
be written is a warning, and the job goes on. Called by rank.py. Read next:
checkpointing/hf_export.py.
"""

import re
import shutil
import time
from collections.abc import Callable
from typing import Any

from cray_agents.errors import CrayError
from cray_agents.records import LogprobDistance
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.checkpointing import hf_export
from cray_agents.trainers.checkpointing.save import BackgroundFiles, FileSet
from cray_agents.trainers.job.job_inputs import JobInputs
from cray_agents.trainers.job.master_weights import warn
from cray_agents.trainers.training.parallel_groups import broadcast_from_rank0, is_rank0
from cray_agents.trainers.training.train_step import RankTraining


class JobVersions:
    """The versions that one attempt publishes, if the job has `publish_every`. Collective.

    What a killed attempt published counts, and is told of.
    """

    def __init__(
        self, training: RankTraining, work: JobInputs, agreement: LogprobDistance | None
    ) -> None:
        self._training, self._work, self._agreement = training, work, agreement
        self._every, self._home = work.spec.publish_every, work.journal.home
        self._begun = time.monotonic()
        self._files: BackgroundFiles | None = None
        self._published: set[int] = set()  # steps, with those that could not be written
        self._step = -1  # of the version in flight
        if self._every is not None:
            self._files = BackgroundFiles(f"version/{work.spec.id}/{work.attempt}")
            self._published = set(broadcast_from_rank0(self._find() if is_rank0() else None))

    def publish_if_due(self, totals: Callable[[], dict[str, Any]]) -> None:
        """Begin to publish the present weights, if it is time; tell of the version before.

        `totals` returns those of a manifest. Waits while the version before is still being written.
        Raises Stopped.
        """
        if self._files is None:
            return
        if self._files.done:
            self.settle()
        training, spec, attempt = self._training, self._work.spec, self._work.attempt
        step = training.done
        if step in self._published or not self._is_due(step):
            return
        self.settle()
        begun, name = time.monotonic(), self._name(step)
        draft = self._home.checkpoint(f".{name}.{attempt}")
        training.finish()
        agreement = self._agreement if spec.hyperparameters.dtype == "bfloat16" else None
        prompts, metrics = hf_export.probe_prompts(self._work.samples), {**totals(), "steps": step}

        def aside(
            write: Callable[[], dict[str, str]], finish: Callable[[dict[str, str]], str]
        ) -> None:
            def publish(hashes: dict[str, str]) -> bool:
                if self._work.journal.fenced(attempt) is not None:
                    shutil.rmtree(draft)
                    return False
                finish(hashes)
                return True

            assert self._files is not None
            self._files.start(FileSet(f"the version of step {step}", draft, write, publish), begun)

        about = (spec, prompts, metrics, agreement, self._home, draft, self._home.checkpoint(name))
        hf_export.publish(training, *about, aside=aside)
        self._published.add(step)
        self._step, self._begun = step, begun

    def settle(self) -> None:
        """Wait until the version in flight is published, and tell of it."""
        end = None if self._files is None else self._files.settle()
        if end is None or not is_rank0():
            return
        if end.problem:
            warn(self._work.journal, f"{end.problem}; the job goes on without this version")
        elif end.published:
            self._tell(self._step, end.seconds)

    def close(self) -> None:
        """Let the writing thread end."""
        if self._files is not None:
            self._files.close()

    def _is_due(self, step: int) -> bool:
        every = self._every
        if every is None or step in (0, self._work.spec.hyperparameters.steps):
            return False
        if every.steps is not None:
            return step % every.steps == 0
        minutes = (time.monotonic() - self._begun) / 60
        return bool(broadcast_from_rank0(minutes >= (every.minutes or 0)))

    def _name(self, step: int) -> str:
        return f"{self._work.spec.id}-{step}"

    def _find(self) -> list[int]:
        """Return the steps whose versions exist already, and tell of those that nobody told of."""
        told = {version.step for version in self._work.journal.versions}
        pattern = re.compile(rf"{re.escape(self._work.spec.id)}-([0-9]+)")
        names = durable.names_in(self._home.checkpoint("x").parent)
        steps = sorted(int(found[1]) for name in names if (found := pattern.fullmatch(name)))
        for step in steps:
            if step not in told:
                self._tell(step)
        return steps

    def _tell(self, step: int, seconds: float = 0.0) -> None:
        """Register a published checkpoint as a version, unless it is one, and write its event."""
        assert self._every is not None
        name, every = self._name(step), self._every
        try:
            manifest = checkpoints.read_manifest(self._home.checkpoint(name))
            registry = Registry(self._home)
            version = registry.register(every.name, name, manifest, every.prompts)
        except (OSError, CrayError) as problem:  # such as a full disk, or one that was removed
            warn(self._work.journal, f"{name} is no version: {problem}")
            return
        about = {"version": version.id, "checkpoint": name, "step": step, "seconds": seconds}
        losses = {"loss": "loss_last", "validation_loss": "validation_loss"}
        about |= {field: manifest.metrics.get(metric) for field, metric in losses.items()}
        self._work.journal.event("version", **about)
