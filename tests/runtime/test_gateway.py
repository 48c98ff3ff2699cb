"""The gateway's routes other than model calls: refusals, runs, versions, jobs, loops."""

import hashlib
import json
import tracemalloc
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.records import ProbePrompt
from cray_agents.runtime.gateway.http.bodies import parse
from cray_agents.runtime.gateway.model_calls.answer import check_embedded
from cray_agents.runtime.gateway.routes.trajectories import SentEvents
from tests.support.scripted_gateway import CHAT, Gateway, checkpoint, says, served
from tests.support.scripted_trainer import ScriptedTrainer

PROBE = [ProbePrompt(token_ids=[1, 2, 3], logprobs=[-1.0, -2.0])]

RESPONSE = b'{"model": "calc", "input": "hi", "previous_response_id": "resp_1"}'
BACKGROUND = b'{"model": "calc", "input": "hi", "background": true, "store": "false"}'
AHEAD = b'{"events": [{"kind": "reward", "time": 9e9, "body": {"name": "good", "value": 1}}]}'
REFUSALS = [
    ("GET", "/nowhere", b"", 404, "unknown_url"),
    ("GET", "/v1/models/", b"", 404, "unknown_url"),
    ("DELETE", CHAT, b"", 405, "method_not_allowed"),
    ("POST", CHAT, b"{", 400, "invalid_json"),
    ("POST", CHAT, b"", 400, "invalid_json"),
    ("POST", CHAT, b"[1]", 400, "invalid_json"),
    ("POST", CHAT, b'{"model": "\xff"}', 400, "invalid_json"),
    ("POST", CHAT, b"[" * 5000, 400, "invalid_json"),
    ("POST", CHAT, b'"' + b"a" * 300_000 + b'"', 413, "body_too_large"),
    ("POST", CHAT, b"{}", 400, "invalid_value"),
    ("POST", CHAT, b'{"model": "calc", "messages": "hi"}', 400, "invalid_value"),
    ("POST", CHAT, b'{"model": "calc", "messages": [1]}', 400, "invalid_value"),
    ("POST", CHAT, b'{"model": "calc", "messages": [{}], "tools": {"a": 1}}', 400, "invalid_value"),
    (
        "POST",
        CHAT,
        b'{"model": "calc", "messages": [{}], "use_beam_search": 1}',
        400,
        "invalid_value",
    ),
    ("POST", "/v1/completions", b'{"model": "calc", "prompt": []}', 400, "invalid_value"),
    ("POST", "/v1/messages", b'{"model": "calc", "messages": "hi"}', 400, "invalid_value"),
    ("POST", "/v1/responses", b'{"model": "calc", "input": [1]}', 400, "invalid_value"),
    ("POST", "/v1/responses", RESPONSE, 400, "previous_response_not_found"),
    ("POST", "/v1/responses", BACKGROUND, 400, "invalid_value"),
    ("POST", "/v1/tokenize", b'{"prompt": "hi"}', 400, "invalid_value"),
    ("GET", "/v1/trajectories?limit=1001", b"", 400, "invalid_value"),
    ("GET", "/v1/trajectories?lop=x", b"", 400, "unknown_parameter"),
    ("GET", "/v1/trajectories/run_none", b"", 404, "not_found"),
    ("POST", "/v1/trajectories/r/events", b'{"events": [1]}', 400, "invalid_value"),
    ("POST", "/v1/trajectories/r/events", AHEAD, 400, "invalid_value"),
    ("POST", "/v1/trajectories/events", AHEAD, 400, "invalid_value"),
    ("POST", "/v1/datasets", b'{"lop": "x"}', 400, "invalid_value"),
    ("POST", "/v1/datasets", b"{}", 400, "empty_dataset"),
    ("GET", "/v1/datasets/ds-none", b"", 404, "not_found"),
    ("GET", "/v1/jobs/job-none", b"", 404, "not_found"),
    ("GET", "/v1/jobs/..%2f..%2fmodels/logs", b"", 404, "unknown_url"),
    ("GET", "/v1/models/nobody", b"", 404, "model_not_found"),
    ("POST", "/v1/models/calc/promote", b'{"version": true}', 400, "invalid_value"),
    ("POST", "/v1/models/calc/promote", b'{"version": 9}', 404, "model_not_found"),
    ("POST", "/v1/models/calc/versions", b'{"checkpoint": "/none"}', 404, "not_found"),
]


