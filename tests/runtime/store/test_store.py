"""The store keeps what it acknowledged, once, whatever happens to writers, lines and order."""

import asyncio
import itertools
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput, NotFound, StoreError
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import Event, Run, StopReason
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.compaction import compact, plan, tidy
from cray_agents.runtime.store.index import cache_of
from cray_agents.runtime.store.redaction import Redactor
from tests.support.store.plain_reader import events_of, lines_of


def call(run_id: str, call_id: str, started: float = 1.0, **more: Any) -> Event:
    body = {
        "id": call_id,
        "run_id": run_id,
        "model": "calc@1",
        "messages": [{"role": "user", "content": "2+2?"}],
        "message": {"role": "assistant", "content": "4"},
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4],
        "logprobs": [-0.1, -0.2],
        "finish_reason": "stop",
        "started": started,
        "seconds": 0.5,
        **more,
    }
    return Event(id=call_id, run_id=run_id, kind="call", body=body)


def described(run_id: str, calls: list[str], time: float = 1.0, **more: Any) -> Event:
    body = {
        "id": run_id,
        "agent": "calc",
        "model": "calc",
        "input": "2+2?",
        "output": "4",
        "stop_reason": "completed",
        "trajectory": {"messages": [], "turns": [{"call_id": name} for name in calls]},
        **more,
    }
    return Event(id=f"{run_id}.run.{time}", run_id=run_id, kind="run", body=body, time=time)


def reward(run_id: str, value: float, name: str = "correct", time: float = 1.0) -> Event:
    body = {"name": name, "value": value, "source": "function", "time": time}
    return Event(id=f"{run_id}.{name}.{time}", run_id=run_id, kind="reward", body=body)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.mark.slow
async def test_events_in_any_order_give_the_same_run(home: Home) -> None:
    events = [
        described("r", ["c1", "c2"]),
        call("r", "c1", 1.0),
        call("r", "c2", 2.0),
        reward("r", 1.0),
    ]
    seen: list[Run] = []
    for number, order in enumerate(itertools.permutations(events)):
        store = Store(Home(home.root / str(number)))
        for event in order:
            await store.append([event, event])  # and twice
        seen.append(store.run("r"))
        await store.close()
    assert all(run == seen[0] for run in seen)
    assert [c.id for c in seen[0].calls] == ["c1", "c2"]
    assert seen[0].reward == 1.0
    assert seen[0].usage.completion_tokens == 4


async def test_appending_twice_counts_duplicates(home: Home) -> None:
    store = Store(home)
    first, again = await asyncio.gather(
        store.append([call("r", "c1"), call("r", "c2")]), store.append([call("r", "c1")])
    )
    assert (first.appended, first.duplicates) == (2, 0)
    assert (again.appended, again.duplicates) == (0, 1)
    await store.close()
    assert len(list(lines_of(home))) == 2


async def test_the_newest_description_and_reward_count(home: Home) -> None:
    store = Store(home)
    await store.append([described("r", [], 2.0, output="new"), described("r", [], 1.0)])
    await store.append([reward("r", 0.0, time=2.0), reward("r", 1.0, time=1.0)])
    await store.append([reward("r", 0.5, "form")])
    run = store.run("r")
    assert run.output == "new"
    assert [(r.name, r.value) for r in run.rewards] == [("correct", 0.0), ("form", 0.5)]
    await store.close()


async def test_a_run_nobody_described_is_told_by_its_calls(home: Home) -> None:
    store = Store(home)
    await store.append([call("r", "c2", 2.0), call("r", "c1", 1.0)])
    await store.append([reward("only-a-reward", 1.0)])
    (run,) = store.runs()
    assert [c.id for c in run.calls] == ["c1", "c2"]
    assert (run.input, run.output, run.model) == ("2+2?", "4", "calc@1")
    with pytest.raises(NotFound):
        store.run("only-a-reward")
    await store.close()


CALCULATES = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "t", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}
    ],
}


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ({"message": CALCULATES, "finish_reason": "tool_calls"}, "unanswered"),
        ({"message": CALCULATES, "finish_reason": "stop"}, "unanswered"),  # as some parsers say
        ({"message": CALCULATES, "finish_reason": "cancelled"}, "cancelled"),
        ({"finish_reason": "error"}, "error"),
        ({"finish_reason": "stop"}, "completed"),
    ],
)
async def test_a_captured_run_is_completed_only_by_an_answer(
    home: Home, last: dict[str, Any], reason: str
) -> None:
    store = Store(home)
    await store.append([call("r", "c1", 1.0, message=CALCULATES), call("r", "c2", 2.0, **last)])
    assert store.run("r").stop_reason == reason
    (facts,) = store.facts(RunQuery(stop_reason=StopReason(reason)))
    assert facts.stop_reason == reason
    await store.close()


