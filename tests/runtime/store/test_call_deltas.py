"""Calls are stored as what they add to an earlier call, and read whole."""

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cray_agents.errors import Corrupt
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import Event
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.call_deltas import KnownCalls, WholeCalls
from cray_agents.runtime.store.index import cache_of
from cray_agents.runtime.store.segments.line_format import event_in, line_of

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def call(number: int, messages: list[Any], prompt: list[int], run: str = "r", **more: Any) -> Event:
    body = {
        "id": f"{run}-c{number}",
        "run_id": run,
        "model": "m@1",
        "messages": messages,
        "message": {"role": "assistant", "content": f"answer {number}"},
        "tools": TOOLS,
        "prompt_token_ids": prompt,
        "token_ids": [9000 + number, 7],
        "logprobs": [-0.5, -0.25],
        "finish_reason": "stop",
        "started": float(number),
        "seconds": 0.5,
        **more,
    }
    return Event(id=body["id"], run_id=run, kind="call", body=body)


def conversation(turns: int, run: str = "r", *, rewritten: bool = False) -> list[Event]:
    """Each request repeats what came before, with the answer as it was or as the client has it."""
    messages: list[Any] = [{"role": "system", "content": "Help. " * 50}]
    prompt, events = [1, 2, 3] * 40, []
    for number in range(turns):
        messages = [*messages, {"role": "user", "content": f"question {number} " * 20}]
        prompt = [*prompt, *range(100, 140)]
        event = call(number, messages, prompt, run)
        events.append(event)
        answer = dict(event.body["message"]) | ({"refusal": None} if rewritten else {})
        messages, prompt = [*messages, answer], [*prompt, *event.body["token_ids"]]
    return events


def segments(home: Home) -> int:
    return sum(file.stat().st_size for file in home.segments.iterdir())


def written(store: Store) -> list[Any]:
    lines = [line for s in store.segments.list() for line in store.segments.read(s.stem)]
    return [event_in(line.data) for line in lines]  # type: ignore[union-attr]


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("together", [False, True])
async def test_a_run_grows_with_what_is_new(
    tmp_path: Path, rewritten: bool, together: bool
) -> None:
    sizes = []
    for turns in (50, 100):
        home, events = Home(tmp_path / str(turns)), conversation(turns, rewritten=rewritten)
        store = Store(home)
        for group in [events] if together else [[event] for event in events]:
            await store.append(group, many=together)
        assert [event.body for event in events] == list(store.bodies(store.places("r")[1].calls))
        assert store.body("r-c7") == events[7].body
        (run,) = store.runs(RunQuery(limit=5))
        assert [len(each.prompt_token_ids) for each in run.calls] == [
            len(event.body["prompt_token_ids"]) for event in events
        ]
        assert store.index.run("r").prompt_tokens == sum(  # type: ignore[union-attr]
            len(event.body["prompt_token_ids"]) for event in events
        )
        sizes.append(segments(home))
        await store.close()
        shutil.rmtree(cache_of(home).parent)
        again = Store(home, "again")  # sealed, and with an index made from its lines
        assert [c.model_dump() for c in again.run("r").calls] == [c.model_dump() for c in run.calls]
        await again.close()
    assert sizes[1] < 2.1 * sizes[0]


async def test_choices_and_branches_share_what_they_have_in_common(tmp_path: Path) -> None:
    store, start = Store(Home(tmp_path)), conversation(3)
    await store.append(start)
    last = start[-1].body
    choices = [
        call(number, last["messages"], last["prompt_token_ids"], message=answer)
        for number, answer in enumerate([{"role": "assistant", "content": t} for t in "xyz"], 10)
    ]
    await store.append(choices)
    other = [{"role": "system", "content": "Another agent of the run. " * 20}]
    await store.append([call(20, other, [4] * 90)])
    await store.append([call(21, [*other, *other], [4] * 95)])
    events = [*start, *choices]
    assert [event.body for event in events] == [store.body(event.id) for event in events]
    assert store.body("r-c21")["prompt_token_ids"] == [4] * 95
    after = {e["id"]: e["body"].get("after", {}).get("call") for e in written(store)}
    assert after["r-c0"] is after["r-c20"] is None
    assert after["r-c10"] and after["r-c12"] and after["r-c21"] == "r-c20"
    await store.close()