@pytest.mark.slow
async def test_every_refusal_is_an_envelope(gateway: Gateway) -> None:
    for method, path, body, status, code in REFUSALS:
        actual, answer = await gateway.call(method, path, data=body or None)
        assert (actual, answer["error"]["code"]) == (status, code), (method, path, body[:60])


async def test_a_byte_order_mark_before_a_body_is_dropped(gateway: Gateway) -> None:
    body = BOM_UTF8 + json.dumps({"model": "calc", "messages": says("a")}).encode()
    assert (await gateway.call("POST", CHAT, data=body))[0] == 200


async def test_a_chunked_body_has_the_same_limit(gateway: Gateway) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"a" * 10_000

    status, answer = await gateway.call("POST", CHAT, data=endless())
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_a_run_id_must_be_plain(gateway: Gateway) -> None:
    body = {"model": "calc", "messages": says("a")}
    status, answer = await gateway.call("POST", CHAT, json=body, headers={"X-Run-Id": "a b"})
    assert (status, answer["error"]["param"]) == (400, "X-Run-Id")


async def test_a_header_of_the_client_may_name_the_run(tmp_path: Path) -> None:
    body = {"model": "calc", "messages": says("a")}
    async with served(tmp_path, run_headers=("x-trace", "x-session-id")) as gateway:
        for turn in ("first", "second"):
            asked = {**body, "messages": says(turn)}
            await gateway.call("POST", CHAT, json=asked, headers={"X-Session-ID": "trace-7"})
        both = {"X-Session-ID": "trace-7", "X-Run-Id": "run_own"}
        await gateway.call("POST", CHAT, json=body, headers=both)
        await gateway.call("POST", CHAT, json=body)
        refused = await gateway.call("POST", CHAT, json=body, headers={"X-Session-ID": "a b"})
        calls = [len(gateway.calls(name)) for name in ("trace-7", "run_own")]
    assert calls == [2, 1]
    assert (refused[0], refused[1]["error"]["param"]) == (400, "x-session-id")


@pytest.mark.slow
async def test_trajectories_page_and_join(gateway: Gateway) -> None:
    for number in range(5):
        run_id = f"run_{number}"
        chat = await gateway.client(f"/runs/{run_id}/v1").chat.completions.create(
            model="calc", messages=says("a b")
        )
        run = {
            "agent": "calc",
            "model": "calc",
            "input": "a b",
            "stop_reason": "completed",
            "loop": "l",
            "iteration": number // 3,
            "trajectory": {"turns": [{"call_id": chat.id}]},
        }
        events = [
            {"kind": "run", "body": run},
            {"kind": "reward", "body": {"name": "correct", "value": 1.0}},
        ]
        path = f"/v1/trajectories/{run_id}/events"
        status, answer = await gateway.call("POST", path, json={"events": events})
        assert (status, answer) == (200, {"appended": 2, "duplicates": 0})
        status, answer = await gateway.call("POST", path, json={"events": events})
        assert answer == {"appended": 0, "duplicates": 2}
    seen, after = [], ""
    while True:
        _, page = await gateway.call("GET", f"/v1/trajectories?loop=l&limit=2{after}")
        assert page["object"] == "list"
        seen += page["data"]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert [run["id"] for run in seen] == [f"run_{n}" for n in range(5)]
    assert seen[0]["trajectory"]["turns"][0]["call"]["token_ids"] == []
    assert (seen[0]["reward"], seen[0]["usage"]["completion_tokens"]) == (1.0, 3)
    _, page = await gateway.call("GET", "/v1/trajectories?iteration=1&tokens=true")
    assert [run["id"] for run in page["data"]] == ["run_3", "run_4"]
    assert page["data"][0]["trajectory"]["turns"][0]["call"]["token_ids"] == list(b"a b")
    _, run = await gateway.call("GET", "/v1/trajectories/run_4")
    assert run["trajectory"]["turns"][0]["call"]["prompt_token_ids"]

    status, made = await gateway.call("POST", "/v1/datasets", json={"loop": "l"})
    assert (status, made["accepted_runs"], made["samples"]) == (200, 1, 1)
    assert made["rejected"] == {"duplicate": 4}
    _, lines = await gateway.call("GET", f"/v1/datasets/{made['id']}/runs")
    assert [line["reason"] for line in lines["data"]] == [None] + ["duplicate"] * 4


