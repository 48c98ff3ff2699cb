"""Tinker's wire API: the real client against the real gateway, over scripted engine and trainer."""

import json
import resource
import struct
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.records import Prompt
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.tinker.protobuf import (
    message,
    messages,
    read_fields,
    real,
    text,
    write_bytes,
    write_whole,
)
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.trainers.job.journal import CommandJournal, JobJournal
from cray_agents.training_commands import ForwardBackward, OptimStep, Publish, Save
from tests.support.bare_models import bare_model
from tests.support.scripted_gateway import Gateway, Reply, served
from tests.support.scripted_platform import platform
from tests.support.tinker.environment import TokenEngine, run

RETRIEVE = "/api/v1/retrieve_future"
SCRIPT = Path(__file__).parents[1] / "support" / "tinker" / "script.py"


@pytest.mark.slow
async def test_a_script_trains_saves_and_samples(tmp_path: Path) -> None:
    home, engines = Home(tmp_path / "home"), [TokenEngine(), TokenEngine()]
    _, secret = Keys(home).create("script", Role.train)
    with platform(home.root, engines[0], spares=[engines[1]]) as where:
        out = run(SCRIPT, where.url, f"tml-{secret}", folder=tmp_path)
    found = json.loads(out)
    model = found["model"]
    assert model.endswith(":train:0") and found["base"] == "Qwen/m"

    # what was sampled, by which version, with exact numbers; a snapshot never changes
    def samples(version: int, sampler: int, request: int) -> list[Any]:
        session = model.removesuffix(":train:0")
        name = f"{session}:sample:{sampler}/sample/{request}"
        return [[[version, k], [-1.0, -0.5], "stop", f"{name}/{k}"] for k in range(2)]

    assert found["before"] == samples(1, 0, 0)
    assert found["after"] == samples(2, 1, 0)
    assert found["alias"] == samples(2, 2, 0)
    assert found["still before"] == samples(1, 0, 1)
    requests = [r for engine in engines for r in engine.requests]
    asked = next(r for r in requests if "stop_token_ids" in r)
    wanted = {"model": "m@2", "prompt": [5, 6, 7], "n": 2, "max_tokens": 4, "seed": 1}
    assert asked.items() >= (wanted | {"top_k": 3, "stop_token_ids": [9]}).items()
    assert found["saved"] == [f"tinker://{model}/sampler_weights/{name}" for name in "ab"]
    assert found["checkpoints"] == [*found["saved"], f"tinker://{model}/weights/s"]
    assert found["weights"] == 4 and model in found["runs"]

    # log-probabilities of what is trained on, or of everything where only these are asked for
    assert found["imitation"] == [[[0, 0, -0.5, -0.5], [-0.5] * 4], {"loss:sum": 0.5 * 7}]
    assert found["scored"] == [[-0.5] * 4] and found["loaded"][1] == [[-0.5] * 4]
    for loss in ("importance_sampling", "ppo", "cispo"):
        assert found[loss] == [[0, 0, -0.5, -0.5]] * 2
    assert found["step"] == {"grad_norm": 1.0}

    refused = found["refused"]
    for name, reason in {
        "loss": "'gspo' is not served: use cross_entropy, importance_sampling, ppo, cispo",
        "setting": "ppo has no 'clip'; it has clip_low_threshold, clip_high_threshold",
        "targets": "only the next token is trained on",
        "column": "ppo does not read 'weights'",
        "base": "'Qwen/none' is not served here",
        "optimizer": "create_training_client_from_state begins with a new optimizer",
        "name": "saved weights never change",
        "path": "no weights at",
        "alternatives": "topk_sample_logprobs is not served",
    }.items():
        assert reason in refused[name], name

    # the commands, the versions with their lineage, and the runs that were recorded
    folders = {}
    for spec in home.jobs.glob("*/spec.json"):
        folders[json.loads(spec.read_text())["commands"]] = CommandJournal(spec.parent)
    journal = folders[model]
    commands = [journal.command(number) for number in range(1, 12)]
    kinds = [Save, ForwardBackward, OptimStep, *[ForwardBackward] * 4, OptimStep, Publish, Save]
    assert [type(command) for command in commands] == [*kinds, Save]
    assert [c.keep_state for c in commands[8:]] == [False, False, True]  # save_state alone
    assert commands[2] == OptimStep(
        learning_rate=1e-3, weight_decay=0.1, clip_grad=2, beta1=0.9, beta2=0.95, eps=1e-12
    )
    first = commands[1].data[0]
    assert (first.token_ids, first.weights) == ([5, 6, 7, 8, 9], [0, 0, 0, 1, 2])
    policy = commands[5]
    assert policy.loss == "ppo" and policy.clip_low == pytest.approx(0.1)
    assert policy.data[1].weights == [0, 0, 0, 1, 1]
    assert policy.data[1].advantages == [0, 0, 0, -1, -1]
    assert policy.data[0].logprobs == [0, 0, 0, -0.5, -0.25]
    assert [command.backward for command in commands[3:5]] == [False, True]
    registry = Registry(home)
    assert [version.id for version in registry.versions("m")] == ["m@1", "m@2"]
    assert registry.promoted("m").id == "m@1"
    assert registry.resolve("m@2").job == home_job(home, model)
    store = Store(home)
    runs = store.runs()
    await store.close()
    calls = [call for run in runs for call in run.calls]
    assert sorted((call.model, call.token_ids) for call in calls) == sorted(
        (f"m@{version}", [version, k]) for version in (1, 1, 2, 2) for k in range(2)
    )
    assert {tag for run in runs for tag in run.tags} == {
        f"{model.removesuffix(':train:0')}:sample:{number}" for number in range(3)
    }

    # with its optimizer it begins with the state that was kept, over the same parent
    continued, path = found["continued"]
    assert path == f"tinker://{continued}/weights/s"
    first, second, new = (
        JobJournal(home, home_job(home, name)).spec()
        for name in (model, continued, found["loaded"][0])
    )
    assert second.state_from == f"{first.id}/11" and new.state_from is None
    same = {"commands": continued, "state_from": second.state_from}
    assert second == first.model_copy(update=same)
    assert registry.resolve("m@2").weights_sha256 and (new.parent, second.parent) == (
        str(home.checkpoint(registry.resolve("m@2").checkpoint)),
        first.parent,
    )


