"""Several replicas and a change of weights: staging, rolling, leaving one out; scripted engines."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineUnavailable, Overtaken, SwapError
from cray_agents.ports import EngineCall
from cray_agents.records import ProbePrompt, ProbeReport
from cray_agents.runtime.pool import upkeep
from cray_agents.runtime.pool.pool import Pool, SwapMode
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import Paced, served
from tests.support.scripted_pool import (
    Mortal,
    ask,
    checkpoint,
    exchange,
    probe,
    says_version,
    serving,
    until,
)

WRONG = [ProbePrompt(token_ids=[1, 2, 5], logprobs=[-1.0, -2.5])]  # of no checkpoint


def residents(count: int, **engine: Any) -> list[InProcessEngine]:
    return [InProcessEngine(ScriptedEngine(says_version, **engine)) for _ in range(count)]


class Broken(Mortal):
    """Its engine drifts, so that no probe matches, except under the first version."""

    def __init__(self) -> None:
        super().__init__(ScriptedEngine(says_version))
        self.mended = False
        load = self.engine.load

        async def drifting(
            directory: Path, version: str, *, keep: bool = False
        ) -> dict[str, float]:
            self.engine.drift = 0.0 if version == "m@1" or self.mended else 0.5
            return await load(directory, version, keep=keep)

        self.engine.load = drifting  # type: ignore[method-assign, assignment]


def versions_and_states(pool: Pool) -> list[tuple[str, str]]:
    return [(status["version"], status["state"]) for status in pool.status()]


async def test_a_candidate_is_staged_beside_the_incumbent(tmp_path: Path) -> None:
    async with serving(tmp_path, *residents(2)) as pool:
        report = await pool.stage(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert report.passed and report.version == "m@2"
        assert sorted(versions_and_states(pool)) == [("m@1", "serving"), ("m@2", "serving")]
        answers = await asyncio.gather(*(ask(pool, v) for v in ("m@1", "m@2") * 3))
        assert answers == ["m@1", "m@2"] * 3
        # rejected: the next candidate takes its place, and then the incumbent has both again
        await pool.stage(checkpoint(tmp_path, 3), "m@3", probe(3))
        assert sorted(versions_and_states(pool)) == [("m@1", "serving"), ("m@3", "serving")]
        await pool.stage(checkpoint(tmp_path, 1), "m@1", probe(1))
        assert versions_and_states(pool) == [("m@1", "serving")] * 2


async def test_staging_leaves_the_others_serving_and_takes_the_least_busy(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def slow(request: dict[str, Any], version: str) -> str:
        await gate.wait()
        return version

    hosts = [InProcessEngine(ScriptedEngine(slow)) for _ in range(2)]
    async with serving(tmp_path, *hosts) as pool:
        busy = [asyncio.create_task(ask(pool, "m@1")) for _ in range(3)]
        await until(lambda: [s["in_flight"] for s in pool.status()] == [2, 1])
        staging = asyncio.create_task(pool.stage(checkpoint(tmp_path, 2), "m@2", probe(2)))
        await until(lambda: pool.status()[1]["state"] == "swapping")
        assert pool.serves("m@1") and versions_and_states(pool)[0] == ("m@1", "serving")
        gate.set()
        await staging
        assert await asyncio.gather(*busy) == ["m@1"] * 3
        assert versions_and_states(pool) == [("m@1", "serving"), ("m@2", "serving")]


async def test_a_needed_version_is_not_displaced(tmp_path: Path) -> None:
    async with serving(tmp_path, *residents(3)) as pool:
        await pool.stage(checkpoint(tmp_path, 2), "m@2", probe(2))
        await pool.stage(checkpoint(tmp_path, 3), "m@3", probe(3), protected=["m@2"])
        assert {version for version, _ in versions_and_states(pool)} == {"m@1", "m@2", "m@3"}
        with pytest.raises(SwapError, match="no replica can be spared"):
            await pool.stage(checkpoint(tmp_path, 4), "m@4", probe(4), protected=["m@2", "m@3"])
        assert {version for version, _ in versions_and_states(pool)} == {"m@1", "m@2", "m@3"}


async def test_a_single_replica_is_staged_in_place(tmp_path: Path) -> None:
    async with serving(tmp_path, *residents(1)) as pool:
        await pool.stage(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert await ask(pool, "m@2") == "m@2"
        with pytest.raises(SwapError, match="m@2 serves on"):
            await pool.stage(checkpoint(tmp_path, 3), "m@3", WRONG)
        await pool.stage(checkpoint(tmp_path, 1), "m@1", probe(1))
        assert await ask(pool, "m@1") == "m@1"


async def test_a_candidate_that_is_not_proven_gives_the_spare_back(tmp_path: Path) -> None:
    async with serving(tmp_path, *residents(2)) as pool:
        with pytest.raises(SwapError, match=r"3 tries.*m@1 serves on"):
            await pool.stage(checkpoint(tmp_path, 2), "m@2", WRONG)
        assert versions_and_states(pool) == [("m@1", "serving")] * 2


async def test_a_spare_that_is_broken_is_passed_over(tmp_path: Path) -> None:
    dead = Mortal(ScriptedEngine(says_version))
    async with serving(tmp_path, dead, *residents(2)) as pool:
        dead.broken = True
        dead.die()
        await until(lambda: versions_and_states(pool)[0] == ("m@1", "down"))
        await pool.stage(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert pool.serves("m@1") and pool.serves("m@2")
        with pytest.raises(SwapError, match="does not come up"):  # what is needed is kept
            await pool.stage(checkpoint(tmp_path, 3), "m@3", probe(3), protected=["m@2"])
        assert pool.serves("m@1") and pool.serves("m@2")


class Held(Mortal):
    """Waits in its engine's load of a later version, until it is let go."""

    def __init__(self, name: str, began: list[str]) -> None:
        super().__init__(ScriptedEngine(says_version))
        self.name, self.began = name, began
        self.go = asyncio.Event()
        self.failing = False
        load = self.engine.load

        async def held(directory: Path, version: str, *, keep: bool = False) -> dict[str, float]:
            if version != "m@1":
                began.append(self.name)
                await self.go.wait()
            if self.failing and version != "m@1":
                raise EngineUnavailable("it was killed")
            return await load(directory, version, keep=keep)

        self.engine.load = held  # type: ignore[method-assign, assignment]


