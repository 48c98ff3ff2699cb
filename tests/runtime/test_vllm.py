"""The pool around a real vLLM on CPU: exact tokens, proven swaps, nothing lost or left behind."""

import asyncio
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import pytest
import pytest_asyncio

from cray_agents.errors import SwapError, VersionClosed
from cray_agents.paths import Home
from cray_agents.ports import EngineCall
from cray_agents.processes import alive
from cray_agents.records import DeltaOf, new_id
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.start_phases import StartPhase
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.registry.checkpoints import MANIFEST
from cray_agents.runtime.registry.deltas import Parent, Shadows
from cray_agents.runtime.scheduler.supervisor import descendants
from cray_agents.runtime.vllm_plugins.delta_codec import entries_of
from cray_agents.runtime.vllm_plugins.wire import HEADER
from cray_agents.trainers.checkpointing.weight_files import DeltaFile
from tests.support.import_server import process_of
from tests.support.strangers import as_stranger, listeners, needs_root, say, say_everywhere
from tests.support.unix_servers import socket_of
from tests.support.vllm_pool import (
    CHAT,
    PROMPTS,
    Serving,
    at_replica,
    best_two,
    distance,
    golden_probe,
    greedy,
    logprobs_of,
    manifest_of,
    secret_of,
    true_logprob,
    true_next_logprob,
    truth,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked_servers"),
]

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
GREEDY = {"messages": CHAT, "temperature": 0, "max_tokens": 60}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Any
) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("vllm")
    models = {
        "m@1": tiny_model(folder / "m1", tie=False, seed=1, teach=True),
        "m@2": tiny_model(folder / "m2", tie=False, seed=2),
        "m@3": tiny_model(folder / "m3", tie=True, seed=3),
        "m@4": tiny_model(folder / "m4", tie=True, seed=4),
    }
    pool = Pool([VllmProcess("m", EngineSettings(kv_cache_gib=0.125), folder / "replica.log")])
    await pool.start(models["m@1"], "m@1", golden_probe(models["m@1"]))
    yield Serving(pool, models)
    await pool.stop()


async def test_the_seconds_of_a_start_are_told_by_phase(serving: Serving) -> None:
    seconds = serving.pool.status()[0]["last_start"]["seconds"]
    assert seconds.keys() == {*get_args(StartPhase), "first_token"} - {"place"}
    assert min(seconds.values()) >= 0 and seconds["first_token"] > 0


