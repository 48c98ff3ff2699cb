"""Kill -9 while delta checkpoints are rebuilt: what is read afterwards equals what was trained.

Both ways are killed: the copy that a platform makes for its replicas, and the rebuilding on the
shared root before a promotion.
"""

import multiprocessing
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cray_agents.paths import Home
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.deltas import Shadows, materialize
from tests.support.campaign import Campaign, kills
from tests.support.delta_checkpoints import Words, bfloat16, changed, full, header, with_changes
from tests.support.killed_copies import rebuild_until

FILES = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
CHAIN = ("two", "three")  # each is what changed in the one before it
SIZE = 200_000  # elements of a file


def chain(home: Home) -> dict[str, dict[str, bytes]]:
    """Make a full checkpoint and two deltas over it; return the files of weights of the deltas."""
    weights: dict[str, dict[str, Words]] = {
        file: {file[:11]: bfloat16(SIZE, seed)} for seed, file in enumerate(FILES)
    }
    full(home, "one", weights)
    expected, before = {}, "one"
    for number, name in enumerate(CHAIN):
        weights = {
            file: {tensor: with_changes(words, 0.02, seed=number) for tensor, words in part.items()}
            for file, part in weights.items()
        }
        child, _ = changed(home, name, before, weights)
        materialize(home, child)
        expected[name] = {file: (child / file).read_bytes() for file in FILES}
        for file, part in weights.items():
            words = b"".join(each.tobytes() for each in part.values())
            assert expected[name][file] == header(part) + words
        before = name
    return expected


def test_killed_rebuilds_are_read_as_whole_ones(tmp_path: Path) -> None:
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["tests.support.killed_copies"])
    home, copies, root = Home(tmp_path / "home"), tmp_path / "shadows", str(tmp_path)
    expected = chain(home)

    def rebuild(how: str, touches: int, delay: float) -> bool:
        """Rebuild the chain in a process of its own; True if that was killed."""
        process = forking.Process(target=rebuild_until, args=(root, CHAIN[-1], how, touches, delay))
        process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode != 0

    def forget() -> None:
        """Leave the deltas as they were published."""
        for name in CHAIN:
            for file in FILES:
                (home.checkpoint(name) / file).unlink(missing_ok=True)

    most = {}
    for how in ("copy", "root"):
        forget()
        assert not rebuild(how, 0, 0.0)
        most[how] = int((tmp_path / "touches").read_text())

    @contextmanager
    def begin(folder: Path, chance: random.Random) -> Iterator[str]:
        forget()
        yield chance.choice(("copy", "root"))

    def hurt(how: str, chance: random.Random, enough: int) -> Counter[str]:
        """Let some die before somebody finishes it."""
        hits = Counter[str]()
        for _ in range(chance.randint(1, 3)):
            delay = chance.choice((0.0, chance.uniform(0, 0.01)))
            hits[how] += rebuild(how, chance.randint(1, most[how]), delay)
        return hits

    def check(how: str) -> None:
        if how == "copy":
            assert not any((home.checkpoint(n) / file).exists() for n in CHAIN for file in FILES)
            shadows = Shadows(home, copies)
            found = {name: shadows.directory(home.checkpoint(name)) for name in CHAIN}
            assert {path.parent for path in copies.glob("*/*/*.safetensors")} == set(found.values())
        else:
            half = [n for n in CHAIN if any(not (home.checkpoint(n) / f).exists() for f in FILES)]
            found = {name: materialize(home, home.checkpoint(name)) for name in CHAIN}
            assert not [draft for n in half for draft in home.root.glob(f"checkpoints/.{n}.*")]
        for name, directory in found.items():
            assert {file: (directory / file).read_bytes() for file in FILES} == expected[name]
            assert checkpoints.is_whole(directory, checkpoints.verify(directory))
        if how == "copy":
            shadows.remove()
        checkpoints.delete_leftovers(home)
        assert not list(home.checkpoint("x").parent.glob(".*"))

    Campaign(begin, hurt, check).run(tmp_path, kills(5))
