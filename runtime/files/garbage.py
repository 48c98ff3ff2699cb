"""What no file and no upload holds any more is removed from the disk, an hour after its last use.

A completed upload's parts go so, deleted and expired files, parts of uploads that nobody ended. The
gateway asks now and then; several processes may do so at once (see Blobs.sweep). Records of ended
uploads stay: they are small, and let a repeated `complete` answer.
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
    """Remove what nobody holds and nobody used for `grace` seconds; returns how many contents."""

    def used() -> set[str]:
        pending = uploads.used()  # first: it publishes the files of uploads that a crash cut short
        return pending | files.sweep()

    return files.blobs.sweep(used, grace)


class Sweeper:
    """Sweeps when it is asked and the last time is EVERY_SECONDS ago; blocks, one at a time."""

    def __init__(self, files: Files, uploads: Uploads) -> None:
        self._files = files
        self._uploads = uploads
        self._lock = threading.Lock()
        self._last = -EVERY_SECONDS

    def now_and_then(self) -> None:
        """Called after what leaves something behind."""
        if time.monotonic() - self._last < EVERY_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._last = time.monotonic()
            sweep(self._files, self._uploads)
        except Corrupt as error:  # nothing may go while it is not known what holds it
            log.error("unused contents are kept: %s", error)
        finally:
            self._lock.release()
