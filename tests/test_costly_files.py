"""Small files that tell gigabytes: each reader refuses them by name, in bounded memory.

A child process reads each file in a fork of its own, whose memory is measured by the kernel.
"""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.support.hostile_models import whole_model

MOST = 800  # MiB that a file may take beyond what the reader itself does
MIB = 2**20
CHILD = '''
import json, os, resource, sys
from pathlib import Path
from cray_agents import TaskSet
from cray_agents.errors import BadInput
from cray_agents.runtime.fine_tuning.examples import read_examples
from cray_agents.runtime.imports.import_file import read_file
from cray_agents.runtime.registry.checkpoints import inspect
import pyarrow.parquet, yaml, zstandard

READERS = {
    "import": lambda path: [len(events) for events in read_file(path, "jsonl")],
    "examples": read_examples,
    "tasks": TaskSet.from_jsonl,
    "csv": TaskSet.from_csv,
    "parquet": TaskSet.from_parquet,
    "folder": TaskSet.from_huggingface,
    "model": inspect,
}

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def read(reader, path):
    """In a fork: what it said, and the MiB that it took."""
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    before = peak()
    try:
        READERS[reader](Path(path))
        said = "nothing"
    except BadInput as error:
        said = str(error)
    except MemoryError:
        said = "MemoryError"
    return said, peak() - before

for line in sys.stdin:
    inner, outer = os.pipe()
    if not os.fork():
        try:
            os.write(outer, json.dumps(read(*json.loads(line))).encode()[:4000])
        finally:
            os._exit(0)
    os.close(outer)
    with os.fdopen(inner) as answer:
        print(answer.read(), flush=True)
    os.wait()
'''


class Bomb(NamedTuple):
    """A file, its reader, and what is said of it."""

    reader: str
    name: str
    make: Callable[[Path], object]
    said: str


def packed(*pieces: tuple[bytes, int]) -> Callable[[Path], object]:
    """Pieces so many times, compressed."""

    def make(path: Path) -> None:
        with path.open("wb") as raw, _packer(raw, path.suffix) as file:
            for piece, times in pieces:
                block = piece * min(times, MIB)
                for _ in range(times // min(times, MIB)):
                    file.write(block)

    return make


def _packer(raw: IO[bytes], suffix: str) -> Any:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1)
    return zstandard.ZstdCompressor(level=1).stream_writer(raw) if suffix == ".zst" else raw


def table(rows: int, text: int) -> Callable[[Path], object]:
    """A Parquet file of equal rows, which holds their text once."""

    def make(path: Path) -> None:
        one = pyarrow.array(["x" * text])
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, "int32"), one)
        written: Any = {"store_schema": False, "dictionary_pagesize_limit": 2**30}
        names = pyarrow.table({"input": column})
        pyarrow.parquet.write_table(names, path, compression="zstd", **written)

    return make


def rows(path: Path) -> None:
    """Eight tasks whose metadata are a million objects each."""
    row = b'{"input": "x", "metadata": {"a": [' + b'{"":0},' * MIB + b"0]}}\n"
    path.write_bytes(zstandard.compress(row * 8, 1))


def nulls(path: Path) -> None:
    """A row with a list of 60 million nulls."""
    many = pyarrow.nulls(60_000_000, pyarrow.bool_())
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, len(many)], "int32"), many)
    pyarrow.parquet.write_table(pyarrow.table({"input": ["a"], "x": lists}), path)


def aliases(path: Path) -> None:
    path.mkdir()
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9)]
    text = "\n".join([*lines, "configs: [{data_dir: *l8}]"])
    (path / "README.md").write_text(f"---\n{text}\n---\n")


def header(path: Path) -> None:
    folder = whole_model(path)
    text = b'{"x": [' + b"{}," * (20 * MIB) + b"{}]}"
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


WINDOW = b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + b"\x19\x00\x00{}\n"  # a frame of 2 GiB
LIST = [(b'{"x": [', 1), (b"{},", 20 * MIB), (b"{}]}\n", 1)]
BOMBS = {
    "values": Bomb("import", "a.jsonl.zst", packed(*LIST), "line 1: not valid JSON: its lists and"),
    "values of an item": Bomb(
        "import", "a.json.zst", packed((b"[", 1), *LIST), "item 1: not valid JSON: its lists and"
    ),
    "values over lines": Bomb(
        "import", "a.json.gz", packed((b"{\n", 1), (b'"x": [', 1), *LIST[1:]), "its lists and"
    ),
    "depth": Bomb("import", "a.json.zst", packed((b"[", 100 * MIB)), "item 1: not valid JSON: it"),
    "a number": Bomb(
        "import", "a.json.zst", packed((b"[", 1), (b"1", 1200 * MIB)), "item 1: longer than 64 MiB"
    ),
    "a text": Bomb(
        "import", "a.json.zst", packed((b'["', 1), (b"x", 1200 * MIB)), "item 1: longer than 64 MiB"
    ),
    "a line": Bomb("import", "a.jsonl.zst", packed((b"x", 1200 * MIB)), "line 1: longer than 64"),
    "a window": Bomb("import", "a.jsonl.zst", lambda path: path.write_bytes(WINDOW), "cannot read"),
    "an example": Bomb(
        "examples", "a.jsonl", packed(*LIST), "line 1: not valid JSON: its lists and"
    ),
    "a task": Bomb(
        "tasks", "a.jsonl.zst", packed(*LIST), "a.jsonl.zst:1: not valid JSON: its lists"
    ),
    "tasks": Bomb("tasks", "a.jsonl.gz", packed((b'{"input": "x"}\n', MIB)), "more than 128 MiB"),
    "values of tasks": Bomb("tasks", "a.jsonl.zst", rows, "more than 128 MiB"),
    "columns": Bomb("csv", "a.csv", packed((b",", 96 * MIB)), "longer than 64 MiB"),
    "equal rows": Bomb("parquet", "a.parquet", table(1000, MIB), "more than 128 MiB"),
    "long rows": Bomb("parquet", "a.parquet", table(1000, 60 * MIB), "more than 128 MiB"),
    "a long row": Bomb("parquet", "a.parquet", table(1, 200 * MIB), "a row group of 200 MiB"),
    "nulls": Bomb("parquet", "a.parquet", nulls, "a row group of 4"),
    "aliases": Bomb("folder", "a", aliases, "it has aliases"),
    "a header": Bomb("model", "a", header, "has a header of 60 MiB"),
}


@pytest.fixture(scope="module")
def reading() -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", CHILD]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        yield child
        assert child.stdin is not None
        child.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_costly_file_is_refused(
    reading: subprocess.Popen[str], tmp_path: Path, name: str
) -> None:
    bomb = BOMBS[name]
    path = tmp_path / bomb.name
    bomb.make(path)
    assert reading.stdin is not None and reading.stdout is not None
    reading.stdin.write(json.dumps([bomb.reader, str(path)]) + "\n")
    reading.stdin.flush()
    said, taken = json.loads(reading.stdout.readline())
    assert bomb.said in said
    assert taken < MOST, said
