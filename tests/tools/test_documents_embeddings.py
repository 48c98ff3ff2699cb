"""Search by meaning with a real vLLM that embeds: what is asked of it, and what is kept."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from cray_agents.errors import EngineError
from cray_agents.runtime.pool.vllm_process import EngineSettings, bind, environment
from cray_agents.runtime.vllm_plugins.wire import SOCKET
from cray_agents.tools.documents import (
    Documents,
    Embeddings,
    FolderPassages,
    MeaningIndex,
    VectorFile,
    digest_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forked_servers")]

TEXTS = {
    "refunds.md": "A customer gets the money back within 14 days.",
    "parcels.md": "Parcels leave the house on Tuesdays.",
    "keys.md": "The key to the cellar is blue.",
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server whose model is random: equal texts are near, that is all it knows."""
    from cray_agents.trainers.models.seed_model import make_seed_model

    place = tmp_path_factory.mktemp("embedder")
    make_seed_model(place / "model", seed=1, corpus=list(TEXTS.values()))
    held = bind("127.0.0.1")  # as a replica's, or others would get its port meanwhile
    handle, port = held.fileno(), str(held.getsockname()[1])
    argv = [sys.executable, "-m", "cray_agents.runtime.vllm_plugins.server", str(os.getpid())]
    argv += ["--host", "127.0.0.1", "--port", port, "--model", str(place / "model")]
    argv += ["--served-model-name", "minds", "--runner", "pooling", "--max-model-len", "512"]
    argv += ["--max-num-seqs", "8", "--dtype", "float32", "--enforce-eager"]
    argv += ["--kv-cache-memory-bytes", str(2**27)]
    url = f"http://127.0.0.1:{port}"
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            argv, stdout=log, stderr=log, env=environment(EngineSettings()) | {SOCKET: str(handle)},
            pass_fds=[handle], start_new_session=True,
        )  # fmt: skip
    try:
        while not healthy(url):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
                raise AssertionError((place / "log").read_text()[-4000:])
        yield f"{url}/v1"
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        held.close()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRAY_AGENTS_CACHE", str(tmp_path / "cache"))
    inner = tmp_path / "handbook"
    inner.mkdir()
    for name, text in TEXTS.items():
        (inner / name).write_text(text)
        os.utime(inner / name, (1e9, 1e9))
    return inner


def test_hybrid_search_and_what_it_keeps(embedder: str, folder: Path) -> None:
    minds = Embeddings("minds", embedder, batch=2)
    documents = Documents(folder, embeddings=minds)
    assert documents.refresh() == 3
    for name, text in TEXTS.items():
        found = documents.search(text)
        assert found[0].path == name and found[0].score == round(2 / 61, 4)
        assert len(found) == 3  # by meaning everything is somewhere
    (folder / "keys.md").write_text("The key to the attic is green.")
    assert documents.search("The key to the attic is green.")[0].path == "keys.md"

    file = VectorFile(folder.resolve(), ["*"])
    vectors = file.read("minds")
    assert len(vectors) == 4  # the one that went is kept: texts come back
    norms = [np.linalg.norm(np.frombuffer(vector, np.float32)) for vector in vectors.values()]
    assert norms == pytest.approx([1.0] * 4, abs=1e-5)

    # What is kept is not asked for again: with the vectors exchanged, another text is nearest.
    files = FolderPassages(folder.resolve(), ["*"], 2**20)
    assert files.refresh()
    passages = files.all()
    first, second = (digest_of(one.text) for one in passages[:2])
    file.keep("minds", {first: vectors[second], second: vectors[first]})
    meanings = MeaningIndex(minds, file)
    meanings.index(passages)
    nearest = {one.text: passages[meanings.rank(one.text, 1)[0]].text for one in passages}
    assert sum(text != found for text, found in nearest.items()) == 2


def test_an_engine_without_embeddings_is_no_silent_fallback(embedder: str, folder: Path) -> None:
    with pytest.raises(EngineError, match="gave no embeddings of 'others'"):
        Documents(folder, embeddings=Embeddings("others", embedder)).search("key")
