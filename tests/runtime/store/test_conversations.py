"""Requests continue the run of their conversation, in the shapes that frameworks send back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cray_agents.engines.scripted import ScriptedEngine, tool_call
from cray_agents.errors import EngineError
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.gateway.http.auth import Mode
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.store.conversations import Conversations, chain
from tests.support.scripted_gateway import CHAT, TOOL, Gateway, Paced, Reply, says, served, until

SYSTEM: dict[str, Any] = {"role": "system", "content": "Use the tool."}
OPENING = [SYSTEM, *says("What is 47 + 385?")]


def message(reply: Reply) -> dict[str, Any]:
    said: dict[str, Any] = reply.json["choices"][0]["message"]
    return said


def result(reply: Reply, text: str = "432") -> dict[str, Any]:
    call_id = message(reply)["tool_calls"][0]["id"]
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def numbered() -> ScriptedEngine:
    """Every answer is another one; with tools it is a call, whose id vLLM would make unique."""
    count = iter(range(10**6))

    def say(request: dict[str, Any]) -> Any:
        number = next(count)
        if request.get("tools"):
            return {**tool_call("add", a=47, b=385), "id": f"call_{number}"}
        return f"answer {number}"

    return ScriptedEngine(say)


@asynccontextmanager
async def numbering(folder: Path, **options: Any) -> AsyncIterator[Gateway]:
    async with served(folder, numbered(), **options) as gateway:
        yield gateway


async def test_a_plain_conversation_is_one_run(tmp_path: Path) -> None:
    async with numbering(tmp_path) as gateway:
        messages = list(OPENING)
        runs = []
        for stream in (False, True, False):
            reply = await gateway.ask(messages, stream=stream)
            runs.append(reply.run_id)
            said = gateway.calls(reply.run_id)[-1].message
            messages += [said, *says("And then?")]
        assert len(set(runs)) == 1 and len(gateway.store.runs()) == 1
        run = gateway.store.run(runs[0])
        assert [len(call.messages) for call in run.calls] == [2, 4, 6]
        assert run.trajectory.messages == messages[:-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_come_back_by_their_ids(tmp_path: Path, stream: bool) -> None:
    async with numbering(tmp_path) as gateway:
        first = await gateway.ask(OPENING, tools=[TOOL])
        other = await gateway.ask(OPENING, tools=[TOOL])  # the same question, another conversation
        assert first.run_id != other.run_id
        for reply in (first, other):
            turns = [*OPENING, message(reply), result(reply)]
            assert (await gateway.ask(turns, stream=stream)).run_id == reply.run_id


def compact(said: dict[str, Any]) -> dict[str, Any]:
    """As pydantic-ai and langchain send it: the arguments are JSON that was made anew."""
    (call,) = said["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    text = json.dumps(arguments, separators=(",", ":"))
    function = {**call["function"], "arguments": text}
    return {"content": None, "tool_calls": [{**call, "function": function}], "role": "assistant"}


def as_text(said: dict[str, Any]) -> dict[str, Any]:
    """As smolagents sends it: no tool call, but its Python repr in a part of text."""
    calls = [{**call} for call in said["tool_calls"]]
    return {
        "role": "assistant",
        "content": [{"type": "text", "text": f"\nCalling tools:\n{calls}"}],
    }


async def test_what_was_said_may_come_back_rewritten(tmp_path: Path) -> None:
    async with numbering(tmp_path) as gateway:
        replies = [await gateway.ask(OPENING, tools=[TOOL]) for _ in range(4)]
        for index, reply in enumerate(replies):
            rewritten = (compact if index % 2 else as_text)(message(reply))
            observed = says("Observation:\n432") if index % 2 == 0 else [result(reply)]
            again = await gateway.ask([*OPENING, rewritten, *observed])
            assert again.run_id == reply.run_id
        stripped = await gateway.ask(says("a question"))
        text = {"role": "assistant", "content": [{"type": "text", "text": stripped.text + "\nCa"}]}
        more = await gateway.ask([*says("a question"), text, *says("more")])
        assert more.run_id == stripped.run_id


async def test_an_error_that_smolagents_adds_to_the_last_message(tmp_path: Path) -> None:
    def parts(text: str) -> list[Any]:
        return [{"role": "user", "content": [{"type": "text", "text": text}]}]

    task = "New task:\nfirst?"
    error = "\nError:\nUnknown tool fly, should be one of: greet.\nNow let's retry: take care"
    async with numbering(tmp_path) as gateway:
        for wrap in (parts, says):
            first = await gateway.ask([SYSTEM, *wrap(task)], tools=[TOOL])
            second = await gateway.ask([SYSTEM, *wrap(task + error)], tools=[TOOL])
            third = await gateway.ask([SYSTEM, *wrap(task + error + error)], tools=[TOOL])
            assert first.run_id == second.run_id == third.run_id
            # two that could be meant: neither is
            await gateway.ask([SYSTEM, *wrap(task)], tools=[TOOL])
            unclear = await gateway.ask([SYSTEM, *wrap(task + "\nError:\nagain")], tools=[TOOL])
            assert unclear.run_id != first.run_id
            # an answer without a tool call is no failed one
            plain = await gateway.ask([SYSTEM, *wrap("What is 4?")])
            more = await gateway.ask([SYSTEM, *wrap("What is 4?\nError: what is 5?")])
            assert more.run_id != plain.run_id


async def test_the_same_messages_again_are_another_run(tmp_path: Path) -> None:
    async with numbering(tmp_path) as gateway:
        replies = [await gateway.ask(OPENING) for _ in range(3)]
        assert len({reply.run_id for reply in replies}) == 3
        assert {len(run.calls) for run in gateway.store.runs()} == {1}


async def test_many_with_the_same_opening_at_once_are_kept_apart(tmp_path: Path) -> None:
    async def talk(gateway: Gateway, tools: bool) -> tuple[str, list[Any]]:
        messages, runs = list(OPENING), []
        for turn in range(3):
            fields: dict[str, Any] = {"tools": [TOOL]} if tools else {}
            reply = await gateway.ask(messages, **fields)
            runs.append(reply.run_id)
            follows = [result(reply)] if tools else says(f"and {turn}?")
            messages = [*messages, message(reply), *follows]
        assert len(set(runs)) == 1, runs
        return runs[0], messages

    async with numbering(tmp_path) as gateway:
        talks = await asyncio.gather(*(talk(gateway, n % 2 == 0) for n in range(60)))
        assert len({run_id for run_id, _ in talks}) == 60
        for run_id, messages in talks:
            calls = gateway.calls(run_id)
            assert [call.messages for call in calls] == [messages[:2], messages[:4], messages[:6]]


async def test_answers_that_are_alike_are_gone_on_with_once_each(tmp_path: Path) -> None:
    async with served(tmp_path, ScriptedEngine(lambda request: "Hm.")) as gateway:
        first = [await gateway.ask(OPENING) for _ in range(5)]
        turns = [*OPENING, {"role": "assistant", "content": "Hm."}, *says("Well?")]
        second = await asyncio.gather(*(gateway.ask(turns) for _ in range(5)))
        assert {reply.run_id for reply in second} == {reply.run_id for reply in first}
        assert {len(run.calls) for run in gateway.store.runs()} == {2}


@pytest.mark.parametrize("why", ["full", "bad", "left"])
async def test_a_request_that_is_refused_uses_up_no_answer(tmp_path: Path, why: str) -> None:
    """Twice: the second one must not meet the answer of another client, either."""
    said = EngineError("too long", status=400)
    engine = ScriptedEngine(lambda request: said if len(request["messages"]) == 5 else "Hm.")
    place = Admission(1, 1)
    async with served(tmp_path, engine, admission=place) as gateway:
        ann, bob = [(await gateway.ask(OPENING)).run_id for _ in range(2)]
        turns = [*OPENING, {"role": "assistant", "content": "Hm."}]
        more = [*turns, *says("I am Ann")]
        if why == "bad":
            for _ in range(2):
                assert (await gateway.ask([*more, *says("too long")])).status == 400
        else:
            engine.delay = 600.0
            for _ in range(2):
                leaving = [
                    asyncio.create_task(gateway.ask([*turns, *says("no turn")])) for _ in range(2)
                ]
                await until(lambda: (place.inside(), place.waiting()) == (1, 1))
                if why == "full":
                    assert (await gateway.ask(more)).status == 429
                for asking in leaving:
                    asking.cancel()
                await until(lambda: not place.demand)
            engine.delay = 0.0
        follows = [(await gateway.ask([*turns, *says(f"I am {n}")])).run_id for n in ("Ann", "Bob")]
        assert {*follows} == {ann, bob}
        assert {len(run.calls) for run in gateway.store.runs()} == {2}


async def test_an_answer_of_nothing_is_found_by_its_request(tmp_path: Path) -> None:
    """As vLLM streams a broken tool call through the responses API: there is no item of it."""
    nothing = {"role": "assistant", "content": None}
    async with served(tmp_path, ScriptedEngine(lambda request: dict(nothing))) as gateway:
        first, other = [await gateway.ask(OPENING) for _ in range(2)]
        more = [[*OPENING, *says("Go on")], [*OPENING, message(other), *says("Well?")]]
        found = [await gateway.ask(messages) for messages in more]
        assert {reply.run_id for reply in found} == {first.run_id, other.run_id}
        last = await gateway.ask([*more[0], *says("And?")])
        assert last.run_id == found[0].run_id


async def test_what_was_cut_off_is_repeated_in_its_place(tmp_path: Path) -> None:
    engine = Paced(lambda request: "explode" if request.get("seed") else "Hm.")
    async with served(tmp_path, engine) as gateway:
        for _ in range(2):
            await gateway.ask(OPENING)
        turns = [*OPENING, {"role": "assistant", "content": "Hm."}]
        ann, bob = ([*turns, *says(f"I am {name}")] for name in ("Ann", "Bob"))
        first = await gateway.ask(bob)
        cut = await gateway.ask(ann, stream=True, seed=1)
        assert b"the engine died" in cut.body
        again = await gateway.ask(ann)
        assert again.run_id == cut.run_id != first.run_id


ENDS = st.sampled_from(["refused", "cut", "taken"])


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 2), ENDS), max_size=40))
def test_no_run_holds_the_requests_of_two_clients(alike: int, steps: list[tuple[int, str]]) -> None:
    """Clients get equal answers, and say the same `alike` times; each repeats what failed."""
    conversations = Conversations()
    taken = [0, 0, 0]
    owners: dict[str, set[int]] = {}
    for number, (client, end) in enumerate(steps):
        said = [f"{turn}" if turn < alike else f"{turn} of {client}" for turn in range(9)]
        messages = says(said[0])
        for text in said[1 : taken[client] + 1]:
            messages += [{"role": "assistant", "content": "Hm."}, *says(text)]
        hashes = chain(messages, "")
        known = conversations.find(hashes, messages)
        run_id = known.run_id if known else f"run_{number}"
        if end != "refused" and taken[client] >= alike:
            owners.setdefault(run_id, set()).add(client)
        if known is not None:
            known.end(recorded=end != "refused", cut=end == "cut")
            known.end()
        if end == "taken":
            conversations.learn(hashes[-1], run_id, [], "Hm.")
            taken[client] = min(taken[client] + 1, 8)
    assert all(len(clients) == 1 for clients in owners.values()), owners


async def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with numbering(tmp_path) as gateway:
        plain = await gateway.ask(says("one"))
        tools = await gateway.ask(OPENING, tools=[TOOL])
    async with numbering(tmp_path) as gateway:
        turns = [*says("one"), message(plain), *says("two")]
        assert (await gateway.ask(turns)).run_id == plain.run_id
        turns = [*OPENING, compact(message(tools)), result(tools)]
        assert (await gateway.ask(turns)).run_id == tools.run_id
        assert len(gateway.store.runs()) == 2


async def test_conversations_of_others_are_not_gone_on_with(tmp_path: Path) -> None:
    mode: Mode = "required"
    async with numbering(tmp_path, api_keys=mode) as gateway:
        keys = Keys(gateway.services.home)
        ann, bob = ({"Authorization": f"Bearer {keys.create(name)[1]}"} for name in ("ann", "bob"))
        first = await gateway.ask(OPENING, tools=[TOOL], headers=ann)
        assert first.status == 200
        turns = [*OPENING, message(first), result(first)]
        assert (await gateway.ask(turns, headers=bob)).run_id != first.run_id
        assert (await gateway.ask(turns, headers=ann)).run_id == first.run_id


async def test_a_run_that_is_named_is_the_run(tmp_path: Path) -> None:
    async with numbering(tmp_path) as gateway:
        for name in ({"headers": {"X-Run-Id": "run_a"}}, {"path": f"/runs/run_b{CHAT}"}):
            first = await gateway.ask(OPENING, **name)  # type: ignore[arg-type]
            other = await gateway.ask(says("something else"), **name)  # type: ignore[arg-type]
            assert first.run_id == other.run_id in ("run_a", "run_b")
            # it was named once, and must be again: nothing else finds it
            turns = [*OPENING, message(first), *says("and?")]
            assert (await gateway.ask(turns)).run_id != first.run_id
        both = await gateway.ask(OPENING, path=f"/runs/run_c{CHAT}", headers={"X-Run-Id": "run_d"})
        assert both.run_id == "run_c"  # the path says it
        bad = await gateway.ask(OPENING, headers={"X-Run-Id": "a b"})
        assert (bad.status, bad.json["error"]["param"]) == (400, "X-Run-Id")


async def test_what_was_cut_off_is_not_gone_on_with(tmp_path: Path) -> None:
    async with numbering(tmp_path) as gateway:
        first = await gateway.ask(says("one"))
        forged = [*says("one"), {"role": "assistant", "content": "never said"}, *says("two")]
        # the only answer there was, rewritten beyond recognition: frameworks do that
        assert (await gateway.ask(forged)).run_id == first.run_id
        await gateway.ask(says("one"))
        assert (await gateway.ask(forged)).run_id != first.run_id
        unknown = {"role": "tool", "tool_call_id": "call_x", "content": "?"}
        assert (await gateway.ask([*says("one"), unknown])).run_id != first.run_id


def test_only_so_many_are_remembered() -> None:
    conversations = Conversations(most=2)
    asked = [says(f"{number}") for number in range(3)]
    for number, messages in enumerate(asked):
        conversations.learn(chain(messages, "")[-1], f"run_{number}", [], f"a{number}")
    found = []
    for number, messages in enumerate(asked):
        turns = [*messages, {"role": "assistant", "content": f"a{number}"}, *says("?")]
        found.append(conversations.find(chain(turns, ""), turns))
    assert [known and known.run_id for known in found] == [None, "run_1", "run_2"]


@pytest.mark.parametrize("texts", [("4", "42"), ("42", "4")])
def test_of_answers_that_begin_alike_the_whole_one_is_meant(texts: tuple[str, str]) -> None:
    """In whatever order they were recorded: each conversation goes on in its own run."""
    conversations, asked = Conversations(), says("6 * 7?")
    for text in texts:
        conversations.learn(chain(asked, "")[-1], f"run_{text}", [], text)
    for text in ("42", "4"):
        turns = [*asked, {"role": "assistant", "content": text}, *says("Sure?")]
        known = conversations.find(chain(turns, ""), turns)
        assert known is not None and known.run_id == f"run_{text}"


def test_empty_fields_and_the_order_of_keys_make_no_difference() -> None:
    one = chain([{"role": "user", "content": "a", "name": None, "tool_calls": []}], "k")
    other = chain([{"content": "a", "role": "user"}], "k")
    assert one == other != chain([{"content": "a", "role": "user"}], "l")