async def test_nothing_goes_on_from_a_call_that_is_not_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, events = Store(Home(tmp_path)), conversation(3)
    await store.append(events[:1])

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cray_agents.runtime.disk.journal.LineFile.append", full)
        with pytest.raises(OSError):
            await store.append(events[1:2])
    await store.append(events[2:])
    assert store.body("r-c2") == events[2].body
    assert [e["body"]["after"]["call"] for e in written(store)[1:]] == ["r-c0"]
    await store.close()


async def test_a_forgotten_run_begins_anew(tmp_path: Path) -> None:
    store, events = Store(Home(tmp_path)), conversation(4)
    await store.append(events[:2])
    await store.forget(["r"], "wanted")
    for event in events[2:]:
        await store.append([event.model_copy(update={"time": event.time + 3600})])
    assert [e["body"].get("after", {}).get("call") for e in written(store)[-2:]] == [None, "r-c2"]
    assert store.body("r-c3") == events[3].body
    await store.close()


async def test_what_goes_on_from_a_lost_call_is_named(tmp_path: Path) -> None:
    home, events = Home(tmp_path), conversation(6)
    store = Store(home)
    for event in events:
        await store.append([event])
    (segment,) = home.segments.glob("*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    segment.write_bytes(
        b"".join([*lines[:2], lines[2].replace(b"answer 2", b"answer 9"), *lines[3:]])
    )
    assert store.body("r-c1") == events[1].body
    with pytest.raises(Corrupt, match="goes on from r-c2, which cannot be read"):
        store.body("r-c4")
    with pytest.raises(Corrupt):
        store.run("r")
    assert "run r cannot be read whole" in store.problems[-1].message
    await store.close()


async def test_another_record_of_the_same_id_is_not_taken_for_it(tmp_path: Path) -> None:
    """Two hosts may record a call under one key at once; the first one counts."""
    home, events = Home(tmp_path), conversation(3)
    ours = Store(home, "ours")
    theirs = Store(home, "theirs")
    twin = events[1].body | {"message": {"role": "assistant", "content": "another answer"}}
    await ours.append(events[:1])
    await asyncio.gather(
        ours.append([events[1].model_copy(update={"body": twin})], new=True),
        theirs.append(events[1:2], new=True),
    )
    await theirs.append(events[2:])
    for store in (ours, theirs):
        store.refresh()
        first = store.body("r-c1")["message"]["content"]
        if first == "answer 1":
            assert store.body("r-c2") == events[2].body
        else:
            with pytest.raises(Corrupt, match="call r-c2 goes on from r-c1"):
                store.body("r-c2")
        await store.close()


scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=90)
contents = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
message_lists = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": contents}))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(message_lists, st.lists(st.integers(0, 3), max_size=60)), max_size=6))
def test_any_calls_are_read_as_they_were(calls: list[tuple[list[Any], list[int]]]) -> None:
    known, lines, bodies = KnownCalls(), {}, []
    history: list[Any] = []
    for number, (messages, tokens) in enumerate(calls):
        if random.Random(number).random() < 0.7:
            messages, tokens = [*history, *messages], [1, 2, 3, 4] * 30 + tokens
        event = call(number, messages, tokens)
        body, new = known.shorten(event.body)
        text = line_of(event.model_copy(update={"body": body}))
        assert new is not None
        new.crc = text[-10:-2].decode()
        known.learn(new)
        lines[event.id], history = event_in(text), messages
        bodies.append(event.body)
    wholes = WholeCalls(lambda _: lines)
    for body in random.Random(0).sample(bodies, len(bodies)):
        made = wholes.whole(lines[body["id"]])
        assert line_of(Event(id="e", run_id="r", kind="call", body=body, time=0.0)) == line_of(
            Event(id="e", run_id="r", kind="call", body={n: made[n] for n in body}, time=0.0)
        )
        assert made.keys() == body.keys()