async def test_nobody_without_the_secret_is_answered(serving: Serving) -> None:
    url, secret = "http://engine", secret_of(serving.pid)
    assert secret.encode() not in Path(f"/proc/{serving.pid}/cmdline").read_bytes()
    asked = [("POST", "/pause"), ("POST", "/collective_rpc"), ("POST", "/v1/load_lora_adapter")]
    asked += [("POST", "/v1/chat/completions"), ("POST", "/cray/abort/x"), ("OPTIONS", "/pause")]
    asked += [("GET", "/health"), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/docs")]
    async with at_replica(serving.pid) as http:
        for method, path in asked:
            for headers in ({}, {HEADER: ""}, {HEADER: secret[:-1]}):
                async with http.request(method, url + path, headers=headers, json={}) as answer:
                    assert answer.status == 403, (path, headers)
        async with http.get(f"{url}/metrics", headers={HEADER: secret}) as answer:
            assert answer.status == 200
    _, sample = await serving.chat("m@1", GREEDY)  # nobody has paused it
    assert sample.token_ids


@needs_root
async def test_another_user_reaches_no_socket_of_vllm_and_harms_none_of_gloo(
    serving: Serving,
) -> None:
    """Gloo's ports know no passwords. What is sent there does no harm to a server of one rank."""
    found = listeners(process_of(serving.pid))
    paths = [one.place for one in found if isinstance(one.place, str)]
    folder = Path(socket_of(serving.pid)).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(paths) > 1 and all(Path(path).parent == folder for path in paths)
    for path in paths:
        assert stat.S_IMODE(Path(path).stat().st_mode) & 0o077 == 0
        assert as_stranger(say, path, b"") == ["refused"]
    ports = [one.place for one in found if isinstance(one.place, tuple)]
    assert {host for host, _ in ports} == {"127.0.0.1"}
    noise = [b"", b"\0" * 64, os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n"]
    assert set(as_stranger(say_everywhere, ports, *noise)) <= {"", "refused"}
    _, sample = await serving.chat("m@1", GREEDY)
    assert sample.token_ids and serving.pool.status()[0]["restarts"] == 0


async def test_another_gateway_is_answered_by_an_admitted_version_and_waited_for(
    serving: Serving,
) -> None:
    await serving.swap("m@1")
    begun, request = asyncio.Event(), GREEDY | {"max_tokens": 200, "ignore_eos": True}

    def call(version: str) -> EngineCall:
        streamed = request | {"stream": True}
        return EngineCall("/v1/chat/completions", streamed, new_id("x")[2:], version)

    async with serving.engine() as engine:

        async def ask(asked: EngineCall) -> EngineCall:
            async for _ in engine.answer(asked):
                begun.set()
            return asked

        with pytest.raises(VersionClosed):
            await ask(call("m@2"))
        task = asyncio.create_task(ask(call("m@1")))
        await begun.wait()
        await serving.swap("m@2")
        (sample,) = (await task).samples
        assert (len(sample.token_ids), sample.version, sample.seams) == (200, "m@1", [])
        with pytest.raises(VersionClosed):
            await ask(call("m@1"))
    await serving.swap("m@1")


async def test_a_tool_call_is_parsed_and_the_next_turn_extends_its_tokens(serving: Serving) -> None:
    request = GREEDY | {"tools": [TOOL]}
    first, sample = await serving.chat("m@1", request)
    choice = first["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"expression": "47 + 385"}
    assert len(sample.token_ids) == first["usage"]["completion_tokens"]

    answered = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "432"},
    ]
    _, second = await serving.chat("m@1", request | {"messages": answered})
    before = sample.prompt_token_ids + sample.token_ids
    assert second.prompt_token_ids[: len(before)] == before


@pytest.mark.parametrize("level", [1, 2])
async def test_it_sleeps_and_wakes_proven(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """vLLM for CPUs has the routes and computes nothing meanwhile, but keeps its memory."""
    monkeypatch.setattr(VllmProcess, "sleep_level", lambda self, checkpoint: level)
    pid, (before, _) = serving.pid, await serving.chat("m@1", GREEDY)

    async def sleeps() -> bool:
        async with (
            at_replica(pid, headers={HEADER: secret_of(pid)}) as http,
            http.get("http://engine/is_sleeping") as answer,
        ):
            return bool((await answer.json())["is_sleeping"])

    assert not await sleeps()
    async with serving.pool.asleep() as seconds:
        assert await sleeps() and serving.pool.status()[0]["state"] == "sleeping"
        waiting = asyncio.create_task(serving.chat("m@1", GREEDY))
    after, _ = await waiting
    assert after["choices"] == before["choices"]
    assert serving.pid == pid and serving.pool.status()[0]["restarts"] == 0 and not await sleeps()
    loads = {"load"} if level == 2 else set()
    assert seconds.keys() == {"drain", "sleep", "wake", "prove"} | loads


async def test_recorded_logprobs_are_of_the_policy_that_was_sampled_from(serving: Serving) -> None:
    raw = {"messages": CHAT, "max_tokens": 1, "seed": 7, "temperature": 1.0}
    hot, _ = await serving.chat("m@1", raw | {"temperature": 2.0, "top_logprobs": 5})
    _, greedy = await serving.chat("m@1", raw | {"top_k": 1})
    assert greedy.logprobs == pytest.approx([0.0])
    top = best_two(hot)
    plain, _ = await serving.chat("m@1", raw | {"top_logprobs": 5})
    best = best_two(plain)
    assert top[0] - top[1] == pytest.approx((best[0] - best[1]) / 2, rel=1e-3)


async def test_an_untied_swap_in_place_has_the_new_weights_and_no_old_cache(
    serving: Serving,
) -> None:
    # longer than a KV block of 128 tokens, so that the prefix cache holds it
    long = {"messages": [{"role": "user", "content": "1 2 3 4 " * 40}], "max_tokens": 2}
    request = long | {"temperature": 0}
    old = await serving.score()
    _, before = await serving.chat("m@1", request)
    pid = serving.pid
    await serving.swap("m@2")
    _, after = await serving.chat("m@2", request)
    assert serving.pid == pid  # the same process: in place
    new = await serving.score()
    assert distance(new, truth(serving.models["m@2"])) < 1e-4
    assert distance(new, old) > 0.1
    truly = true_next_logprob(serving.models["m@2"], after)
    assert after.logprobs[0] == pytest.approx(truly, abs=1e-4)
    assert before.logprobs[0] != pytest.approx(after.logprobs[0], abs=1e-2)
    assert len(before.prompt_token_ids) > 256
    await serving.swap("m@1")
    assert distance(await serving.score(), old) < 1e-5


async def test_a_delta_is_served_from_its_copy(serving: Serving, tmp_path: Path) -> None:
    """vLLM on CPU is asked to change the weights in place, cannot, and loads the copy."""
    from safetensors.torch import load_file, save_file

    home, whole = Home(tmp_path / "home"), tmp_path / "whole"
    parent, child = home.checkpoint("one"), home.checkpoint("two")
    for copy in (parent, whole, child):
        shutil.copytree(serving.models["m@1"], copy)
    before, file = manifest_of(parent), "model.safetensors"
    tensors = load_file(whole / file)
    for tensor in tensors.values():
        tensor.view(-1)[::20] *= 1.5
    save_file(tensors, whole / file, metadata={"format": "pt"})
    content = memoryview((whole / file).read_bytes())
    (child / file).unlink()
    with Parent(parent) as base, DeltaFile(child / file, base.tensors) as written:
        data = 8 + int.from_bytes(content[:8], "little")
        written.write(content[:data])
        for entry in entries_of(bytes(content[:data])):
            written.write(content[data + entry.start : data + entry.end])
    packed = {file: written.packed_sha256}
    delta = DeltaOf(parent="one", parent_weights_sha256=before.weights_sha256, files=packed)
    manifest = manifest_of(whole).model_copy(update={"delta": delta})
    (child / MANIFEST).write_text(manifest.model_dump_json())

    serving.models |= {"m@5": parent, "m@6": Shadows(home, tmp_path / "1").directory(child)}
    await serving.swap("m@5")
    pid = serving.pid
    await serving.swap("m@6")
    assert serving.pid == pid and not (child / file).exists()
    assert distance(await serving.score(), truth(whole)) < 1e-4
    assert distance(truth(whole), truth(parent)) > 0.01
    await serving.swap("m@1")


async def test_no_block_of_the_prefix_cache_outlives_its_weights(serving: Serving) -> None:
    await serving.swap("m@1")
    old, new = serving.models["m@1"], serving.models["m@2"]
    long = {"messages": [{"role": "user", "content": "4 3 2 1 " * 40}], "temperature": 0}
    exchange = EngineCall("/v1/chat/completions", long | {"max_tokens": 8}, "primed")
    async with serving.engine() as engine:

        async def say() -> tuple[list[int], Any]:
            assert [piece async for piece in engine.answer(exchange)]
            (sample,) = exchange.samples
            return sample.token_ids, pytest.approx(sample.logprobs, abs=1e-3)

        await say()
        prompt = exchange.samples[0].prompt_token_ids
        assert len(prompt) > 256  # two blocks of the cache
        before, after = (greedy(model, prompt, 8) for model in (old, new))
        assert (before.token_ids, before.logprobs) == await say()
        # the control: weights are changed, and neither is the cache cleared nor its keys
        await engine._control("/pause?mode=keep&clear_cache=false")
        where = {"weights_path": str(new)}
        await engine._control("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        await engine._control("/collective_rpc", {"method": "repack_kept_weights"})
        await engine.resume()
        scores = await engine.score(PROMPTS)
        assert distance(logprobs_of(scores), truth(new)) < 1e-4
        for prompt, score in zip(PROMPTS, scores, strict=True):
            said = [greedy(new, prompt[:n], 1).token_ids[0] for n in range(1, len(prompt))]
            assert score.top == said
        assert (after.token_ids, after.logprobs) != await say(), "the control has to fail"
        # the keys alone: the blocks are there still, and are not found under another version
        await engine._name_weights(new, "m@2")
        await engine.resume()
        assert (after.token_ids, after.logprobs) == await say()
    await serving.swap("m@2")
    await serving.swap("m@1")


async def test_kept_answers_go_on_under_new_weights_and_tell_from_where(serving: Serving) -> None:
    serving.pool.swap_mode = "keep"
    begun = asyncio.Semaphore(0)
    probe = golden_probe(serving.models["m@2"])  # now: the answers would end meanwhile
    request = {"messages": CHAT, "max_tokens": 600, "ignore_eos": True}

    async def one(number: int) -> EngineCall:
        body = request | {"seed": number, "stream": number % 2 == 0}
        asked = EngineCall("/v1/chat/completions", body, new_id("x")[2:])
        async for piece in serving.pool.answer("m@1", asked):
            assert piece.count(b'"model":') == piece.count(b'"model":"m@1"')
            begun.release()
        return asked

    answers = [asyncio.create_task(one(number)) for number in range(32)]
    for _ in range(40):
        await begun.acquire()
    report = await serving.pool.swap(serving.models["m@2"], "m@2", probe)
    assert set(report.seconds) == {"pause", "load", "prove", "resume"}
    crossed = {}
    for asked in await asyncio.gather(*answers):
        (sample,) = asked.samples
        assert len(sample.token_ids) == len(sample.logprobs) == 600
        if sample.seams:
            (seam,) = sample.seams
            assert (sample.version, seam.model) == ("m@1", "m@2") and 0 < seam.at < 600
            crossed[asked.streams] = sample, seam.at
        else:  # it had ended, or waited in vLLM, when the weights changed
            assert sample.version in ("m@1", "m@2")
    assert set(crossed) == {True, False}
    for sample, at in crossed.values():
        for place, version in ((at - 1, "m@1"), (at, "m@2"), (599, "m@2")):
            before = sample.prompt_token_ids + sample.token_ids[:place]
            truly = true_logprob(serving.models[version], before, sample.token_ids[place])
            assert sample.logprobs[place] == pytest.approx(truly, abs=1e-3)
    serving.pool.swap_mode = "drain"
    await serving.swap("m@1")


async def test_a_wrong_probe_is_caught_and_the_old_version_serves_on(serving: Serving) -> None:
    wrong = golden_probe(serving.models["m@1"])  # the probe of other weights
    with pytest.raises(SwapError, match="m@1 serves on"):
        await serving.pool.swap(serving.models["m@2"], "m@2", wrong)
    assert distance(await serving.score(), truth(serving.models["m@1"])) < 1e-4
    assert serving.pool.status()[0]["state"] == "serving"


async def test_a_killed_server_takes_its_engine_along_and_no_request_is_lost(
    serving: Serving,
) -> None:
    request = {"messages": CHAT, "max_tokens": 600, "ignore_eos": True}
    pid, server = serving.pid, process_of(serving.pid)
    engine = descendants(server)
    assert engine
    traffic: list[asyncio.Task[Any]] = []
    while not traffic or any(task.done() for task in traffic):  # until it is killed in its midst
        await asyncio.gather(*traffic)
        traffic = [asyncio.create_task(serving.chat("m@1", request)) for _ in range(24)]
        await asyncio.sleep(0.4)
    os.kill(server, signal.SIGKILL)
    answers = await asyncio.gather(*traffic)
    assert [len(sample.token_ids) for _, sample in answers] == [600] * 24
    assert serving.pid != pid and not any(map(alive, [pid, server, *engine]))
    assert serving.pool.status()[0]["restarts"] == 1


async def test_tied_weights_another_shape_starts_anew_and_then_in_place(serving: Serving) -> None:
    pid = serving.pid
    await serving.swap("m@3")
    assert serving.pid != pid  # tied, untied: another shape
    pid, old = serving.pid, await serving.score()
    await serving.swap("m@4")
    assert serving.pid == pid
    new = await serving.score()
    assert distance(new, truth(serving.models["m@4"])) < 1e-4
    assert distance(new, old) > 0.1
    _, sample = await serving.chat("m@4", GREEDY | {"max_tokens": 1})
    truly = true_next_logprob(serving.models["m@4"], sample)
    assert sample.logprobs[0] == pytest.approx(truly, abs=1e-4)


async def test_a_killed_platform_leaves_no_vllm_behind(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORKED_STARTS")  # a process of its own, as users start it
    script = [sys.executable, "-c", PLATFORM, str(serving.models["m@1"]), str(tmp_path / "log")]
    platform = await asyncio.create_subprocess_exec(*script, stdout=asyncio.subprocess.PIPE)
    assert platform.stdout is not None
    pid = int(await platform.stdout.readline())
    everything = [pid, *descendants(pid)]
    assert len(everything) >= 2 and all(map(alive, everything))
    platform.kill()
    async with asyncio.timeout(60):
        while any(map(alive, everything)):  # noqa: ASYNC110 - they are not our children
            await asyncio.sleep(0.05)
    await platform.wait()


PLATFORM = """
import asyncio, sys
from pathlib import Path
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess

async def main():
    replica = VllmProcess("m", EngineSettings(kv_cache_gib=0.125), Path(sys.argv[2]))
    await replica.start(Path(sys.argv[1]), "m@1")
    print(replica.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