def home_job(home: Home, model: str) -> str:
    return str(json.loads((home.tinker / "models" / model / "model.json").read_text())["job"])


async def send(gateway: Gateway, body: bytes) -> Reply:
    """A pass, as the client sends it."""
    headers = {"content-type": "application/x-protobuf"}
    url = gateway.url + "/api/v1/forward_backward"
    async with gateway.http.post(url, data=body, headers=headers) as response:
        return Reply(response.status, dict(response.headers), await response.read())


def datum(tokens: list[int], targets: list[int], weights: list[float]) -> bytes:
    def tensor(kind: int, content: bytes, length: int) -> bytes:
        return write_bytes(1, content) + write_whole(3, kind) + write_whole(4, length)

    def column(name: str, content: bytes) -> bytes:
        return write_bytes(2, write_bytes(1, name.encode()) + write_bytes(2, content))

    ids_in = write_bytes(1, struct.pack(f"<{len(tokens)}i", *tokens))
    ids = struct.pack(f"<{len(targets)}q", *targets)
    numbers = struct.pack(f"<{len(weights)}f", *weights)
    return (
        write_bytes(1, write_bytes(1, ids_in))
        + column("target_tokens", tensor(2, ids, len(targets)))
        + column("weights", tensor(1, numbers, len(weights)))
    )


def forward_backward(model_id: str, sequence: int, *data: bytes) -> bytes:
    return (
        write_bytes(1, model_id.encode())
        + write_whole(2, sequence)
        + b"".join(write_bytes(3, one) for one in data)
        + write_bytes(4, b"cross_entropy")
    )