@asynccontextmanager
async def held_swap(
    folder: Path, names: str, **settings: Any
) -> AsyncIterator[tuple[Pool, dict[str, Held], list[str], "asyncio.Task[ProbeReport]"]]:
    """A pool whose replicas, named by letters, are asked to change, and have not begun to."""
    began: list[str] = []
    hosts = {name: Held(name, began) for name in names}
    async with serving(folder, *hosts.values(), **settings) as pool:
        swap = asyncio.create_task(pool.swap(checkpoint(folder, 2), "m@2", probe(2)))
        try:
            yield pool, hosts, began, swap
        finally:
            swap.cancel()


def away(pool: Pool) -> int:
    return sum(state != "serving" for _, state in versions_and_states(pool))


async def test_a_share_of_the_replicas_changes_at_once_after_a_first_proof(tmp_path: Path) -> None:
    async with held_swap(tmp_path, "abcdefgh", swap_share=0.4) as (pool, hosts, began, swap):
        await until(lambda: began == ["a"])
        assert away(pool) == 1, "the first proves it alone"
        hosts["a"].go.set()
        await until(lambda: began == ["a", "b", "c", "d"])
        assert away(pool) == 3, "0.4 of 8 are 3"
        hosts["c"].go.set()  # the next begins as soon as one has ended
        await until(lambda: began == ["a", "b", "c", "d", "e"])
        assert away(pool) == 3
        for host in hosts.values():
            host.go.set()
        assert (await swap).passed
        assert began == list("abcdefgh") and versions_and_states(pool) == [("m@2", "serving")] * 8


async def test_the_last_replica_that_serves_stays_until_another_is_back(tmp_path: Path) -> None:
    async with held_swap(tmp_path, "abcd", swap_share=0.5) as (pool, hosts, began, swap):
        hosts["a"].go.set()
        await until(lambda: began == list("abc"))
        hosts["a"].broken = True
        hosts["a"].die()
        await until(lambda: not pool.serves("m@2"))
        hosts["c"].failing = True
        hosts["c"].go.set()
        await until(lambda: versions_and_states(pool)[2] == ("m@2", "out"))
        await asyncio.sleep(0.02)  # c is given up by now
        assert "d" not in began and pool.serves("m@1"), "only d answers"
        hosts["b"].go.set()
        hosts["d"].go.set()
        assert (await swap).passed
        assert began[-1] == "d" and pool.serving == 2


