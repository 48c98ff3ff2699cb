"""A clock that goes on after a kill: the seconds that an arm has learned, in a file."""

import json
import time
from pathlib import Path

EVERY = 5.0  # seconds between two writes: what a kill may lose


class Clock:
    """The seconds of an arm, over all processes that worked on it."""

    def __init__(self, file: Path) -> None:
        self._file, self._begun, self._written = file, time.monotonic(), 0.0
        kept = json.loads(file.read_text()) if file.exists() else {}
        self._before: float = kept.get("seconds", 0.0)
        self.laps: dict[str, float] = kept.get("laps", {})  # the seconds at each iteration's end

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._before + time.monotonic() - self._begun

    def tick(self) -> None:
        """Write the seconds, now and then."""
        if time.monotonic() - self._written >= EVERY:
            self._write()

    def lap(self, number: int) -> float:
        """Note that an iteration has ended, once; return how long it took."""
        before = self.laps.get(str(number - 1), 0.0)
        ended = self.laps.setdefault(str(number), self.seconds)
        self._write()
        return ended - before

    def _write(self) -> None:
        self._written = time.monotonic()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        draft = self._file.with_suffix(".clock-draft")
        draft.write_text(json.dumps({"seconds": self.seconds, "laps": self.laps}))
        draft.rename(self._file)
