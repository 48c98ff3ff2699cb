"""Garbage collection: remove contents that no file or upload uses, an hour after last use.

These are the parts of completed and abandoned uploads, and deleted and expired files. The gateway
collects now and then; several processes may do so at once (see Blobs.sweep). Records of ended
uploads stay: they are small, and a repeated `complete` needs them.
"""

import logging
import threading
import time

from cray_agents.errors import Corrupt
from cray_agents.runtime.files.blobs import GRACE_SECONDS
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.files.uploads import Uploads

EVERY_SECONDS = 3600.0

log = logging.getLogger(__name__)


def sweep(files: Files, uploads: Uploads, grace: float = GRACE_SECONDS) -> int:
    """Remove contents not in use for `grace` seconds; return their number."""

    def in_use() -> set[str]:
        pending = uploads.contents_in_use()  # first: this publishes files that a crash left out
        return pending | files.delete_expired()

    return files.blobs.sweep(in_use, grace)


class Sweeper:
    """A sweep at most every EVERY_SECONDS, and one at a time. It blocks."""

    def __init__(self, files: Files, uploads: Uploads) -> None:
        self._files = files
        self._uploads = uploads
        self._lock = threading.Lock()
        self._last = -EVERY_SECONDS

    def sweep_if_due(self) -> None:
        """Sweep if the last time was EVERY_SECONDS ago."""
        if time.monotonic() - self._last < EVERY_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._last = time.monotonic()
            sweep(self._files, self._uploads)
        except Corrupt as error:  # a record that cannot be read may use any content
            log.error("unused contents are kept: %s", error)
        finally:
            self._lock.release()
