"""Which keys of events were met before, in 8 bytes each: enough to fill an empty index fast.

Keeping millions of random keys sorted in a file as they come costs more than all the rest. So while
a draft is filled its keys are only remembered here, and sorted once at the end; see database.py.
"""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt


class KeyFilter:
    """Sorted runs of halves of keys, each at least twice as long as the next."""

    def __init__(self) -> None:
        self._sorted: list[npt.NDArray[np.uint64]] = []

    def are_new(self, keys: Collection[bytes]) -> bool:
        """Remember these keys of 16 bytes; False if one, or one that ends like it, was met before.

        False by mistake: less than once in a million times ten million keys.
        """
        if not keys:
            return True
        fresh = np.sort(np.frombuffer(b"".join(keys), dtype=np.uint64)[1::2])
        for known in self._sorted:
            at = np.searchsorted(known, fresh)
            at[at == len(known)] = 0
            if (known[at] == fresh).any():
                return False
        while self._sorted and len(self._sorted[-1]) < 2 * len(fresh):
            fresh = np.concatenate([self._sorted.pop(), fresh])
            fresh.sort(kind="stable")  # which merges runs that are sorted
        self._sorted.append(fresh)
        return True
