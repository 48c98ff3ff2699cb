"""Search over a folder: what is found, that it stays true as files change, and what is kept."""

import os
from pathlib import Path

import pytest

from cray_agents import Agent
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import BadInput
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.documents import SIZE, Documents, FoundPassage, fuse_rankings, passages_of

REFUNDS = """# Refunds

A customer gets the money back within 14 days.

# Shipping

Parcels leave the house on Tuesdays.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRAY_AGENTS_CACHE", str(tmp_path / "cache"))
    inner = tmp_path / "handbook"
    (inner / "sales").mkdir(parents=True)
    (inner / "sales" / "refunds.md").write_text(REFUNDS)
    (inner / "holidays.txt").write_text("Everybody has thirty days off.\n")
    (inner / "office.html").write_text("<h1>Office</h1><script>x</script><p>The key is blue.</p>")
    return inner


def paths(found: list[FoundPassage]) -> list[str]:
    return [one.path for one in found]


@pytest.mark.slow
def test_an_agent_searches(folder: Path) -> None:
    search = tool_call("search_documents", query="When does a customer get money back?")
    agent = Agent(name="a", tools=[Documents(folder).tool], engine=ScriptedEngine([search, "ok"]))
    (call,) = agent.run_sync("go").trajectory.turns[0].tool_calls
    first = call.result[0]
    assert (first["path"], first["lines"]) == ("sales/refunds.md", [1, 7])
    assert first["text"] == REFUNDS.strip("\n") and first["score"] > 0


def test_the_best_stands_first_and_nothing_else_is_found(folder: Path) -> None:
    documents = Documents(folder)
    assert paths(documents.search("blue key")) == ["office.html"]
    assert documents.search("blue key")[0].text == "# Office\n\nThe key is blue."
    assert paths(documents.search("days")) == ["holidays.txt", "sales/refunds.md"]
    assert paths(documents.search("days", limit=1)) == ["holidays.txt"]
    assert documents.search("elephants") == documents.search("?!") == []
    assert paths(documents.search("refunds")) == ["sales/refunds.md"]


def test_each_search_sees_the_folder_as_it_is(folder: Path) -> None:
    documents = Documents(folder)
    assert documents.search("elephant") == []
    (folder / "zoo.md").write_text("An elephant lives here.")
    assert paths(documents.search("elephant")) == ["zoo.md"]
    (folder / "zoo.md").write_text("An aardvark lives here.")  # as long, perhaps in the same tick
    assert documents.search("elephant") == []
    assert paths(documents.search("aardvark")) == ["zoo.md"]
    (folder / "zoo.md").rename(folder / "ark.md")
    assert paths(documents.search("aardvark")) == ["ark.md"]
    (folder / "ark.md").unlink()
    assert documents.search("aardvark") == []


def test_what_was_read_is_not_read_again(folder: Path) -> None:
    for file in folder.rglob("*.*"):
        os.utime(file, (1e9, 1e9))
    documents = Documents(folder)
    assert documents.refresh() == 3
    with (folder / "holidays.txt").open("r+b") as opened:
        opened.write(b"Nobody")
    os.utime(folder / "holidays.txt", (1e9, 1e9))  # nothing tells that it changed
    assert paths(documents.search("everybody")) == ["holidays.txt"]
    assert paths(Documents(folder).search("everybody")) == []


def test_what_is_left_out_is_told(folder: Path) -> None:
    (folder / "picture.png").write_bytes(b"\x89PNG\0elephant")
    (folder / "latin.txt").write_bytes("éléphant elephant".encode("latin-1"))
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.md").write_text("elephant")
    (folder / "link.md").symlink_to(folder.parent)
    (folder / "empty.md").write_text("")
    documents = Documents(folder, include=["*.txt", "*.png"])
    assert documents.search("elephant") == []
    assert documents.left_out == {"picture.png": "not text", "latin.txt": "not UTF-8 text"}
    assert documents.search("blue key") == []
    assert paths(documents.search("days")) == ["holidays.txt"]


def test_passages_cover_the_text_once() -> None:
    lines = [f"line {n} " + "word " * 20 + ("\n\n" if n % 7 == 0 else "\n") for n in range(300)]
    text = "".join(lines) + "x" * (3 * SIZE)
    found = list(passages_of("f", text))
    assert "".join("".join(one.text.split()) for one in found) == "".join(text.split())
    assert all(len(one.text) <= SIZE for one in found)
    every = text.split("\n")
    for one in found[:-3]:
        assert one.text == "\n".join(every[one.first - 1 : one.last]).strip("\n")
    assert [one.first for one in found[:-2]] == sorted({one.first for one in found})


def test_rankings_are_fused() -> None:
    assert fuse_rankings([1, 2], [2, 3]) == [(2, 1 / 62 + 1 / 61), (1, 1 / 61), (3, 1 / 62)]


def test_bad_arguments(folder: Path) -> None:
    with pytest.raises(BadInput, match="is not a folder"):
        Documents(folder / "nothing")
    with pytest.raises(BadInput, match="give a list of patterns"):
        Documents(folder, include="*.md")
    calls = [tool_call("search_documents", query=" "),
             tool_call("search_documents", query="x", limit=21)]  # fmt: skip
    agent = Agent(name="a", tools=[Documents(folder).tool], engine=ScriptedEngine([calls, "ok"]))
    first, second = agent.run_sync("go").trajectory.turns[0].tool_calls
    assert "query is empty" in first.error and "must be 1 to 20" in second.error