async def test_replicas_that_fail_among_others_are_left_out(tmp_path: Path) -> None:
    async with held_swap(tmp_path, "abcde", swap_share=0.8) as (pool, hosts, began, swap):
        hosts["a"].go.set()
        await until(lambda: began == list("abcde"))
        hosts["c"].failing = True
        for host in hosts.values():
            host.go.set()
        assert (await swap).version == "m@2"
        out = ("m@2", "out")
        assert [state for state in versions_and_states(pool) if state[1] != "serving"] == [out]
        assert "it was killed" in pool.status()[2]["error"] and began.count("c") >= 3
        assert all(began.count(name) == 1 for name in "abde"), "its failure stops no other"


async def test_a_rollback_lets_none_begin_and_those_that_load_end(tmp_path: Path) -> None:
    async with held_swap(tmp_path, "abcde", swap_share=0.4) as (pool, hosts, began, swap):
        hosts["a"].go.set()
        await until(lambda: began == list("abc"))
        with pool.rollback_waiting():
            hosts["b"].go.set()
            hosts["c"].go.set()
            with pytest.raises(Overtaken):
                await swap
        assert began == list("abc")
        assert [v for v, _ in versions_and_states(pool)] == ["m@2"] * 3 + ["m@1"] * 2
        assert away(pool) == 0


async def test_a_pool_that_stops_ends_all_changes_under_way(tmp_path: Path) -> None:
    async with held_swap(tmp_path, "abcde", swap_share=0.8) as (pool, hosts, began, swap):
        hosts["a"].go.set()
        await until(lambda: began == list("abcde"))
        await pool.stop()
        with pytest.raises(asyncio.CancelledError):
            await swap
        assert [state for _, state in versions_and_states(pool)] == ["down"] * 5
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        assert not [name for name in names if "rolling_swap" in name]


