"""Where the index of a shared root lies: on this host's own disk, one directory for each root.

    $CRAY_AGENTS_CACHE, /var/tmp or the temporary directory
      cray-agents-<uid>/<digest of the root's path>/
        root             the path, so that `sweep_caches` knows whose it is
        index.sqlite     and SQLite's and our own files beside it

A root that was deleted and made anew at the same path is another one: `identity_of` tells.
"""

import errno
import hashlib
import os
import shutil
from pathlib import Path

from cray_agents.errors import StoreError
from cray_agents.paths import Home, host_cache
from cray_agents.records import new_id
from cray_agents.runtime.disk.durable import create_file

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def cache_of(home: Home) -> Path:
    """The index's file for this root; its directory is made. Raises StoreError."""
    root = os.path.realpath(home.root)
    directory = host_cache() / hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / "root").write_bytes(os.fsencode(root))
    except OSError as error:
        raise StoreError(f"cannot write the index in {directory}: {error.strerror}") from error
    return directory / "index.sqlite"


def identity_of(home: Home) -> str:
    """A random name of this root, given when it is first asked for. Raises StoreError.

    Who may only read a root that has none yet knows it by its inode.
    """
    try:
        if not home.root_id.exists():
            create_file(home.root_id, new_id("root").encode())
        return home.root_id.read_text()
    except OSError as error:
        if error.errno in READ_ONLY and home.root.is_dir():
            found = home.root.stat()
            return f"inode {found.st_dev}.{found.st_ino}"
        raise StoreError(f"cannot write {home.root_id}: {error.strerror or error}") from error


def sweep_caches() -> list[str]:
    """Delete what is kept for roots that no longer exist; returns their paths."""
    swept = []
    for file in sorted(host_cache().glob("*/root")):
        root = os.fsdecode(file.read_bytes())
        if root and not Path(root).is_dir():
            shutil.rmtree(file.parent, ignore_errors=True)
            swept.append(root)
    return swept