ASKED = [{"role": "user", "content": "2+2?"}]


def answered(*texts: str) -> list[dict[str, Any]]:
    """What is asked after these answers, each of which was doubted."""
    follows = [
        message
        for text in texts
        for message in (
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Sure?"},
        )
    ]
    return [*ASKED, *follows]


@pytest.mark.parametrize("reason", ["cancelled", "error"])
async def test_what_was_cut_off_and_asked_again_is_no_turn(home: Home, reason: str) -> None:
    store = Store(home)
    await store.append(
        [
            call("r", "c1", 1.0, finish_reason=reason),
            call("r", "c2", 2.0, finish_reason=reason),
            call("r", "c2-1", 2.0, finish_reason=reason),  # the request had two choices
            call("r", "c3", 3.0),
            call("r", "c4", 4.0, messages=answered("4"), finish_reason=reason),  # not asked again
            call("r", "c5", 5.0, messages=answered("4", "Yes")),
            call("last", "d1", 1.0, finish_reason=reason),
            call("last", "d2", 2.0, finish_reason=reason),
            described("named", ["e1", "e2"]),
            call("named", "e1", 1.0, finish_reason=reason),
            call("named", "e2", 2.0),
            described("unnamed", []),
            call("unnamed", "f1", 1.0, finish_reason=reason),
            call("unnamed", "f2", 2.0),
            # one request of two prompts that was left, and one that was repeated
            call("prompts", "g1", 1.0, finish_reason=reason, prompt_token_ids=[1]),
            call("prompts", "g1-1", 1.0, finish_reason=reason, prompt_token_ids=[2]),
            call("again", "h1", 1.0, finish_reason=reason, prompt_token_ids=[1]),
            call("again", "h1-1", 1.0, finish_reason=reason, prompt_token_ids=[2]),
            call("again", "h2", 2.0, prompt_token_ids=[1]),
            call("again", "h2-1", 2.0, prompt_token_ids=[2]),
        ]
    )
    turns = {run.id: [turn.call_id for turn in run.trajectory.turns] for run in store.runs()}
    assert turns == {
        "r": ["c3", "c4", "c5"],
        "last": ["d2"],
        "named": ["e1", "e2"],
        "unnamed": ["f2"],
        "prompts": ["g1", "g1-1"],
        "again": ["h2", "h2-1"],
    }
    facts = store.index.run("r")
    assert facts is not None and facts.calls == 6  # all are on record
    await store.close()


@pytest.mark.parametrize(
    ("made", "kept"),
    [  # each answer, when it was asked for, after which answers, and whether that was a retry
        ([("3", 1, ()), ("4", 2, ()), ("5", 3, "4")], "45"),
        ([("4", 1, ()), ("4", 2, ()), ("5", 3, "4")], "45"),
        ([("3", 1, ()), ("4", 2, ())], "34"),  # asked twice on purpose, for all we know
        ([("3", 1, ()), ("4", 2, (), True)], "4"),
        ([("3", 1, ()), ("4", 2, (), True), ("5", 3, (), True)], "5"),
        ([("3", 1, ()), ("4", 2, ()), ("5", 3, (), True)], "345"),  # of which is it a retry?
        ([("3", 1, ()), ("4", 2, (), True), ("5", 3, "3")], "35"),  # the first did come
        ([("3", 1, ()), ("4", 2, "3"), ("5", 3, ())], "345"),  # asked anew, later
        ([("3", 1, ()), ("4", 2, ()), ("5", 3, "3"), ("6", 4, "4")], "3456"),  # two ways on
    ],
)
async def test_an_answer_that_was_lost_and_asked_for_again_is_no_turn(
    home: Home, made: list[Any], kept: str
) -> None:
    store = Store(home)
    await store.append(
        [
            call(
                "r",
                f"c{number}",
                started,
                messages=answered(*after),
                message={"role": "assistant", "content": text},
                retry=bool(retry),
            )
            for number, (text, started, after, *retry) in enumerate(made)
        ]
    )
    run = store.run("r")
    assert "".join(str(c.message["content"]) for c in run.calls) == kept
    await store.close()


def calls_tool(call_id: str, arguments: str) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


