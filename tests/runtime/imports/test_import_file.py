"""Files into a real store: once each, resumable, redacted, and back as they were exported."""

import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import Event, Reward, Run
from cray_agents.runtime.exports.formats.atif import ATIF
from cray_agents.runtime.imports import Imported, Importing, import_file
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.redaction import Redactor
from tests.support.exports.example_runs import called, made, of_calls


def chats(path: Path, numbers: range) -> Path:
    with path.open("w") as file:
        for number in numbers:
            messages = [
                {"role": "user", "content": f"What is {number} + 1?"},
                {"role": "assistant", "content": f"{number + 1}, says jane@example.com"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def own(tmp_path: Path, runs: list[Run], write_run: Any) -> Path:
    path = tmp_path / "own.jsonl"
    lines = [json.dumps(record) for run in runs for record in write_run(run)]
    path.write_text("\n".join(lines))
    return path


async def test_importing_twice_is_once(tmp_path: Path) -> None:
    store = Store(Home(tmp_path / "home"))
    file = chats(tmp_path / "a.jsonl", range(1200))
    told: list[tuple[Imported, int, int]] = []
    done = await import_file(
        store, file, "openai", Importing(("x",)), lambda *progress: told.append(progress)
    )
    assert done == Imported(runs=1200)
    assert len(told) > 2 and told[-1] == (done, file.stat().st_size, file.stat().st_size)
    assert [t[0].runs for t in told] == sorted(t[0].runs for t in told)
    more = chats(tmp_path / "b.jsonl", range(1100, 1300))
    assert await import_file(store, more, "openai", Importing(("x",))) == Imported(100, 100)
    assert store.count(RunQuery(tags=["x"])) == 1300
    # said again with something else, it is the same run
    assert (await import_file(store, more, "openai", Importing(("y",), reward=1.0))).runs == 200
    assert store.count(RunQuery()) == 1300
    assert store.count(RunQuery(min_reward=1.0)) == 200
    await store.close()


async def test_a_conversation_that_a_file_tells_twice_is_one_run(tmp_path: Path) -> None:
    store = Store(Home(tmp_path / "home"))
    file = chats(tmp_path / "a.jsonl", range(3))
    first = json.loads(file.read_text().split("\n")[0])
    file.write_text(file.read_text() + json.dumps({**first, "source": "another"}) + "\n")
    assert await import_file(store, file, "openai") == Imported(runs=3, duplicates=1)
    assert store.count(RunQuery()) == 3
    await store.close()


async def test_what_is_bad_is_told_and_the_rest_is_there(tmp_path: Path) -> None:
    store = Store(Home(tmp_path / "home"))
    file = chats(tmp_path / "a.jsonl", range(30))
    lines = file.read_text().split("\n")
    file.write_text("\n".join([*lines[:10], "{]", *lines[10:]]))
    with pytest.raises(BadInput, match=r"a\.jsonl: line 11: not valid JSON(?s:.*)30 runs were imp"):
        await import_file(store, file, "openai")
    file.write_text("\n".join(lines))
    assert await import_file(store, file, "openai") == Imported(duplicates=30)
    await store.close()


async def test_half_a_character_is_replaced_and_told(tmp_path: Path) -> None:
    path = chats(tmp_path / "c.jsonl", range(3))
    path.write_text(path.read_text().replace("1 + 1?", "1 \\ud83d?"))
    store = Store(Home(tmp_path / "home"))
    done = await import_file(store, path, "openai")
    assert (done.runs, done.replaced) == (3, 1)
    assert "What is 1 ??" in {run.input for run in store.facts(RunQuery())}


async def test_what_is_imported_is_redacted(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    store = Store(home, redactor=Redactor(["email"], {}))
    await import_file(store, chats(tmp_path / "a.jsonl", range(1)), "openai")
    (run,) = store.runs()
    assert run.output == "1, says [redacted:email]"
    assert [(r.kind, r.count) for r in run.redacted] == [("email", 2)]
    await store.close()
    assert b"jane@" not in b"".join(p.read_bytes() for p in home.segments.iterdir())


@pytest.mark.parametrize("moved", [False, True], ids=["the same store", "another store"])
async def test_own_records_come_back_whole(tmp_path: Path, moved: bool) -> None:
    question = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "y"}
    given = of_calls(
        called([question], answer, tools=[{"type": "function", "function": {"name": "f"}}]),
        messages=[question, answer],
        tags=["t"],
        loop="l",
        iteration=2,
    )
    store = Store(Home(tmp_path / "first"))
    file = own(tmp_path, [given], lambda run: [run.model_dump(mode="json")])
    assert await import_file(store, file, "jsonl") == Imported(runs=1, calls=1)
    if moved:
        await store.close()
        store = Store(Home(tmp_path / "second"))
        assert await import_file(store, file, "jsonl") == Imported(runs=1, calls=1)
    assert store.run(given.id) == given
    assert await import_file(store, file, "jsonl") == Imported(duplicates=1)
    assert store.run(given.id) == given
    await store.close()


async def test_forgotten_runs_are_told(tmp_path: Path) -> None:
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    store = Store(Home(tmp_path / "home"))
    file = own(
        tmp_path, [of_calls(called([question], answer))], lambda r: [r.model_dump(mode="json")]
    )
    await import_file(store, file, "jsonl")
    await store.forget(["run-made"], "not needed")
    done = await import_file(store, file, "jsonl")
    assert done.forgotten == 2
    await store.close()


async def test_our_own_atif_is_read_with_its_messages_and_tokens(tmp_path: Path) -> None:
    question, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
    reward = Reward(name="right", value=1.0)
    given = of_calls(
        called([question], answer, logprobs=[-0.5, -1.0]),
        messages=[question, answer], output="y", rewards=[reward],
    )  # fmt: skip
    write_run = ATIF.write_run
    assert write_run is not None
    store = Store(Home(tmp_path / "home"))
    file = own(tmp_path, [given], lambda run: write_run(run).records)
    assert await import_file(store, file, "atif") == Imported(runs=1, calls=len(given.calls))
    (back,) = store.runs()
    assert back.imported == "atif" and back.output == given.output
    assert [m["role"] for m in back.trajectory.messages] == [
        m["role"] for m in given.trajectory.messages
    ]
    exact = ("prompt_token_ids", "token_ids", "logprobs")
    for one, other in zip(back.calls, given.calls, strict=True):
        assert [getattr(one, name) for name in exact] == [getattr(other, name) for name in exact]
    assert back.task is not None and back.task.metadata["extra"]["reward"] == given.reward
    await store.close()


async def test_imported_events_are_events_like_others(tmp_path: Path) -> None:
    store = Store(Home(tmp_path / "home"))
    file = own(tmp_path, [made(messages=[])], lambda run: [run.model_dump(mode="json")])
    await import_file(store, file, "jsonl")
    body = {"name": "late", "value": 0.5, "source": "judge", "time": 1.0}
    await store.append([Event(id="r", run_id="run-made", kind="reward", body=body)])
    assert store.run("run-made").reward == 0.5
    await store.close()