async def test_events_of_several_runs_are_told_at_once_and_all_or_none(gateway: Gateway) -> None:
    run = {"agent": "a", "model": "m", "input": "", "stop_reason": "completed"}
    events = [{"kind": "run", "run_id": f"r{n}", "body": run} for n in range(3)]
    for run_id in (None, "", "a b", "..", 7):
        wrong = [*events, {**events[0], "run_id": run_id}]
        status, refused = await gateway.call("POST", "/v1/trajectories/events",
                                             json={"events": wrong})  # fmt: skip
        assert (status, refused["error"]["param"]) == (400, "events.3.run_id")
    assert (await gateway.call("GET", "/v1/trajectories"))[1]["data"] == []
    reward = {"kind": "reward", "run_id": "r1", "body": {"name": "useful", "value": 1.0}}
    for appended in (4, 0):
        _, answer = await gateway.call("POST", "/v1/trajectories/events",
                                     json={"events": [*events, reward]})  # fmt: skip
        assert answer == {"appended": appended, "duplicates": 4 - appended}
    assert [gateway.store.run(f"r{n}").reward for n in range(3)] == [None, 1.0, None]


def test_what_is_wrong_in_a_list_costs_no_more_the_longer_it_is() -> None:
    def refused(count: int) -> None:
        with pytest.raises(BadInput, match="events"):
            parse(SentEvents, {"events": [0] * count})
        with pytest.raises(BadInput, match="token ids"):
            check_embedded({"input": [None] * count})

    refused(1)
    tracemalloc.start()
    try:
        refused(50_000)
        assert tracemalloc.get_traced_memory()[1] < 3e6  # bytes; the lists themselves take 0.4e6
    finally:
        tracemalloc.stop()


async def test_a_client_cannot_say_what_was_sampled(gateway: Gateway) -> None:
    call = {"id": "c", "run_id": "r", "model": "m", "messages": [], "message": {}}
    turn = {"call_id": "c", "call": {**call, "token_ids": [1]}}
    run = {"agent": "a", "model": "m", "input": "", "stop_reason": "completed"}
    event = {"kind": "run", "body": {**run, "trajectory": {"turns": [turn]}}}
    await gateway.call("POST", "/v1/trajectories/r/events", json={"events": [event]})
    assert gateway.store.run("r").trajectory.turns[0].call is None


async def test_versions_staging_and_promotion(gateway: Gateway, tmp_path: Path) -> None:
    await gateway.call("POST", "/v1/models/calc/versions", json={"checkpoint": "calc@1"})
    new = {"checkpoint": str(checkpoint(tmp_path / "new", b"better"))}
    for _ in range(2):
        status, version = await gateway.call("POST", "/v1/models/calc/versions", json=new)
        assert (status, version["id"], version["number"]) == (200, "calc@2", 2)
    status, report = await gateway.call(
        "POST", "/v1/models/calc/versions/2/stage", json={"force": True}
    )
    assert (status, report["passed"], gateway.engine.version) == (200, True, "calc@2")
    models = {model.id async for model in gateway.client().models.list()}
    assert models == {"calc", "calc@1", "calc@2"}
    model = await gateway.client().models.retrieve("calc")
    assert (model.owned_by, model.to_dict()["root"]) == ("cray-agents", "calc@1")
    assert model.to_dict()["max_model_len"] is None  # a scripted engine has no such bound
    body = {"version": 2, "who": "me", "reason": "better"}
    status, promotion = await gateway.call("POST", "/v1/models/calc/promote", json=body)
    assert (promotion["number"], promotion["version"]) == (2, 2)
    assert gateway.engine.loaded == ["calc@1", "calc@2"]  # staged already
    await gateway.call("POST", "/v1/models/calc/promote", json={"version": 1})
    assert gateway.engine.version == "calc@1"
    _, history = await gateway.call("GET", "/v1/models/calc/history")
    assert [p["version"] for p in history["data"]] == [1, 2, 1]
    _, versions = await gateway.call("GET", "/v1/models/calc/versions")
    assert [v["promoted"] for v in versions["data"]] == [True, False]


