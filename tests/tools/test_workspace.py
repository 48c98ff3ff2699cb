"""Files in a folder: what the tools do, and that nothing leads out of it."""

import asyncio
import ctypes
import os
import threading
from pathlib import Path

import pytest

from cray_agents import Agent
from cray_agents.agent.tool import perform
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import BadInput, ToolError
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.safe_paths import MAX_DEPTH
from cray_agents.tools.workspace import MAX_LISTED, MAX_MATCHES, Workspace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text("the secret")
    inner = tmp_path / "work"
    (inner / "src").mkdir(parents=True)
    (inner / "src" / "main.py").write_text("one = 1\ntwo = 2\n\x0cthree = 3\n")
    (inner / "notes.md").write_text("Über die Zwei")
    return inner


def test_an_agent_works_in_it(folder: Path) -> None:
    engine = ScriptedEngine(
        [
            [tool_call("list_files"), tool_call("search_text", text="two")],
            tool_call("edit", path="src/main.py", old="two = 2", new="two = 4 // 2"),
            tool_call("read_file", path="src/main.py", first_line=2, lines=1),
            "done",
        ]
    )
    run = Agent(name="a", tools=Workspace(folder).tools, engine=engine).run_sync("go")
    results = [call.result for turn in run.trajectory.turns for call in turn.tool_calls]
    assert results == [
        "notes.md (14)\nsrc/main.py (27)",
        "src/main.py:2: two = 2",
        "replaced 1 in src/main.py",
        "two = 4 // 2\n[lines 2 to 2 of 3]",
    ]
    assert (folder / "src/main.py").read_text() == "one = 1\ntwo = 4 // 2\n\x0cthree = 3\n"


def test_writing_makes_folders_and_keeps_modes(folder: Path) -> None:
    workspace = Workspace(folder)
    workspace.write_file("a/b/c.txt", "hello\r\nthere")
    assert (folder / "a/b/c.txt").read_bytes() == b"hello\r\nthere"
    (folder / "run.sh").write_text("old")
    (folder / "run.sh").chmod(0o750)
    workspace.write_file("run.sh", "new")
    assert (folder / "run.sh").read_text() == "new"
    assert (folder / "run.sh").stat().st_mode & 0o777 == 0o750
    assert not list(folder.rglob("*.draft"))


def test_a_hard_link_to_the_outside_is_cut_not_written_through(folder: Path) -> None:
    os.link(folder.parent / "secret.txt", folder / "link")
    Workspace(folder).write_file("link", "mine")
    assert (folder.parent / "secret.txt").read_text() == "the secret"


def test_read_only_has_no_tool_that_writes(folder: Path) -> None:
    names = [tool.name for tool in Workspace(folder, read_only=True).tools]
    assert names == ["list_files", "read_file", "search_text"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../secret.txt", "'..' is not allowed"),
        ("src/../../secret.txt", "'..' is not allowed"),
        ("/etc/passwd", "is absolute"),
        ("out/secret.txt", "symbolic link"),
        ("link", "symbolic link"),
        ("a\0b", "printable"),
        ("a\nb", "printable"),
        ("", "the workspace itself"),
        (".", "the workspace itself"),
        ("notes.md/x", "no folder, or a symbolic link"),
    ],
)
def test_nothing_leads_out(folder: Path, path: str, message: str) -> None:
    (folder / "out").symlink_to(folder.parent)
    (folder / "link").symlink_to(folder.parent / "secret.txt")
    workspace = Workspace(folder)
    for act in (
        lambda: workspace.read_file(path),
        lambda: workspace.edit(path, "the", "my"),
        lambda: workspace.write_file(path, "overwritten"),
    ):
        with pytest.raises(ToolError) as caught:
            act()
        assert message in str(caught.value)
    assert (folder.parent / "secret.txt").read_text() == "the secret"
    assert not (folder.parent / "overwritten").exists()


def test_links_are_neither_listed_nor_searched(folder: Path) -> None:
    (folder / "out").symlink_to(folder.parent)
    (folder / "link").symlink_to(folder.parent / "secret.txt")
    workspace = Workspace(folder)
    assert workspace.list_files() == "notes.md (14)\nsrc/main.py (27)"
    assert workspace.search_text("secret") == "[not found]"
    with pytest.raises(ToolError, match="symbolic link"):
        workspace.list_files("out")


