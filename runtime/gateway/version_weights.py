"""Version weights: the directories that a version's weights are loaded from, whole.

A delta checkpoint is rebuilt: on the shared root before its promotion, else in this host's cache.
Called by version_switch.py.
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from cray_agents.errors import CrayError, SwapError
from cray_agents.paths import Home, host_cache
from cray_agents.records import ModelVersion, ProbePrompt
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.deltas import Shadows, materialize


class VersionWeights:
    """Whole directories of versions' weights. `in_use`: returns those that replicas hold."""

    def __init__(self, home: Home, in_use: Callable[[], set[Path]]) -> None:
        self._home = home
        self._in_use = in_use
        self._shadow_lock = threading.Lock()  # of the threads that make shadows
        self._shadows: Shadows | None = None  # made for the first delta checkpoint

    async def close(self) -> None:
        """Remove what was rebuilt in this host's cache."""
        if self._shadows is not None:
            await asyncio.to_thread(self._shadows.remove)

    async def make_whole(self, version: ModelVersion) -> None:
        """Rebuild a delta checkpoint's weights on the shared root. Raises NotFound, Corrupt."""
        directory = self._home.checkpoint(version.checkpoint)
        await asyncio.to_thread(materialize, self._home, directory)

    async def directory_and_probe(self, version: ModelVersion) -> tuple[Path, list[ProbePrompt]]:
        """Return a whole directory of a version's weights, and their golden probe.

        Raises SwapError where a delta checkpoint cannot be made whole.
        """
        directory = self._home.checkpoint(version.checkpoint)
        manifest = await asyncio.to_thread(checkpoints.read_manifest, directory)
        if manifest.delta is not None:
            directory = await asyncio.to_thread(self._shadow, version, directory)
        return directory, manifest.probe

    def _shadow(self, version: ModelVersion, directory: Path) -> Path:
        with self._shadow_lock:
            try:
                if self._shadows is None:
                    self._shadows = Shadows(self._home, host_cache() / "shadows")
                shadow = self._shadows.directory(directory)
            except (CrayError, OSError) as error:
                raise SwapError(f"{version.id} was not loaded: {error}") from error
            self._shadows.sweep({shadow, *self._in_use()})
            return shadow