async def test_a_version_that_is_not_proven_is_not_promoted(tmp_path: Path) -> None:
    async with served(tmp_path, trainer=partial(ScriptedTrainer, probe=PROBE)) as gateway:
        gateway.services.home.dataset("ds-1").mkdir(parents=True)
        job = {"dataset": "ds-1", "parent": "calc@1", "hyperparameters": {"steps": 1}}
        _, done = await gateway.call("POST", "/v1/jobs", json=job)
        body = {"checkpoint": done["checkpoint"]}
        await gateway.call("POST", "/v1/models/calc/versions", json=body)
        gateway.engine.drift = 0.5
        for path in ("/v1/models/calc/versions/2/stage", "/v1/models/calc/promote"):
            status, failed = await gateway.call("POST", path, json={"version": 2, "force": True})
            assert (status, failed["error"]["code"]) == (409, "swap_failed")
            assert (await gateway.call("GET", "/v1/models/calc/history"))[1]["data"][1:] == []
        gateway.engine.drift = 0.0
        status, _ = await gateway.call("POST", "/v1/models/calc/promote", json={"version": 2})
        assert (status, gateway.engine.version) == (200, "calc@2")


async def test_a_corrupt_checkpoint_is_refused_by_name(gateway: Gateway) -> None:
    version = gateway.services.registry.resolve("calc@1")
    weights = gateway.services.home.checkpoint(version.checkpoint) / "model.safetensors"
    weights.write_bytes(b"weightz")
    body = {"checkpoint": version.checkpoint}
    status, answer = await gateway.call("POST", "/v1/models/calc/versions", json=body)
    assert (status, answer["error"]["code"]) == (422, "corrupt")
    assert "model.safetensors" in answer["error"]["message"]


async def test_jobs(gateway: Gateway) -> None:
    body: dict[str, Any] = {"dataset": "ds-1", "parent": "calc", "hyperparameters": {"steps": 2}}
    status, answer = await gateway.call("POST", "/v1/jobs", json=body)
    assert (status, answer["error"]["param"]) == (400, "dataset")
    home, trainer = gateway.services.home, gateway.services.trainer
    home.dataset("ds-1").mkdir(parents=True)
    status, job = await gateway.call("POST", "/v1/jobs", json=body)
    assert (status, job["state"], job["step"]) == (200, "succeeded", 2)
    assert isinstance(trainer, ScriptedTrainer)
    (spec,), version = trainer.submitted, gateway.services.registry.resolve("calc")
    assert spec.parent == str(home.checkpoint(version.checkpoint))
    assert (spec.parent_sha256, spec.code) == (version.weights_sha256, "code-1")
    path = f"/v1/jobs/{job['id']}"
    assert (await gateway.call("GET", path))[1] == job
    page = {"object": "list", "data": [job], "has_more": False}
    page |= {"first_id": job["id"], "last_id": job["id"]}
    assert (await gateway.call("GET", "/v1/jobs"))[1] == page
    _, events = await gateway.call("GET", f"{path}/events?after=1")
    assert [event["step"] for event in events["data"]] == [1, 2] and events["last"] == 3
    (home.job(job["id"]) / "log.txt").write_text("one\ntwo\nthree\n")
    assert (await gateway.call("GET", f"{path}/logs?tail=2"))[1] == "two\nthree\n"
    assert (await gateway.call("POST", f"{path}/cancel"))[1] == job
    bad = {**body, "hyperparameters": {"steps": 2, "bach_size": 1}}
    status, answer = await gateway.call("POST", "/v1/jobs", json=bad)
    assert (status, answer["error"]["param"]) == (400, "hyperparameters.bach_size")


