"""Held: a version as a replica holds it, with where its weights are and how it is proven.

pool.py makes one of what it is given; seat.py loads and proves it. Read next: proof.py; and
adapters.py, which loads what is held beside it.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from cray_agents.errors import Corrupt, SwapError
from cray_agents.records import ProbePrompt
from cray_agents.runtime.pool.golden_probe import same_shape, was_trained
from cray_agents.runtime.registry.checkpoints import MANIFEST, verify


@dataclass(frozen=True)
class LoadedVersion:
    """A version, where its weights are, how to prove it, and the adapters served over it."""

    version: str
    checkpoint: Path
    probe: tuple[ProbePrompt, ...]
    beside: tuple["LoadedVersion", ...] = ()

    @property
    def versions(self) -> list[str]:
        """All that it answers with."""
        return [self.version, *(held.version for held in self.beside)]

    @classmethod
    def of(cls, checkpoint: Path, version: str, probe: list[ProbePrompt]) -> "LoadedVersion":
        """Raises SwapError where a training job made the weights and there is no probe of them."""
        if not probe and was_trained(checkpoint):
            raise SwapError(
                f"{version} was made by a training job and brings no golden probe: it cannot "
                f"be proven. Train it again, or look at {checkpoint / 'manifest.json'}"
            )
        return cls(version, checkpoint, tuple(probe))

    @classmethod
    async def proven(
        cls, checkpoint: Path, version: str, probe: list[ProbePrompt]
    ) -> "LoadedVersion":
        """The same, once its files are what its manifest says: read once a process.

        Raises SwapError, which names the damaged file.
        """
        if (checkpoint / MANIFEST).is_file():
            try:
                await asyncio.to_thread(verify, checkpoint)
            except (Corrupt, OSError) as error:
                raise SwapError(f"{version} was not loaded: {error}") from error
        return cls.of(checkpoint, version, probe)

    def fits(self, new: "LoadedVersion") -> bool:
        """Whether `new` can take its place in a running process. Raises SwapError."""
        try:
            return same_shape(self.checkpoint, new.checkpoint)
        except (Corrupt, OSError) as error:
            raise SwapError(f"{new.version} was not loaded: {error}") from error