async def test_of_several_choices_the_one_that_was_gone_on_with_is_the_turn(home: Home) -> None:
    def says(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    store = Store(home)
    result = {"role": "tool", "tool_call_id": "add:0", "content": "4"}
    await store.append(
        [
            call("told", "a", message=says("3")),
            call("told", "a-1", message=says("Sure")),
            call("told", "a-2", message=says("4 ")),
            call("told", "b", 2.0, messages=answered("4"), message=says("Sure")),
            call("told", "c", 3.0, messages=answered("4", "Sure")),
            call("tools", "d", message=calls_tool("add:0", '{"a": 1}')),
            call("tools", "d-1", message=calls_tool("add:0", '{"a": 2}')),
            call("tools", "e", 2.0, messages=[*ASKED, calls_tool("add:0", '{"a":2}'), result]),
            call("untold", "f", message=says("3")),
            call("untold", "f-1", message=says("4")),
            call("untold", "g", 2.0, messages=answered("four")),
            call("both", "h", message=says("3")),
            call("both", "h-1", message=says("4")),
            call("both", "i", 2.0, messages=answered("3")),
            call("both", "j", 3.0, messages=answered("4")),
            call("last", "k", message=says("3")),
            call("last", "k-1", message=says("4")),
            call("prompts", "l", message=says("3"), prompt_token_ids=[1]),
            call("prompts", "l-1", message=says("4"), prompt_token_ids=[2]),
            call("prompts", "m", 2.0, messages=answered("4")),
        ]
    )
    turns = {run.id: [turn.call_id for turn in run.trajectory.turns] for run in store.runs()}
    assert turns == {
        "told": ["a-2", "b", "c"],
        "tools": ["d-1", "e"],
        "untold": ["f", "f-1", "g"],
        "both": ["h", "h-1", "i", "j"],
        "last": ["k", "k-1"],
        "prompts": ["l", "l-1", "m"],
    }
    await store.close()


async def test_torn_tail_and_corrupt_line(home: Home) -> None:
    store = Store(home, "first")
    await store.append([call("r", "c1"), call("r", "c2"), call("r", "c3")])
    (segment,) = home.segments.glob("*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    flipped = lines[1].replace(b"[3,4]", b"[3,5]")  # another token, and still JSON
    torn = Home(home.root / "torn")
    torn.segments.mkdir(parents=True)
    (torn.segments / segment.name).write_bytes(lines[0] + flipped + lines[1] + lines[2][:-9])
    await store.close()

    reopened = Store(torn, "second")
    assert [c.id for c in reopened.run("r").calls] == ["c1", "c2"]
    assert [c.token_ids for c in reopened.run("r").calls] == [[3, 4], [3, 4]]
    (problem,) = reopened.problems
    assert (problem.segment, problem.offset) == (segment.stem, len(lines[0]))
    # the torn event was never acknowledged; sent again it is there once
    assert (await reopened.append([call("r", "c3")])).appended == 1
    assert len(Store(torn).run("r").calls) == 3
    await reopened.close()


async def test_other_writers_are_read_on(home: Home) -> None:
    ours, theirs = Store(home, "ours"), Store(home, "theirs")
    await theirs.append([call("a", "c1")])
    assert [run.id for run in ours.runs()] == ["a"]
    await theirs.append([call("b", "c2")])
    await ours.append([call("c", "c3")])
    assert [run.id for run in ours.runs()] == ["a", "b", "c"]
    assert [run.id for run in theirs.runs()] == ["a", "b", "c"]
    await ours.close()
    await theirs.close()


async def test_what_cannot_be_written_is_an_error(home: Home) -> None:
    home.segments.write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="segments"):
        Store(home)
    home.segments.unlink()
    store = Store(home)
    shutil.rmtree(home.segments)
    home.segments.write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="segments"):
        await store.append([call("r", "c1")])
    home.segments.unlink()
    assert (await store.append([call("r", "c1")])).appended == 1
    await store.close()


async def test_what_a_clock_that_is_ahead_told_is_forgotten_too(home: Home) -> None:
    store = Store(home)
    ahead = time.time() + 3600
    await store.append([described("early", ["c"], time=ahead), call("early", "c", time=1.0)])
    await store.append([reward("early", 1.0, time=ahead + 9), described("kept", [], time=ahead)])
    assert await store.forget(["early", "nobody"], "asked to") == 2
    assert [run.id for run in store.runs()] == ["kept"]
    await store.close()
    shutil.rmtree(cache_of(home).parent)
    again = Store(home)
    assert [run.id for run in again.runs()] == ["kept"] and not again.has("c")
    await again.close()