@pytest.mark.parametrize("first", [True, False])
async def test_a_replica_that_cannot_prove_it_is_left_out(
    tmp_path: Path, first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broken, good = Broken(), InProcessEngine(ScriptedEngine(says_version))
    async with serving(tmp_path, *([broken, good] if first else [good, broken])) as pool:
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert sorted(versions_and_states(pool)) == [("m@2", "out"), ("m@2", "serving")]
        out = next(status for status in pool.status() if status["state"] == "out")
        assert "failed its logprob check in 3 tries" in out["error"] and out["probe"] is None
        assert "left out" in caplog.text
        assert await ask(pool, "m@2") == "m@2" and broken.engine.requests == []
        # reloaded once more, then from scratch; put back only while nobody else had proven it
        assert broken.engine.loaded == ["m@1", "m@2", "m@2", "m@2", *(["m@1"] if first else [])]
        broken.mended = True
        await pool.swap(checkpoint(tmp_path, 3), "m@3", probe(3))
        assert versions_and_states(pool) == [("m@3", "serving")] * 2


async def test_a_replica_that_was_left_out_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_OUT_BACKOFF", (0.01, 0.02))
    broken = Broken()
    async with serving(tmp_path, *residents(1), broken) as pool:
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        await until(lambda: pool.status()[1]["restarts"] >= 2)
        assert pool.status()[1]["state"] != "serving"
        broken.mended = True
        await until(lambda: versions_and_states(pool)[1] == ("m@2", "serving"))
        assert pool.status()[1]["error"] is None


async def test_if_none_can_prove_it_all_serve_what_they_served(tmp_path: Path) -> None:
    hosts = [Broken(), Broken()]
    async with serving(tmp_path, *hosts) as pool:
        with pytest.raises(SwapError, match=r"differ by 0\.5.*m@1 serves on"):
            await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert versions_and_states(pool) == [("m@1", "serving")] * 2
        assert all(host.engine.loaded.count("m@2") == 3 for host in hosts)


class Spoken(Paced):
    """Takes a few turns of the loop over each piece of a stream; its text is in the request.

    A stream that has begun to speak goes on when the version `awaited` has been loaded.
    """

    awaited = ""

    def __init__(self) -> None:
        super().__init__(lambda request: str(request["messages"][0]["content"]), pause=0.001)

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        async with aclosing(super().answer(exchange)) as pieces:
            async for piece in pieces:
                yield piece
                if exchange.samples[0].token_ids:
                    await until(lambda: self.awaited in ("", *self.loaded))


def text_and_versions(pieces: list[bytes]) -> tuple[str, set[str]]:
    """The text of a stream, and the models it names."""
    chunks = [json.loads(piece[6:]) for piece in pieces if not piece.startswith(b"data: [DONE]")]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    return text, {chunk["model"] for chunk in chunks}


@pytest.mark.parametrize(("replicas", "mode"), [(2, "drain"), (1, "drain"), (1, "keep")])
async def test_a_swap_under_32_streams_loses_and_doubles_nothing(
    tmp_path: Path, replicas: int, mode: SwapMode
) -> None:
    hosts = [InProcessEngine(Spoken()) for _ in range(replicas)]
    async with serving(tmp_path, *hosts, swap_mode=mode) as pool:
        alias, swapped, number = "m@1", False, iter(range(10**6))
        answered: list[EngineCall] = []

        async def client() -> None:
            last = False
            while not last:
                last = swapped  # one more after the end of the swap
                text = f"{next(number)} " * 60
                call = exchange(messages=[{"role": "user", "content": text}], stream=True)
                pieces = [piece async for piece in pool.answer(lambda: alias, call)]
                (sample,) = call.samples
                assert text_and_versions(pieces) == (text, {sample.version})
                assert bytes(sample.token_ids).decode() == text
                assert len(sample.logprobs) == len(text)
                answered.append(call)

        clients = [asyncio.create_task(client()) for _ in range(32)]
        await until(lambda: sum(status["in_flight"] for status in pool.status()) == 32)
        await pool.stage(checkpoint(tmp_path, 2), "m@2", probe(2))
        alias = "m@2"
        pool.wake()
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        swapped = True
        await asyncio.gather(*clients)
        asked_of = [
            host.engine.requests for host in hosts if isinstance(host.engine, ScriptedEngine)
        ]
        assert sum(map(len, asked_of)) == len(answered)
        assert {asked.samples[0].version for asked in answered} == {"m@1", "m@2"}
        seams = [seam for asked in answered for seam in asked.samples[0].seams]
        assert {seam.model for seam in seams} == ({"m@2"} if mode == "keep" else set())
        assert all(0 < seam.at < 60 * 8 for seam in seams) and len(seams) <= 32


async def test_kept_requests_go_on_under_the_old_weights_if_the_new_are_not_proven(
    tmp_path: Path,
) -> None:
    host = Mortal(engine := Spoken())
    engine.awaited = "m@2"
    async with serving(tmp_path, host, swap_mode="keep") as pool:
        texts = [f"{number} " * 60 for number in range(8)]

        async def one(text: str) -> EngineCall:
            asked = exchange(messages=[{"role": "user", "content": text}], stream=True)
            assert (
                text_and_versions([piece async for piece in pool.answer("m@1", asked)])[0] == text
            )
            return asked

        streams = [asyncio.create_task(one(text)) for text in texts]
        await until(lambda: pool.status()[0]["in_flight"] == 8)
        with pytest.raises(SwapError, match="m@1 serves on"):
            await pool.swap(checkpoint(tmp_path, 2), "m@2", WRONG)
        for asked in await asyncio.gather(*streams):
            assert (asked.samples[0].version, asked.samples[0].seams) == ("m@1", [])
        # twice in place; the old again, for them to end; and only then from scratch
        assert engine.loaded == ["m@1", "m@2", "m@2", "m@1", "m@2", "m@1"]
        assert host.starts == 3


async def test_a_call_is_recorded_with_where_the_weights_changed(tmp_path: Path) -> None:
    async with served(tmp_path, engine := Spoken()) as gateway:
        gateway.pool.swap_mode, engine.awaited = "keep", "calc@2"
        text = "the same words again and again " * 20
        stream = asyncio.create_task(gateway.ask(text, stream=True))
        await until(lambda: engine.pieces > 1)
        await gateway.pool.swap(checkpoint(tmp_path, 2), "calc@2", probe(2))
        reply = await stream
        assert text_and_versions([line for line in reply.body.split(b"\n\n") if line])[1] == {
            "calc@1"
        }
        (call,) = gateway.calls(reply.run_id)
        (seam,) = call.seams
        assert (call.model, seam.model) == ("calc@1", "calc@2")
        assert 0 < seam.at < len(call.token_ids) == len(text)
