"""The pool's promises, kept around scripted engines: no vLLM needed."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineError, EngineUnavailable, SwapError
from cray_agents.ports import EngineCall
from cray_agents.records import Manifest, ProbePrompt, ProbeReport
from cray_agents.runtime.background import FAILURES
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE, LogprobLimits, bfloat16_limits
from tests.support.in_process_engine import InProcessEngine
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


async def test_a_swap_waits_for_requests_in_flight_and_makes_new_ones_wait(tmp_path: Path) -> None:
    gate, engine = asyncio.Event(), ScriptedEngine()

    async def slow(request: dict[str, Any], version: str) -> str:
        await gate.wait()
        return version

    engine = ScriptedEngine(slow)
    async with serving(tmp_path, InProcessEngine(engine)) as pool:
        old = asyncio.create_task(ask(pool, "m@1"))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        swap = asyncio.create_task(pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2)))
        new = asyncio.create_task(ask(pool, "m@2"))
        await until(lambda: pool.status()[0]["state"] == "swapping")
        assert engine.loaded == ["m@1"] and len(engine.requests) == 1 and not pool.ready
        gate.set()
        assert (await old, await new) == ("m@1", "m@2")
        report = await swap
        assert report.passed and report.tokens == 2 and "load" in report.seconds


async def test_an_alias_is_asked_for_again_after_a_swap(tmp_path: Path) -> None:
    alias = "m@1"
    gate = asyncio.Event()

    async def slow(request: dict[str, Any], version: str) -> str:
        await gate.wait()
        return version

    async with serving(tmp_path, InProcessEngine(ScriptedEngine(slow))) as pool:
        first = asyncio.create_task(ask(pool, lambda: alias))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        swap = asyncio.create_task(pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2)))
        await until(lambda: pool.status()[0]["state"] == "swapping")
        waiting = asyncio.create_task(ask(pool, lambda: alias))
        await asyncio.sleep(0)
        alias = "m@2"
        gate.set()
        await swap
        assert (await first, await waiting) == ("m@1", "m@2")


async def test_requests_go_to_the_least_busy_replica_that_holds_the_version(tmp_path: Path) -> None:
    engines = [ScriptedEngine(says_version, delay=0.05) for _ in range(2)]
    async with serving(tmp_path, *map(InProcessEngine, engines)) as pool:
        await asyncio.gather(*(ask(pool, "m@1") for _ in range(6)))
        assert [len(engine.requests) for engine in engines] == [3, 3]
        await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2), replicas=[1])
        answers = await asyncio.gather(*(ask(pool, v) for v in ("m@1", "m@2", "m@1")))
        assert answers == ["m@1", "m@2", "m@1"]
        assert [status["version"] for status in pool.status()] == ["m@1", "m@2"]


async def test_a_version_nobody_holds_is_waited_for_then_unavailable(tmp_path: Path) -> None:
    engine = ScriptedEngine(says_version)
    async with serving(tmp_path, InProcessEngine(engine), wait_timeout=0.1) as pool:
        with pytest.raises(EngineUnavailable, match=r"no replica served m@7.*m@1 \(serving\)"):
            await ask(pool, "m@7")
        assert engine.requests == []


async def test_a_probe_that_does_not_match_puts_the_old_version_back(tmp_path: Path) -> None:
    host = Mortal(ScriptedEngine(says_version))
    async with serving(tmp_path, host) as pool:
        wrong = [ProbePrompt(token_ids=[1, 2, 5], logprobs=[-1.0, -2.5])]
        with pytest.raises(SwapError, match=r"differ by 1\.5.*differ by 1\.5.*m@1 serves on"):
            await pool.swap(checkpoint(tmp_path, 2), "m@2", wrong)
        assert host.engine.loaded == ["m@1", "m@2", "m@2", "m@2", "m@1"] and host.starts == 3
        assert await ask(pool, "m@1") == "m@1"
        assert pool.status()[0]["probe"]["version"] == "m@1"


async def test_a_mismatch_in_place_is_mended_by_a_fresh_start(tmp_path: Path) -> None:
    engine = ScriptedEngine(says_version)
    host = Mortal(engine)
    async with serving(tmp_path, host) as pool:
        engine.drift = 0.5  # stays until the process is started anew
        start = host.start

        async def clean(directory: Path, version: str) -> None:
            engine.drift = 0.0
            await start(directory, version)

        host.start = clean  # type: ignore[method-assign, assignment]
        report = await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        assert report.passed and "start" in report.seconds and host.starts == 2


def long_probe(number: int) -> list[ProbePrompt]:
    """With enough tokens for a distribution."""
    tokens = [number, *range(200)]
    return [ProbePrompt(token_ids=tokens, logprobs=[-1.0] * 200)]


def with_probe(
    folder: Path, number: int, probe: list[ProbePrompt], dtype: str | None = None
) -> Path:
    """A checkpoint that a scripted engine scores as this probe says."""
    directory = checkpoint(folder, number)
    manifest = Manifest(files={}, weights_sha256=str(number), job="job-1", probe=probe, dtype=dtype)
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return directory


@pytest.mark.parametrize("limits", [FLOAT32_PROBE, bfloat16_limits()])
async def test_in_16_bits_one_token_may_be_off(tmp_path: Path, limits: LogprobLimits) -> None:
    engine = InProcessEngine(ScriptedEngine(says_version))
    async with serving(tmp_path, engine, probe_limits=limits) as pool:
        (right,) = long_probe(2)
        off = right.model_copy(update={"logprobs": [-2.0, *right.logprobs[1:]]})
        swap = pool.swap(with_probe(tmp_path, 2, [right]), "m@2", [off])
        if limits == FLOAT32_PROBE:
            with pytest.raises(SwapError, match=r"differ by 1 \(tolerance 0.001\)"):
                await swap
            return
        report = await swap
        assert (report.max_logprob_diff, report.mean_logprob_diff) == (1, 0.005)
        assert (report.p99_logprob_diff, report.tolerance) == (0, 0.5)


async def test_a_probe_that_was_scored_in_16_bits_is_judged_as_in_16_bits(tmp_path: Path) -> None:
    """Also by an engine in float32: the side that rounds more decides."""
    engine = InProcessEngine(ScriptedEngine(says_version))
    async with serving(tmp_path, engine, probe_limits=FLOAT32_PROBE) as pool:
        (right,) = long_probe(2)
        off = right.model_copy(update={"logprobs": [-1.03] * 200})
        directory = with_probe(tmp_path, 2, [right], dtype="bfloat16")
        assert (await pool.swap(directory, "m@2", [off])).tolerance == 0.5
        with pytest.raises(SwapError, match=r"tolerance 0.001"):
            await pool.swap(with_probe(tmp_path, 3, [right], dtype="float32"), "m@3", [off])


async def test_in_16_bits_a_version_is_judged_by_the_one_before(tmp_path: Path) -> None:
    """Of another 0.06 on each token: too far from a good one, and no reason to refuse a first."""
    host = Mortal(ScriptedEngine(says_version))
    async with serving(tmp_path, host, probe_limits=bfloat16_limits()) as pool:

        def off(number: int, apart: float) -> list[ProbePrompt]:
            (right,) = long_probe(number)
            return [right.model_copy(update={"logprobs": [-1.0 - apart] * 200})]

        async def swap(number: int, apart: float) -> ProbeReport:
            directory = with_probe(tmp_path, number, long_probe(number))
            return await pool.swap(directory, f"m@{number}", off(number, apart))

        with pytest.raises(SwapError, match=r"differ by 0.2 on average and 0.2 in the 99th"):
            await swap(2, 0.2)
        first = await swap(2, 0.06)  # nothing to compare with: two tokens of m@1
        assert first.tolerance == 0.5
        assert (await swap(3, 0.005)).passed
        words = r"0.06 on average .* 200 tokens \(tolerance: mean 0.04, 99th percentile 0.25, "
        with pytest.raises(SwapError, match=words):
            await swap(4, 0.06)
        assert await ask(pool, "m@3") == "m@3"
        with pytest.raises(SwapError, match="differ by nan on average"):
            await swap(5, float("nan"))


@pytest.mark.parametrize("limits", [FLOAT32_PROBE, bfloat16_limits()])
async def test_the_share_of_equal_argmaxes_is_recorded_and_in_16_bits_judged(
    tmp_path: Path, limits: LogprobLimits
) -> None:
    def naming(tops: list[int]) -> list[ProbePrompt]:
        return [prompt.model_copy(update={"top": tops}) for prompt in long_probe(2)]

    host = Mortal(ScriptedEngine(says_version))
    async with serving(tmp_path, host, probe_limits=limits) as pool:

        async def swap(number: int, others: int) -> ProbeReport:
            """To a version that names another token in so many of 200 places."""
            directory = with_probe(tmp_path, number, naming([7] * 200))
            told = naming([8] * others + [7] * (200 - others))
            return await pool.swap(directory, f"m@{number}", told)

        assert (await swap(2, 24)).equal_argmax == 0.88
        if limits == FLOAT32_PROBE:
            assert (await swap(3, 200)).equal_argmax == 0
            return
        assert (await swap(3, 4)).equal_argmax == 0.98
        words = r"200 tokens, 0.88 of which have the same .* equal most likely tokens 0.9\)"
        with pytest.raises(SwapError, match=words):  # now it is known what is good here
            await swap(4, 24)
        report = await pool.swap(with_probe(tmp_path, 5, naming([])), "m@5", naming([7] * 200))
        assert report.equal_argmax is None  # the engine does not tell


async def test_an_unproven_version_of_a_job_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, InProcessEngine(ScriptedEngine(says_version))) as pool:
        with pytest.raises(SwapError, match="no probe for the logprob check"):
            await pool.swap(checkpoint(tmp_path, 2), "m@2", [])
        report = await pool.swap(checkpoint(tmp_path, 3, job=None), "m@3", [])
        assert (report.prompts, report.passed) == (0, True)


async def test_draining_has_a_limit_and_then_nothing_changes(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def late(request: dict[str, Any], version: str) -> str:
        await go_on.wait()
        return version

    async with serving(tmp_path, InProcessEngine(ScriptedEngine(late)), drain_timeout=0.05) as pool:
        slow = asyncio.create_task(ask(pool, "m@1"))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        with pytest.raises(SwapError, match="1 requests were still running"):
            await pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2))
        go_on.set()
        assert await slow == "m@1" and pool.ready


async def test_a_dead_replica_comes_back_and_its_requests_are_answered(tmp_path: Path) -> None:
    engine = ScriptedEngine([EngineUnavailable("gone"), "back"])
    host = Mortal(engine)
    async with serving(tmp_path, host) as pool:
        host.broken = True
        host.die()
        await until(lambda: pool.status()[0]["restarts"] == 1)
        assert pool.status()[0]["error"] == "it does not come up"
        answer = asyncio.create_task(ask(pool, "m@1"))
        host.broken = False
        assert await answer == "back"
        status = pool.status()[0]
        assert status["restarts"] >= 2 and status["probe"]["passed"] and status["error"] is None


class Breaking(ScriptedEngine):
    """Is gone after `left` pieces of an answer, once."""

    left: int | None = None

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        async with aclosing(super().answer(exchange)) as pieces:
            async for piece in pieces:
                if self.left == 0:
                    self.left = None
                    raise EngineUnavailable("gone")
                self.left = self.left - 1 if self.left is not None else None
                yield piece


@pytest.mark.parametrize(("left", "request_count"), [(0, 2), (1, 1)])
async def test_a_stream_is_asked_for_again_only_before_its_first_event(
    tmp_path: Path, left: int, request_count: int
) -> None:
    engine = Breaking(["first", "back again"])
    engine.left = left
    async with serving(tmp_path, InProcessEngine(engine)) as pool:
        stream, pieces = exchange(stream=True), []
        try:
            async for piece in pool.answer("m@1", stream):
                pieces.append(piece)
        except EngineUnavailable:
            assert left == 1 and len(pieces) == 1
        else:
            assert bytes(stream.samples[0].token_ids) == b"back again"  # of the second alone
            assert pieces[-1] == b"data: [DONE]\n\n" and b'"model":"m@1"' in pieces[0]
        assert len(engine.requests) == request_count
        assert pool.status()[0]["in_flight"] == 0


async def test_a_swap_outlives_its_caller(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def when_told(request: dict[str, Any], version: str) -> str:
        await go.wait()
        return version

    async with serving(tmp_path, InProcessEngine(ScriptedEngine(when_told))) as pool:
        busy = asyncio.create_task(ask(pool, "m@1"))
        await until(lambda: pool.status()[0]["in_flight"] == 1)
        swap = asyncio.create_task(pool.swap(checkpoint(tmp_path, 2), "m@2", probe(2)))
        await until(lambda: pool.status()[0]["state"] == "swapping")
        swap.cancel()
        go.set()
        assert await busy == "m@1"
        assert await ask(pool, "m@2") == "m@2"


class Stillborn(Mortal):
    """Dies in its first starts, as a process does that is killed while it comes up."""

    def __init__(self, engine: ScriptedEngine, deaths: int) -> None:
        super().__init__(engine)
        self.deaths = deaths

    async def start(self, checkpoint: Path, version: str) -> None:
        if self.starts < self.deaths:
            self.starts += 1
            raise EngineUnavailable("vLLM ended while starting")
        await super().start(checkpoint, version)


async def test_a_replica_killed_in_its_first_start_is_started_again(tmp_path: Path) -> None:
    host = Stillborn(ScriptedEngine(says_version), deaths=2)
    async with serving(tmp_path, host) as pool:
        assert pool.ready
        assert await ask(pool, "m@1") == "m@1"
    assert host.starts == 3


class Fatal(Mortal):
    """Its process dies of a request that says "poison"; of others it lives."""

    def __init__(self) -> None:
        super().__init__(ScriptedEngine(self.says))

    async def says(self, request: dict[str, Any]) -> str:
        said = str(request["messages"][0]["content"])
        if said == "poison":
            self.die()
            raise EngineUnavailable("the connection broke")
        await asyncio.wait({asyncio.ensure_future(self._ended.wait())}, timeout=0.3)
        if self._ended.is_set():
            raise EngineUnavailable("the connection broke")
        return said

    def death_reason(self) -> str:
        return "RuntimeError: no kernel" if self._ended.is_set() else ""


def says(text: str) -> EngineCall:
    return exchange(messages=[{"role": "user", "content": text}])


async def test_a_request_that_killed_an_engine_twice_is_failed_with_its_error(
    tmp_path: Path,
) -> None:
    host = Fatal()
    async with serving(tmp_path, host) as pool:
        with pytest.raises(EngineError, match=r"died 2 times.*RuntimeError: no kernel") as caught:
            async for _ in pool.answer("m@1", says("poison")):
                pass
        assert (caught.value.status, caught.value.code) == (500, "engine_died")
        await until(lambda: pool.status()[0]["state"] == "serving")
        status = pool.status()[0]
        assert host.starts == 3 and status["restarts"] == 2
        assert status["last_restart"]["why"] == "RuntimeError: no kernel"
        await until(lambda: pool.status()[0]["last_restart"]["seconds"] is not None)
        (piece,) = [piece async for piece in pool.answer("m@1", says("well"))]
        assert b"well" in piece


@pytest.mark.slow
async def test_who_was_in_its_company_is_answered(tmp_path: Path) -> None:
    host = Fatal()

    async def ask_for(text: str) -> bytes:
        (piece,) = [piece async for piece in pool.answer("m@1", says(text))]
        return piece

    async with serving(tmp_path, host) as pool:
        innocent = [asyncio.create_task(ask_for(f"well {n}")) for n in range(5)]
        await until(lambda: pool.status()[0]["in_flight"] == 5)
        with pytest.raises(EngineError, match="died"):
            await ask_for("poison")
        for n, answer in enumerate(await asyncio.gather(*innocent)):
            assert f"well {n}".encode() in answer
        assert host.starts <= 4


class Odd(Mortal):
    """Its start fails as no code foresees, twice."""

    failures = 0

    async def start(self, checkpoint: Path, version: str) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise KeyError("choices")
        await super().start(checkpoint, version)


@pytest.mark.slow
async def test_a_watch_that_fails_unforeseen_goes_on_with_the_restart(tmp_path: Path) -> None:
    host = Odd(ScriptedEngine(says_version))
    async with serving(tmp_path, host) as pool:
        host.failures = 2
        host.die()
        await until(lambda: host.starts == 2 and pool.ready)
        assert await ask(pool, "m@1") == "m@1"
        assert FAILURES.by_task.pop("replica watch").number == 2


class Silent(Mortal):
    """Can be made to say nothing any more, as a stopped process does."""

    silent = False

    async def check_alive(self) -> None:
        if self.silent:
            await asyncio.Event().wait()

    async def start(self, checkpoint: Path, version: str) -> None:
        self.silent = False
        await super().start(checkpoint, version)


async def test_a_replica_that_says_nothing_is_restarted_though_nobody_asks(tmp_path: Path) -> None:
    host = Silent(ScriptedEngine(says_version))
    async with serving(tmp_path, host, silence_timeout=0.2) as pool:
        await asyncio.sleep(0.5)
        assert host.starts == 1  # one that answers is left alone
        host.silent = True
        await until(lambda: host.starts == 2 and pool.ready)
        assert "said nothing for 0.2 s" in pool.status()[0]["last_restart"]["why"]
        assert await ask(pool, "m@1") == "m@1"


async def test_an_engine_whose_server_says_that_it_is_dead_is_restarted_at_once(
    tmp_path: Path,
) -> None:
    dead = EngineUnavailable("EngineCore encountered an issue", status=500)
    host = Mortal(ScriptedEngine([dead, "back"]))
    async with serving(tmp_path, host) as pool:
        assert await ask(pool, "m@1") == "back"
        assert host.starts == 2 and "its engine died" in pool.status()[0]["last_restart"]["why"]


async def test_what_dies_of_the_same_at_each_start_is_not_started_a_third_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = Stillborn(ScriptedEngine(says_version), deaths=9)
    host.death_reason = lambda: "ValueError: no such head size"  # type: ignore[method-assign]
    with pytest.raises(EngineUnavailable, match=r"m@1 cannot be served.*no such head size"):
        async with serving(tmp_path, host):
            pass
    assert host.starts == 2 and "starting m@1 again" in caplog.text
