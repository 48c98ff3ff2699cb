"""Which samples were there before: equal ones, and nearly equal ones where the recipe asks.

The first stays. Called by selection.py, in the order of the dataset.
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

from cray_agents.runtime.datasets.near_duplicates import NearDuplicates
from cray_agents.runtime.datasets.run_samples import TokenSample


class Repeat(NamedTuple):
    """The earlier run (or demonstration) whose sample this repeats; `exact`: to the token."""

    run: str
    similarity: float
    exact: bool = False

    @property
    def reason(self) -> str:
        """As considered.py lists them."""
        return "duplicate" if self.exact else "near_duplicate"

    @property
    def detail(self) -> str:
        """With what."""
        return self.run if self.exact else f"{self.run} ({self.similarity:.3f})"


class KeptSamples:
    """The samples that were kept: about 200 bytes each, and what NearDuplicates needs."""

    def __init__(self, threshold: float | None) -> None:
        self._near = None if threshold is None else NearDuplicates(threshold)
        self._places: dict[bytes, int] = {}  # in the names below
        self._names = bytearray()
        self._ends = array("Q", [0])

    def repeat(self, run: str, tokens: "array[int]") -> Repeat | None:
        """What these tokens repeat; None: nothing, and now they are kept."""
        key = blake2b(tokens.tobytes(), digest_size=16).digest()
        place = self._places.get(key)
        if place is not None:
            return Repeat(self._name(place), 1.0, exact=True)
        if self._near is not None:
            found = self._near.add(run, tokens)
            if found is not None:
                return Repeat(*found)
        self._places[key] = len(self._ends) - 1
        self._names += run.encode()
        self._ends.append(len(self._names))
        return None

    def fresh(
        self, run: str, samples: Iterable[TokenSample]
    ) -> tuple[list[TokenSample], Repeat | None]:
        """The samples that repeat nothing, now kept; and what the last of the others repeats."""
        found, last = [], None
        for sample in samples:
            repeat = self.repeat(run, sample.input_ids)
            if repeat is None:
                found.append(sample)
            else:
                last = repeat
        return found, last

    def close(self) -> None:
        """Give temporary files back."""
        if self._near is not None:
            self._near.close()

    def _name(self, place: int) -> str:
        return self._names[self._ends[place] : self._ends[place + 1]].decode()