async def test_a_job_can_be_asked_for_whole(gateway: Gateway) -> None:
    home, trainer = gateway.services.home, gateway.services.trainer
    home.dataset("ds-1").mkdir(parents=True)
    version = gateway.services.registry.resolve("calc")
    request: dict[str, Any] = {
        "method": "dpo",
        "dataset": "ds-1",
        "parent": "calc@1",
        "reference": "calc@1",
        "hyperparameters": {"steps": 1, "preference": {"beta": 0.5}, "lora": {"rank": 2}},
        "layout": {"data": 2, "context": 2},
        "keep": 3,
        "evaluate_every": 5,
        "recompute": "full",
        "logprob_limit": 0.25,
    }
    status, _ = await gateway.call("POST", "/v1/jobs", json=request)
    assert status == 200 and isinstance(trainer, ScriptedTrainer)
    spec = trainer.submitted[-1]
    assert (spec.reference, spec.reference_sha256) == (spec.parent, version.weights_sha256)
    assert (spec.layout.world, spec.keep, spec.evaluate_every) == (4, 3, 5)
    assert (spec.recompute, spec.logprob_limit) == ("full", 0.25)
    assert spec.hyperparameters.lora is not None and spec.hyperparameters.preference.beta == 0.5
    for field, changed in (
        ("reference", {"reference": "nobody@1"}),
        ("reference_sha256", {"reference": None, "reference_sha256": "0" * 64}),
        ("method", {"method": "sft"}),
        ("hyperparameters.lora.rank", {"hyperparameters": {"steps": 1, "lora": {"rank": 0}}}),
    ):
        status, answer = await gateway.call("POST", "/v1/jobs", json=request | changed)
        assert (status in (400, 404), answer["error"]["param"]) == (True, field), answer


async def test_a_teacher_is_resolved_and_its_hash_decides(gateway: Gateway) -> None:
    trainer, version = gateway.services.trainer, gateway.services.registry.resolve("calc@1")
    gateway.services.home.dataset("ds-1").mkdir(parents=True)
    request: dict[str, Any] = {"method": "distill", "parent": "calc@1", "teacher": "calc@1"}
    request |= {"dataset": "ds-1", "hyperparameters": {"steps": 1}}
    status, answer = await gateway.call("POST", "/v1/jobs", json=request)
    assert status == 200 and isinstance(trainer, ScriptedTrainer)
    spec = trainer.submitted[-1]
    assert (spec.teacher, spec.teacher_sha256) == (spec.parent, version.weights_sha256)
    assert answer["id"] == spec.id
    assert spec.id != spec.model_copy(update={"teacher_sha256": "0" * 64}).id
    assert spec.id == spec.model_copy(update={"teacher": "/elsewhere"}).id
    for field, changed in (
        ("teacher", {"teacher": "nobody@1"}),
        ("teacher", {"teacher": 7}),
        ("teacher_sha256", {"teacher": None, "teacher_sha256": "0" * 64}),
        ("method", {"teacher": None}),
        ("method", {"method": "grpo"}),
    ):
        status, answer = await gateway.call("POST", "/v1/jobs", json=request | changed)
        assert (status in (400, 404), answer["error"]["param"]) == (True, field), answer


async def test_a_job_that_starts_afresh_needs_no_weights(gateway: Gateway, tmp_path: Path) -> None:
    gateway.services.home.dataset("ds-1").mkdir(parents=True)
    bare = tmp_path / "shape"
    bare.mkdir()
    body = {"dataset": "ds-1", "parent": str(bare), "hyperparameters": {"steps": 1}}
    random = body | {"hyperparameters": {"steps": 1, "init": "random"}}
    for request in (body, random):
        status, answer = await gateway.call("POST", "/v1/jobs", json=request)
        assert (status, answer["error"]["param"]) == (404, "parent"), answer
    (bare / "config.json").write_bytes(b"{}")
    assert (await gateway.call("POST", "/v1/jobs", json=random))[0] == 200
    trainer = gateway.services.trainer
    assert isinstance(trainer, ScriptedTrainer)
    assert trainer.submitted[-1].parent_sha256 == hashlib.sha256(b"{}").hexdigest()


async def test_loops_keep_the_first_record(gateway: Gateway) -> None:
    for number, value in ((1, "a"), (0, "b"), (1, "c")):
        path = f"/v1/loops/l/iterations/{number}"
        assert (await gateway.call("POST", path, json={"value": value}))[0] == 200
    _, answer = await gateway.call("GET", "/v1/loops/l/iterations")
    assert answer == {"data": [{"value": "b"}, {"value": "a"}]}
