"""Documents: cut to fill contexts, compared as runs are, and refused by name where they are bad."""

import gzip
import hashlib
import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.datasets.documents import Cutter
from cray_agents.runtime.datasets.reader import CARD, read_manifest, runs_page
from tests.support.command_line import cli, refused
from tests.support.datasets.dataset_runs import details, made, reasons, rows
from tests.support.scripted_gateway import served

TEXTS = [
    f"Document {n}: " + "a quick fox jumps over it, " * (1 + n % 9) + str(n) for n in range(60)
]
CONTEXT = 48
Make = Callable[[Path], object]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cray_agents.trainers.models.seed_model import make_seed_model

    directory = tmp_path_factory.mktemp("seed")
    make_seed_model(directory, seed=0, corpus=TEXTS[:9])
    return directory


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    return home


def write_json(path: Path, texts: list[str] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"text": text, "more": 1}) + "\n" for text in texts))
    return path


def test_every_file_format_fills_the_same_contexts(
    home: Home, tokenizer: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    plain, packed = tmp_path / "a.txt", tmp_path / "a.jsonl.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(TEXTS).encode())
    packed.write_bytes(gzip.compress(write_json(tmp_path / "a.jsonl").read_bytes()))
    table = pa.table({"id": range(len(TEXTS)), "text": pa.array(TEXTS, pa.large_string())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    names = ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet")
    recipe = {"tokenizer": str(tokenizer), "max_tokens": CONTEXT}
    sets = [made(home, documents=[str(tmp_path / name)], **recipe) for name in names]
    tokens = [[row["input_ids"] for row in samples] for _, samples in sets]
    assert all(each == tokens[0] for each in tokens)

    encode = AutoTokenizer.from_pretrained(str(tokenizer))
    end, known = encode.eos_token_id, {}
    manifest, samples = sets[1]
    for row in samples:
        before = known.setdefault(row["run_id"], [])
        assert not before or before[-1] == row["input_ids"][0], "the token before the cut"
        known[row["run_id"]] = before + row["input_ids"][1 if before else 0 :]
        assert row["loss_mask"] == [0] + [1] * (len(row["input_ids"]) - 1)
    assert known == {
        f"a.jsonl:{n}": [*encode(text)["input_ids"], end][:None] for n, text in enumerate(TEXTS, 1)
    }
    filled = 0
    for row in samples:
        inputs = len(row["input_ids"]) - 1
        assert filled % CONTEXT + inputs <= CONTEXT
        filled += inputs
    assert filled == manifest["trained_tokens"]
    assert (manifest["documents"], manifest["considered_runs"]) == (len(TEXTS), 0)
    folder = tmp_path / "folder" / "in"
    folder.mkdir(parents=True)
    write_json(folder / "b.jsonl", TEXTS[40:])
    write_json(folder / "a.jsonl", TEXTS[:40])
    (folder / ".hidden").write_text("no documents")
    _, again = made(home, documents=[str(folder.parent)], **recipe)
    assert [row["input_ids"] for row in again] == tokens[0]
    assert again[-1]["run_id"] == "in/b.jsonl:20"
    assert "Documents accepted | 60" in (home.dataset(manifest["id"]) / CARD).read_text()


def test_cuts_leave_no_gap() -> None:
    cutter, learnt = Cutter(4), []
    for document in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12], [13, 14]):
        pieces = [list(one.input_ids) for one in cutter.samples(array("i", document))]
        learnt.append(pieces)
    assert learnt == [[[1, 2, 3]], [], [[5, 6, 7], [7, 8, 9, 10, 11], [11, 12]], [[13, 14]]]


def test_repeats_and_what_is_held_out_stay_out(home: Home, tokenizer: Path, tmp_path: Path) -> None:
    long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen " * 3
    held = "which of the nine red boxes on the table holds the key to the door"
    texts = [long, long, long + "end", f"A page says: {held}, and more.", "  ", *TEXTS[:5]]
    (tmp_path / "benchmark.jsonl").write_text(json.dumps({"input": held}))
    manifest, samples = made(
        home,
        documents=[str(write_json(tmp_path / "b.jsonl", texts))],
        tokenizer=str(tokenizer),
        max_tokens=CONTEXT,
        near_duplicates=0.8,
        validation=0.4,
        decontamination={"files": [str(tmp_path / "benchmark.jsonl")]},
    )
    name = manifest["id"]
    assert list(reasons(home, name).values()) == [
        None, "duplicate", "near_duplicate", "contaminated", "empty", *[None] * 5,
    ]  # fmt: skip
    assert manifest["documents"] == 6 and sum(manifest["rejected_documents"].values()) == 4
    assert "holds all of benchmark.jsonl:1" in str(details(home, name)["b.jsonl:4"])
    here = {row["run_id"] for row in samples}
    there = {row["run_id"] for row in rows(home, name, "validation")}
    assert len(here) + len(there) == 6 and here and there and not here & there
    for n, text in enumerate(texts, 1):
        low = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 < 0.4
        assert f"b.jsonl:{n}" not in (here if low else there)


def test_a_set_of_which_nothing_is_left_says_why(
    home: Home, tokenizer: Path, tmp_path: Path
) -> None:
    held = tmp_path / "held.txt"
    held.write_text(f"{TEXTS[0]}\n{TEXTS[1]}\n")
    with pytest.raises(BadInput) as refused:
        made(
            home,
            documents=[str(write_json(tmp_path / "a.jsonl", TEXTS[:2]))],
            tokenizer=str(tokenizer),
            max_tokens=CONTEXT,
            decontamination={"files": [str(held)]},
        )
    told = "no document can be trained on: 2 considered (contaminated 2)"
    assert (str(refused.value), refused.value.code) == (told, "empty_dataset")


def test_files_of_one_name_have_documents_of_different_names(
    home: Home, tokenizer: Path, tmp_path: Path
) -> None:
    files = [tmp_path / folder / "d.txt" for folder in "xyz"]
    for n, file in enumerate(files):
        file.parent.mkdir()
        file.write_text("\n".join(TEXTS[2 * n : 2 * n + 2]))
    recipe = {"tokenizer": str(tokenizer), "max_tokens": CONTEXT}
    manifest, samples = made(home, documents=[str(file) for file in files], **recipe)
    names: list[str] = []
    while (page := runs_page(home, manifest["id"], after=(names or [None])[-1], limit=1)).rows:
        names += [row["run"] for row in page.rows]
        assert len(names) <= 6, "its pages have no end"
    assert names == [f"d.txt{of}:{n}" for of in ("", " (2)", " (3)") for n in (1, 2)]
    assert {row["run_id"] for row in samples} == set(names)


def two_columns(path: Path) -> None:
    pq.write_table(pa.table({"content": ["a"], "n": [1]}), path)


def numbers(path: Path) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), path)