async def test_what_is_forgotten_is_gone_from_every_answer_and_from_the_disk(home: Home) -> None:
    store = Store(home)
    for name in ("kept", "gone"):
        await store.append([described(name, [f"{name}.c"]), call(name, f"{name}.c")])
    assert await store.forget(["gone"], "asked to") == 1
    assert [run.id for run in store.runs()] == ["kept"]
    assert not store.has("gone.c") and store.has("kept.c")
    with pytest.raises(NotFound):
        store.run("gone")
    # told again, late: it stays forgotten
    assert (await store.append([call("gone", "gone.c")])).duplicates == 1
    await store.close()

    store = Store(home)
    (group,) = plan(store, thorough=True)
    done = compact(store, group)
    assert done is not None and done.forgotten == 2
    assert {event["run_id"] for event in events_of(home) if event["kind"] != "forget"} == {"kept"}
    assert [run.id for run in store.runs()] == ["kept"]
    shutil.rmtree(cache_of(home).parent)
    assert [run.id for run in Store(home).runs()] == ["kept"]
    # a run of this name that happens later is another one
    await store.append([described("gone", [], time=time.time() + 1, output="new")])
    assert store.run("gone").output == "new" and store.run("gone").calls == []
    await store.close()


async def test_small_segments_become_one(home: Home) -> None:
    for number in range(10):
        store = Store(home)
        await store.append([described(f"r{number}", ["c"]), call(f"r{number}", f"c{number}")])
        await store.close()
    reader = Store(home)
    before = reader.runs()
    place = reader.index.place("c3")
    tidy(reader)
    assert len(list(home.segments.glob("*.jsonl*"))) == 1
    assert reader.index.place("c3") != place
    assert reader.runs() == before and len(before) == 10
    assert Store(home).runs() == before
    assert plan(reader, thorough=True) == []
    await reader.close()


async def test_text_is_found_in_what_was_said(home: Home) -> None:
    store = Store(home)
    said = [{"role": "user", "content": "Where is the Straße?"}]
    await store.append([described("a", [], trajectory={"messages": said})])
    await store.append([described("b", [], output={"city": "Zürich"}), call("c", "c1")])

    def ids(text: str) -> list[str]:
        return [run.id for run in store.runs(RunQuery(text=text))]

    assert next(store.facts(RunQuery(text="STRASSE"))).found == "where is the strasse?"
    assert next(store.facts(RunQuery(text="zÜrich"))).found == '{"city":"Zürich"}'
    assert ids("STRASSE") == ["a"] and ids("zÜrich") == ["b"] and ids("2+2") == ["a", "b", "c"]
    with pytest.raises(BadInput, match="text"):
        store.stats(RunQuery(text="where is"))
    assert ids('said "nothing"') == [] and store.count(RunQuery(text="where is")) == 1
    await store.close()


async def test_a_segment_that_somebody_deleted_is_gone(home: Home) -> None:
    store = Store(home)
    await store.append([described("a", ["c1"]), call("a", "c1")])
    await store.close()
    reader = Store(home)
    assert len(reader.runs()) == 1
    (segment,) = home.segments.glob("*.zst")
    segment.unlink()
    assert reader.runs() == [] and not reader.has("c1")
    await reader.close()


async def test_a_body_that_is_no_record_is_refused_before_it_is_written(home: Home) -> None:
    store = Store(home)
    with pytest.raises(StoreError, match="no call"):
        await store.append([Event(id="x", run_id="r", kind="call", body={"model": "m"})])
    assert list(lines_of(home)) == [] and not store.has("x")
    await store.close()


async def test_what_is_redacted_reaches_no_disk(home: Home) -> None:
    store = Store(home, redactor=Redactor(["email", "card"], {}))
    said = [{"role": "user", "content": "I am jo@example.org, card 4111 1111 1111 1111"}]
    await store.append([call("r", "c1", messages=said), described("r", ["c1"], input="2+2?")])
    run = store.run("r")
    assert run.calls[0].messages[0]["content"] == "I am [redacted:email], card [redacted:card]"
    assert {(found.kind, found.count) for found in run.calls[0].redacted} == {
        ("email", 1),
        ("card", 1),
    }
    assert run.calls[0].token_ids == run.calls[0].prompt_token_ids == []
    assert next(store.facts(RunQuery())).redacted
    await store.close()
    index = cache_of(home)
    kept = [*lines_of(home), *(path.read_bytes() for path in index.parent.iterdir())]
    assert not [data for data in kept if b"jo@example" in data or b"4111" in data]