async def test_futures_outlive_the_gateway(tmp_path: Path) -> None:
    """The same request is the same future, another one under its number is refused."""
    new = {"session_id": "s", "model_seq_id": 3, "base_model": "calc"}
    right = datum([1, 2, 3], [2, 3, 4], [0, 1, 0.5])
    other = datum([1, 2, 3], [2, 3, 5], [0, 1, 1])
    async with served(tmp_path) as gateway:
        _, made = await gateway.call("POST", "/api/v1/create_model", json=new)
        assert made == {"request_id": "s:train:3/create", "model_id": "s:train:3"}
        first = await send(gateway, forward_backward("s:train:3", 1, right))
        assert first.json == {"request_id": "s:train:3/1/pass", "model_id": "s:train:3"}
    async with served(tmp_path) as gateway:
        assert (await send(gateway, forward_backward("s:train:3", 1, right))).json == first.json
        refused = await send(gateway, forward_backward("s:train:3", 1, other))
        assert refused.status == 400 and b"two clients" in refused.body
        late = await send(gateway, forward_backward("s:train:3", 7, right))
        assert late.status == 400 and b"the next one is 2" in late.body
        assert (await gateway.call("POST", "/api/v1/create_model", json=new))[1] == made
        ask = {"request_id": "s:train:3/1/pass"}
        async with gateway.http.post(gateway.url + RETRIEVE, json=ask) as response:
            assert response.headers["content-type"] == "application/x-protobuf"
            result = read_fields(await response.read())
        record = read_fields(message(result, 2))
        logprobs = read_fields(message(read_fields(message(record, 2)), 2))
        assert struct.unpack("<3f", message(logprobs, 1)) == (0, -0.5, -0.5)
        loss = read_fields(messages(result, 3)[0])
        assert (text(loss, 1), real(loss, 2)) == ("loss:sum", 0.75)
        sample = {"request_id": "s:sample:0/sample/0"}  # of the process before
        assert (await gateway.call("POST", RETRIEVE, json=sample))[0] == 410
        for unknown in ("nothing", "s:train:4/1/pass", "s:train:3/9/pass", "s:train:3/x/pass"):
            assert (await gateway.call("POST", RETRIEVE, json={"request_id": unknown}))[0] == 404
        unload = {"model_id": "s:train:3"}
        assert (await gateway.call("POST", "/api/v1/unload_model", json=unload))[0] == 200
        after = await send(gateway, forward_backward("s:train:3", 2, right))
        assert b"is cancelled: it takes no commands" in after.body


async def test_weights_that_met_a_full_disk_are_saved_once_there_is_room(tmp_path: Path) -> None:
    """Under their own name, and later ones do not rely on them."""
    new = {"session_id": "s", "model_seq_id": 0, "base_model": "calc"}
    adam = {"model_id": "s:train:0", "adam_params": {}}
    model = bare_model(tmp_path / "large", b"x" * (1 << 20))
    async with served(tmp_path, model=model) as gateway:

        async def saved(sequence: int, name: str, kind: str = "sampler_weights") -> Any:
            save = {"model_id": "s:train:0", "seq_id": sequence, "path": name}
            route = "save_weights_for_sampler" if kind == "sampler_weights" else "save_weights"
            status, sent = await gateway.call("POST", f"/api/v1/{route}", json=save)
            return await gateway.call("POST", RETRIEVE, json=sent) if status == 200 else sent

        await gateway.call("POST", "/api/v1/create_model", json=new)
        await send(gateway, forward_backward("s:train:0", 1, datum([1, 2], [2, 3], [0, 1])))
        await gateway.call("POST", "/api/v1/optim_step", json={**adam, "seq_id": 2})
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, before[1]))
        try:
            for sequence, name in ((3, "a"), (4, "b")):
                _, failed = await saved(sequence, name)
                assert failed["error"] == "the checkpoint was not written: File too large"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        for sequence, name, kind in (
            (5, "a", "sampler_weights"),
            (6, "c", "sampler_weights"),
            (7, "a", "weights"),
        ):
            status, answer = await saved(sequence, name, kind)
            assert (status, answer.get("path")) == (200, f"tinker://s:train:0/{kind}/{name}")
        taken = await saved(8, "a")
        assert "was saved by request 5: saved weights never change" in taken["error"]["message"]
        home = gateway.services.home
        journal = CommandJournal(home.job(home_job(home, "s:train:0")))
        kinds = [type(journal.command(number)) for number in range(3, 8)]
        assert kinds == [Publish, Publish, Publish, Save, Save]
        versions = [version.id for version in gateway.services.registry.versions("calc")]
        assert versions == ["calc@1", "calc@2"]
        ask = {"request_id": "s:train:0/3/sampler_weights/a"}  # its own future still says why
        assert "File too large" in (await gateway.call("POST", RETRIEVE, json=ask))[1]["error"]