def nulls(path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array(["a", None])}), path)


def one_long_line(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(65):
            file.write(b"x" * 2**20)
        file.write(b'"}\n')


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.parquet", two_columns, r"a.parquet has no column 'text'.*content \(string\), n"),
        ("a.parquet", numbers, r"no column 'text' of texts: it has text \(int64\); rename"),
        ("a.parquet", nulls, "a.parquet: row 1: 'text' is no text, but None"),
        ("a.parquet", b"PAR1 and no more", "a.parquet: not a Parquet file"),
        ("a.jsonl", one_long_line, "a.jsonl:2: longer than 64 MiB"),
        ("a.txt", one_long_line, "a.txt:2: longer than 64 MiB"),
        ("a.jsonl", b"", "a.jsonl holds no documents"),
        ("a.txt", b" \n\n", "a.txt holds no documents"),
        ("a.txt", b"good\nbad \xff\n", "a.txt:2: not UTF-8"),
        ("a.jsonl", b'{"text": "good"}\n{"text": "\xff"}\n', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", b'{"text": "good"}\n{"body": "b"}\n', "a.jsonl:2: .*'text'.*: 'body'"),
        ("a.json", b'[{"text": "good"}, 3]', "a.json: item 2: not an object with 'text'"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz"),
        ("a.csv", b"text\na\n", "a.csv: documents are read from files ending in .txt"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_and_nothing_is_left(
    home: Home, tokenizer: Path, tmp_path: Path, name: str, content: bytes | Make, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    good = str(write_json(tmp_path / "good.jsonl"))
    with pytest.raises(BadInput, match=said):
        made(home, documents=[good, str(path)], tokenizer=str(tokenizer), max_tokens=CONTEXT)
    assert not list(home.datasets.iterdir())
    done = cli("import", path, "--format", "documents", "--home", home.root, cwd=tmp_path)
    refused(done, name)
    assert not list(home.files.glob("*"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tokenizer": None}, "tokenizer"),
        ({"max_tokens": None}, "max_tokens"),
        ({"loop": "l"}, "loop"),
        ({"best_of": 2}, "best_of"),
        ({"method": "dpo"}, "documents"),
        ({"documents": ["/nowhere.txt"]}, "documents"),
        ({"tokenizer": "/nowhere"}, "tokenizer"),
    ],
)
def test_a_recipe_of_documents_has_what_they_need(
    home: Home, tokenizer: Path, tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    documents = [str(write_json(tmp_path / "a.jsonl"))]
    recipe = {"documents": documents, "tokenizer": str(tokenizer), "max_tokens": CONTEXT}
    with pytest.raises(BadInput) as error:
        made(home, **recipe | fields)
    assert error.value.param == param, error.value


@pytest.mark.parametrize(
    ("name", "said"),
    [("", "^'' is neither"), ("x" * 300, "^cannot read 'x+': File name too long$")],
)
def test_a_name_of_no_file_is_refused(
    home: Home,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    said: str,
) -> None:
    (tmp_path / "here").mkdir()
    write_json(tmp_path / "here" / "a.jsonl")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(BadInput, match=said):
        made(home, documents=[name], tokenizer=str(tokenizer), max_tokens=CONTEXT)


def test_imported_and_built_by_commands(home: Home, tokenizer: Path, tmp_path: Path) -> None:
    path = write_json(tmp_path / "a.jsonl")
    words = ("import", path, "--format", "documents", "--home", home.root, "--json")
    kept = json.loads(cli(*words, cwd=tmp_path).stdout)
    assert kept["documents"] == len(TEXTS)
    assert json.loads(cli(*words, cwd=tmp_path).stdout) == kept, "twice is once"
    for option, value in (("--loop", "l"), ("--reward", "0")):
        refused(cli(*words, option, value, cwd=tmp_path), f"{option} has no effect")
    path.unlink()
    build = ("dataset", "build", "--documents", kept["id"], "--tokenizer", tokenizer)
    ended = cli(*build, "--set", f"max_tokens={CONTEXT}", "--home", home.root, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "60 documents are in" in ended.stdout
    dry = cli(*build, "--set", "max_tokens=9", "--home", home.root, "--dry-run", cwd=tmp_path)
    assert "nothing was written" in dry.stdout and len(list(home.datasets.iterdir())) == 1


@pytest.mark.slow
async def test_an_upload_goes_on_after_the_platform_was_gone(
    tokenizer: Path, tmp_path: Path
) -> None:
    """In parts, of which the later ones go to another platform on the same root."""
    content = write_json(tmp_path / "a.jsonl").read_bytes()
    half = len(content) // 2
    async with served(tmp_path) as gateway:
        client = gateway.client()
        upload = await client.uploads.create(
            bytes=len(content), filename="a.jsonl", mime_type="text/plain", purpose="user_data"
        )
        first = await client.uploads.parts.create(upload.id, data=content[:half])
    async with served(tmp_path) as gateway:
        client = gateway.client()
        _, shown = await gateway.call("GET", f"/v1/uploads/{upload.id}")
        assert [part["id"] for part in shown["parts"]] == [first.id]
        second = await client.uploads.parts.create(upload.id, data=content[half:])
        done = await client.uploads.complete(upload.id, part_ids=[first.id, second.id])
        assert done.file is not None
        recipe = {"max_tokens": CONTEXT, "tokenizer": str(tokenizer)}
        status, answer = await gateway.call(
            "POST", "/v1/datasets", json={"documents": [done.file.id], **recipe}
        )
        assert status == 200, answer
        manifest = read_manifest(gateway.services.home.dataset(answer["id"]))
        assert manifest["documents"] == len(TEXTS)
        status, answer = await gateway.call(
            "POST", "/v1/datasets", json={"documents": [str(tmp_path / "a.jsonl")], **recipe}
        )
        assert (status, answer["error"]["param"]) == (400, "documents")