def test_a_folder_that_is_exchanged_for_a_link_all_the_time(folder: Path) -> None:
    """A race that a check before the use would lose now and then."""
    target, place, link = folder.parent / "target", folder / "d", folder / "other"
    for where, text in ((target, "outside"), (place, "inside")):
        where.mkdir()
        (where / "f").write_text(text)
    link.symlink_to(target)
    libc, stop = ctypes.CDLL(None, use_errno=True), threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            done = libc.renameat2(-100, os.fsencode(place), -100, os.fsencode(link), 2)
            assert done == 0

    thread = threading.Thread(target=exchange)
    thread.start()
    workspace, seen = Workspace(folder), set()
    try:
        while len(seen) < 4:  # each tool let in, and refused
            for name, act in (
                ("read", lambda: workspace.read_file("d/f")),
                ("write", lambda: workspace.write_file("d/g", "written")),
            ):
                try:
                    assert "outside" not in act()
                    seen.add(name)
                except ToolError:
                    seen.add(f"{name} refused")
    finally:
        stop.set()
        thread.join()
    assert [file.name for file in target.iterdir()] == ["f"]


def test_only_ordinary_text_of_limited_size(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "big").write_text("x" * 101)
    (folder / "binary").write_bytes(b"\x00\x01")
    (folder / "latin").write_bytes("é".encode("latin-1"))
    workspace = Workspace(folder, max_bytes=100)
    for path, message in [
        ("pipe", "not an ordinary file"),
        ("src", "a folder: list_files shows it"),
        ("big", "more than 100 bytes"),
        ("binary", "is not text"),
        ("latin", "not UTF-8"),
        ("nothing", "No such file"),
    ]:
        with pytest.raises(ToolError) as caught:
            workspace.read_file(path)
        assert message in str(caught.value)
    with pytest.raises(ToolError, match="102 bytes are more than 100"):
        workspace.write_file("new", "é" * 51)
    with pytest.raises(ToolError, match="left as it is"):
        workspace.write_file("src", "x")
    assert not (folder / "new").exists() and not list(folder.rglob("*.draft"))


def test_a_deep_path_spoils_no_later_call(folder: Path) -> None:
    workspace = Workspace(folder)
    deepest = "d/" * (MAX_DEPTH - 1) + "f"
    workspace.write_file(deepest, "here")
    with pytest.raises(ToolError, match=f"at most {MAX_DEPTH} parts, not 1001"):
        workspace.write_file("e/" * 1000 + "f", "here")
    assert workspace.search_text("here") == f"{deepest}:1: here"
    (folder / deepest).with_name("g").mkdir()  # what others made deeper yet is not looked at
    (folder / deepest).with_name("g").joinpath("h").write_text("here")
    assert workspace.search_text("here") == f"{deepest}:1: here"


def test_edits_are_exact(folder: Path) -> None:
    workspace = Workspace(folder)
    (folder / "f").write_text("a b a")
    for old, message in [("c", "does not contain"), ("", "does not contain"), ("a", "2 times")]:
        with pytest.raises(ToolError, match=message):
            workspace.edit("f", old, "x")
    assert workspace.edit("f", "a", "x", every=True) == "replaced 2 in f"
    assert (folder / "f").read_text() == "x b x"


async def test_edits_side_by_side_are_all_kept(folder: Path) -> None:
    (folder / "f").write_text("".join(f"<{n}>" for n in range(20)))
    tools = {tool.name: tool for tool in Workspace(folder).tools}

    async def one(n: int) -> str | None:
        arguments = f'{{"path": "f", "old": "<{n}>", "new": "[{n}]"}}'
        asked = {"id": str(n), "function": {"name": "edit", "arguments": arguments}}
        return (await perform(tools, asked)).error

    assert set(await asyncio.gather(*map(one, range(20)))) == {None}
    assert (folder / "f").read_text() == "".join(f"[{n}]" for n in range(20))


def test_long_lists_say_so(folder: Path) -> None:
    for n in range(MAX_LISTED):
        (folder / f"{n:04}.txt").write_text("needle\n")
    workspace = Workspace(folder)
    listed, found = workspace.list_files().split("\n"), workspace.search_text("needle").split("\n")
    assert len(listed) == MAX_LISTED + 1 and "[and more" in listed[-1]
    assert len(found) == MAX_MATCHES + 1 and "[and more" in found[-1]
    assert workspace.list_files(pattern="*.md") == "notes.md (14)"
    assert workspace.search_text("ÜBER", ignore_case=True) == "notes.md:1: Über die Zwei"
    with pytest.raises(ToolError, match="has 1 lines: there is no line 2"):
        workspace.read_file("notes.md", first_line=2)


def test_a_workspace_needs_a_folder(folder: Path) -> None:
    with pytest.raises(BadInput, match="is not a folder"):
        Workspace(folder / "notes.md")
