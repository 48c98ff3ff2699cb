"""Handles: open files of segments, with their tables and recently unpacked frames.

A few files are kept open for the next read. Called by reader.py and salvage.py.
"""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cray_agents.errors import Corrupt, StoreError
from cray_agents.runtime.store.segments import frames
from cray_agents.runtime.store.segments.line_format import LEFT, OPEN, SEALED

MAX_OPEN = 64  # files kept open
MAX_UNPACKED = 16 * 2**20  # bytes of unpacked frames that are kept


class Moved(StoreError):
    """A segment is gone because it was compacted. Get the places from the index again."""


class Handle:
    """A segment's open file, in one of its forms. `users` counts its readers."""

    def __init__(self, path: Path, file: int, form: str) -> None:
        self.path = path
        self.file = file
        self.close = weakref.finalize(self, os.close, file)  # also where nobody closes it
        self.form = form
        self.users = 0
        self.kept = True
        self._table: frames.Table | None = None

    @property
    def sealed(self) -> bool:
        """True for a sealed segment, which has a table."""
        return self.form == SEALED

    @property
    def table(self) -> frames.Table:
        """The table of a sealed segment's frames. Raises OSError."""
        if self._table is None:
            self._table = frames.read_table(self.file)
        return self._table

    def unpack(self, frame: frames.Frame, unpacker: frames.Unpacker) -> bytes:
        """Read and unpack the lines of a frame. Raises Corrupt, OSError."""
        data = os.pread(self.file, frame.size, frame.at)
        try:
            return unpacker.unpack(data, frame.length)
        except Corrupt as error:
            raise Corrupt(f"{self.path} at byte {frame.at}: {error}") from error


class Handles:
    """The open files of a directory's segments, for any number of threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, Handle] = OrderedDict()
        self._frames: OrderedDict[tuple[int, int], bytes] = OrderedDict()  # by handle, index
        self._unpacked = 0  # bytes of these frames
        self._unpacker = frames.Unpacker()

    @contextmanager
    def use(self, stem: str, fresh: bool = False) -> Iterator[Handle]:
        """Borrow a segment's file; with `fresh`, open it anew. Raises Moved, OSError."""
        with self._lock:
            if fresh:
                self._drop(stem)
            handle = self._handles.get(stem)
            if handle is not None:
                handle.users += 1
                self._handles.move_to_end(stem)
        if handle is None:
            handle = self._open(stem)
        try:
            yield handle
        finally:
            with self._lock:
                handle.users -= 1
                self._close_unused(handle)

    def frame(self, handle: Handle, index: int) -> bytes:
        """Return the lines of a sealed segment's frame. Raises Corrupt, OSError."""
        key = (id(handle), index)
        with self._lock:
            data = self._frames.get(key)
            if data is not None:
                self._frames.move_to_end(key)
                return data
        data = handle.unpack(handle.table[index], self._unpacker)
        with self._lock:
            if handle.kept and key not in self._frames:
                self._frames[key] = data
                self._unpacked += len(data)
                while self._unpacked > MAX_UNPACKED:
                    self._unpacked -= len(self._frames.popitem(last=False)[1])
        return data

    def drop_open(self, open_stems: set[str]) -> None:
        """Forget files of segments no longer open: they may be sealed or gone."""
        with self._lock:
            for stem, handle in list(self._handles.items()):
                if not handle.sealed and stem not in open_stems:
                    self._drop(stem)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for stem in list(self._handles):
                self._drop(stem)

    def _open(self, stem: str) -> Handle:
        handle = open_segment(self._directory, stem)
        handle.users = 1
        with self._lock:
            if stem in self._handles:  # another thread was faster: keep that one, use this once
                handle.kept = False
                return handle
            self._handles[stem] = handle
            while len(self._handles) > MAX_OPEN:
                self._drop(next(iter(self._handles)))
        return handle

    def _drop(self, stem: str) -> None:
        handle = self._handles.pop(stem, None)
        if handle is None:
            return
        handle.kept = False
        for key in [key for key in self._frames if key[0] == id(handle)]:
            self._unpacked -= len(self._frames.pop(key))
        self._close_unused(handle)

    @staticmethod
    def _close_unused(handle: Handle) -> None:
        if not handle.kept and handle.users == 0:
            handle.close()


def open_segment(directory: Path, stem: str) -> Handle:
    """Open a segment's file: the sealed one if there is one. Raises Moved, OSError."""
    for form in (SEALED, OPEN, LEFT, SEALED):  # in the order of renames, which may happen meanwhile
        path = directory / f"{stem}{form}"
        with suppress(FileNotFoundError):
            return Handle(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), form)
    raise Moved(f"there is no segment {stem} in {directory} any more")