async def test_saved_weights_keep_the_prompt_of_their_base(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        registry, prompts = gateway.services.registry, {"adder": Prompt(instructions="Add.")}
        imported = registry.import_checkpoint(registry.resolve("calc").checkpoint)
        base = registry.register("calc", *imported, prompts)
        new = {"session_id": "s", "model_seq_id": 0, "base_model": base.id}
        await gateway.call("POST", "/api/v1/create_model", json=new)
        await send(gateway, forward_backward("s:train:0", 1, datum([1, 2], [2, 3], [0, 1])))
        step = {"model_id": "s:train:0", "adam_params": {}, "seq_id": 2}
        await gateway.call("POST", "/api/v1/optim_step", json=step)
        save = {"model_id": "s:train:0", "seq_id": 3, "path": "a"}
        _, sent = await gateway.call("POST", "/api/v1/save_weights_for_sampler", json=save)
        assert (await gateway.call("POST", RETRIEVE, json=sent))[0] == 200
        *_, saved = registry.versions("calc")
    assert (saved.id, saved.prompts) == ("calc@3", prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [b"", b"\xff", b"\x0b", b"\x0a\x05ab", write_whole(3, 1), write_bytes(3, b"\xff"), bytes(9)],
)
async def test_what_is_no_request_is_refused(tmp_path: Path, body: bytes) -> None:
    async with served(tmp_path) as gateway:
        assert (await send(gateway, body)).status == 400


async def test_a_model_is_trained_by_its_key_or_an_admin(tmp_path: Path) -> None:
    roles = {"one": Role.train, "two": Role.train, "ops": Role.admin}
    keys = Keys(Home(tmp_path / "home"))
    secrets = {name: keys.create(name, role)[1] for name, role in roles.items()}
    new = {"session_id": "s", "model_seq_id": 0, "base_model": "calc"}
    named = {"model_id": "s:train:0"}
    saved = {**named, "seq_id": 2, "path": "a"}
    training: list[tuple[str, Any]] = [
        ("forward_backward", forward_backward("s:train:0", 1, datum([1, 2], [2, 3], [0, 1]))),
        ("save_weights", saved),
        ("save_weights_for_sampler", saved),
        ("optim_step", {**named, "seq_id": 3, "adam_params": {}}),
        ("unload_model", named),
    ]
    async with served(tmp_path) as gateway:

        async def sent(who: str, path: str, body: Any) -> int:
            content = {"data" if isinstance(body, bytes) else "json": body}
            headers = {"authorization": f"Bearer {secrets[who]}"}
            url = f"{gateway.url}/api/v1/{path}"
            async with gateway.http.post(url, headers=headers, **content) as response:
                return response.status

        assert await sent("one", "create_model", new) == 200
        for path, body in [("create_model", {**new, "lora_config": {"rank": 4}}), *training]:
            assert await sent("two", path, body) == 403, path
        assert await sent("two", "get_info", named) == 200  # every key may read
        for path, body in [("create_model", new), training[0], training[1]]:
            assert await sent("one", path, body) == 200, path
        for path, body in training[3:]:
            assert await sent("ops", path, body) == 200, path


async def test_a_client_needs_a_key_that_may_train(tmp_path: Path) -> None:
    new = {"session_id": "s", "model_seq_id": 0, "base_model": "calc"}
    async with served(tmp_path) as gateway:
        keys = Keys(gateway.services.home)
        secrets = {role: keys.create(role.name, role)[1] for role in Role}
        for secret, status in (
            ("tml-nobody", 401),
            (f"tml-{secrets[Role.use]}", 403),
            (f"tml-{secrets[Role.train]}", 200),
            (secrets[Role.train], 200),
        ):
            headers = {"x-api-key": secret}
            url = gateway.url + "/api/v1/create_model"
            async with gateway.http.post(url, json=new, headers=headers) as response:
                assert response.status == status
