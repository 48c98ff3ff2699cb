"""Ownership: only its key or an admin changes a record, and mere claims are not trained on."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.model_calls.apis.chat import CHAT as CHAT_API
from cray_agents.runtime.gateway.model_calls.apis.chat import COMPLETIONS
from cray_agents.runtime.gateway.model_calls.apis.messages import MESSAGES
from cray_agents.runtime.gateway.model_calls.apis.responses import RESPONSES
from cray_agents.runtime.vllm_plugins import wire
from tests.support.scripted_gateway import CHAT, Gateway, says, served

RUN: Any = {"agent": "a", "model": "calc@1", "input": "2+2?", "stop_reason": "completed"}
REWARD: Any = {"kind": "reward", "body": {"name": "good", "value": 1.0}}
LOOPS_RUN = "run_" + "0123456789abcdef01234567"  # the form of a loop's run ids
TOKEN = "the platform's own"
APIS = (CHAT_API, COMPLETIONS, RESPONSES, MESSAGES)


@dataclass
class Site:
    """A gateway with four keys: two of role `use`, one of `train`, one of `admin`."""

    gateway: Gateway
    keys: dict[str, str]

    def headers(self, who: str, **more: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[who]}", **more}

    async def call(self, who: str, method: str, path: str, **options: Any) -> tuple[int, Any]:
        headers = self.headers(who, **options.pop("headers", {}))
        return await self.gateway.call(method, path, headers=headers, **options)

    async def ask(self, who: str, run_id: str | None = None, text: str = "hello") -> Any:
        named = {} if run_id is None else {"x-run-id": run_id}
        return await self.gateway.ask(text, headers=self.headers(who, **named))

    async def tell(self, who: str, run_id: str, *events: Any) -> tuple[int, Any]:
        path = f"/v1/trajectories/{run_id}/events"
        return await self.call(who, "POST", path, json={"events": list(events)})

    async def reward(self, who: str, run_id: str, **body: Any) -> tuple[int, Any]:
        return await self.call(who, "POST", f"/v1/trajectories/{run_id}/rewards", json=body)

    async def upload(self, who: str, purpose: str = "user_data", content: bytes = b"x") -> Any:
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        form.add_field("file", content, filename="f.jsonl")
        status, file = await self.call(who, "POST", "/v1/files", data=form)
        assert status == 200
        return file


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    roles = {"ann": Role.use, "bob": Role.use, "tim": Role.train, "ops": Role.admin}
    keys = Keys(Home(tmp_path / "home"))
    secrets = {name: keys.create(name, role)[1] for name, role in roles.items()}
    async with served(tmp_path, api_keys="required", token=TOKEN) as gateway:
        yield Site(gateway, {**secrets, "platform": TOKEN})


def key_id(site: Site, name: str) -> str:
    keys = Keys(site.gateway.services.home).list()
    return next(record.id for record, _ in keys if record.name == name)


def described(run_id: str, **changes: Any) -> Any:
    return {"kind": "run", "body": {**RUN, "id": run_id, **changes}}


def denied(answer: tuple[int, Any], code: str = "not_the_owner") -> bool:
    return answer[0] == 403 and answer[1]["error"]["code"] == code


async def test_a_run_is_written_by_its_owner_or_an_admin(site: Site) -> None:
    run_id = (await site.ask("ann")).run_id
    for who in ("bob", "tim"):
        assert denied(await site.tell(who, run_id, described(run_id)))
        assert denied(await site.tell(who, run_id, REWARD))
        assert denied(await site.reward(who, run_id, value=1))
        assert (await site.ask(who, run_id)).code == "not_the_owner"
        # of several runs in one request none is taken, if one is another's
        several = [{**described("run_mine"), "run_id": "run_mine"}, {**REWARD, "run_id": run_id}]
        path = "/v1/trajectories/events"
        assert denied(await site.call(who, "POST", path, json={"events": several}))
        assert (await site.call("ops", "GET", "/v1/trajectories/run_mine"))[0] == 404
    run = site.gateway.store.run(run_id)
    assert (run.rewards, run.agent, len(run.calls)) == ([], "", 1)
    assert (run.owner, run.calls[0].owner) == (key_id(site, "ann"),) * 2
    for who in ("ann", "ops"):
        turns = {"turns": [{"call_id": run.calls[0].id}]}
        assert (await site.tell(who, run_id, described(run_id, trajectory=turns)))[0] == 200
        assert (await site.reward(who, run_id, value=1, source=who))[0] == 200
        assert (await site.ask(who, run_id)).status == 200
    # every key may read
    assert (await site.call("bob", "GET", f"/v1/trajectories/{run_id}"))[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
async def test_no_api_adds_a_call_to_anothers_run(site: Site, api: Any) -> None:
    run_id = (await site.ask("ann")).run_id
    body: Any = {"model": "calc", "max_tokens": 5, "messages": says("hi")}
    if api.path == "/v1/completions":
        body = {"model": "calc", "prompt": "hi"}
    elif api.path == "/v1/responses":
        body = {"model": "calc", "input": "hi"}
    ways = ((f"/runs/{run_id}{api.path}", {}), (api.path, {"x-run-id": run_id}))
    for path, headers in ways:
        for stream in (False, True):
            request = {**body, "stream": stream}
            assert denied(await site.call("bob", "POST", path, json=request, headers=headers))
    assert len(site.gateway.calls(run_id)) == 1


@pytest.mark.parametrize(
    ("claim", "param"),
    [
        ({"loop": "calc-loop", "iteration": 1}, "loop"),
        ({"imported": "openai"}, "imported"),
        ({"task": {"input": "2+2?", "split": "holdout"}}, "task.split"),
        ({"task": {"input": "2+2?", "split": "test"}}, "task.split"),
    ],
)
async def test_a_use_key_claims_no_loop_no_import_and_no_held_out_split(
    site: Site, claim: Any, param: str
) -> None:
    run_id = (await site.ask("ann")).run_id
    status, refused = await site.tell("ann", run_id, described(run_id, **claim))
    assert (status, refused["error"]["code"]) == (403, "insufficient_permissions")
    assert refused["error"]["param"] == f"events.0.body.{param}"
    assert site.gateway.store.run(run_id).agent == ""
    for who in ("tim", "ops", "platform"):  # who trains may bring in what was not recorded here
        assert (await site.tell(who, f"run_{who}", described(f"run_{who}", **claim)))[0] == 200


@pytest.mark.slow
async def test_what_is_claimed_is_not_trained_on(site: Site) -> None:
    """Only tokens sampled here count, not posted messages, turns, tokens and rewards."""
    call = {"id": "c", "run_id": "run_a", "model": "calc@1", "messages": [], "message": {},
            "prompt_token_ids": [1], "token_ids": [2], "logprobs": [-0.1]}  # fmt: skip
    turns = [{"call_id": "c", "call": call}]
    trajectory = {"messages": says("2+2?"), "turns": turns}
    good = {"rewards": [{"name": "good", "value": 1.0}]}
    assert (await site.tell("ann", "run_a", described("run_a", trajectory=trajectory, **good)))[
        0
    ] == 200
    claimed = {"events": [{"kind": "call", "body": call}]}
    path = "/v1/trajectories/run_a/events"
    assert (await site.call("ann", "POST", path, json=claimed))[0] == 400
    sampled = (await site.ask("ann")).run_id
    assert (await site.reward("ann", sampled, value=1))[0] == 200
    recipe = DatasetRecipe().model_dump(mode="json")
    _, built = await site.call("tim", "POST", "/v1/datasets", json=recipe)
    assert built["rejected"] == {"missing_call": 1}
    assert built["accepted_runs"] == 1


async def test_names_that_loops_batches_and_imports_give_are_not_taken_before_them(
    site: Site,
) -> None:
    """These ids can be guessed: a run begun under one would pass for a loop's or a batch's."""
    for run_id in (LOOPS_RUN, f"{LOOPS_RUN}-retry1", "batch_0123-7", "imported-0123"):
        assert (await site.ask("ann", run_id)).code == "not_the_owner", run_id
        assert denied(await site.tell("ann", run_id, described(run_id)))
        assert (await site.tell("ann", run_id, REWARD))[0] in (403, 404)
    assert (await site.ask("tim", LOOPS_RUN)).status == 200  # a trainer may begin loop runs
    assert denied(await site.tell("ann", LOOPS_RUN, REWARD))
    # a name of any other kind is free
    assert (await site.ask("ann", "night-shift.7")).status == 200


async def test_nothing_is_rewarded_before_it_is_there(site: Site) -> None:
    assert (await site.tell("ann", "run_later", REWARD))[0] == 404
    assert (await site.tell("ann", "run_later", described("run_later"), REWARD))[0] == 200
    assert site.gateway.store.run("run_later").reward == 1.0


async def test_an_event_under_anothers_name_is_not_taken_for_it(site: Site) -> None:
    """Events are recorded once per id: another client's id would suppress its event."""
    bobs = {**described("run_bob"), "id": "run_bob.run.0"}
    assert (await site.tell("ann", "run_ann", {**described("run_ann"), "id": bobs["id"]}))[0] == 200
    assert await site.tell("bob", "run_bob", bobs) == (200, {"appended": 1, "duplicates": 0})
    assert await site.tell("bob", "run_bob", bobs) == (200, {"appended": 0, "duplicates": 1})
    # nor for the answer to a request that will be sent under an idempotency key
    answered = await site.gateway.ask("x", headers=site.headers("bob", **{"idempotency-key": "k"}))
    call_id = answered.json["id"]
    assert (await site.tell("ann", "run_2", {**described("run_2"), "id": call_id}))[0] == 200
    assert site.gateway.store.run("run_2").agent == "a"


async def test_who_gave_a_reward_is_told_and_cannot_be_claimed(site: Site) -> None:
    run_id = (await site.ask("ann")).run_id
    body = {"name": "good", "value": 1.0, "giver": "ops"}
    assert (await site.tell("ann", run_id, {"kind": "reward", "body": body}))[0] == 200
    claim = described(run_id, owner="", rewards=[{**body, "name": "kind", "giver": ""}])
    assert (await site.tell("ann", run_id, claim))[0] == 200
    _, given = await site.reward("ops", run_id, value=0.5, name="late")
    assert given["giver"] == "ops"
    run = site.gateway.store.run(run_id)
    assert {r.name: r.giver for r in run.rewards} == {"good": "ann", "kind": "ann", "late": "ops"}
    assert run.owner == key_id(site, "ann")
    # the platform's own commands need no name
    assert (await site.reward("platform", run_id, value=0.5))[1]["giver"] == ""


@pytest.mark.parametrize("value", [1e308, -1e7, 1_000_001])
async def test_rewards_are_bounded(site: Site, value: float) -> None:
    run_id = (await site.ask("ann")).run_id
    for who in ("ann", "ops"):
        status, refused = await site.reward(who, run_id, value=value)
        assert (status, refused["error"]["param"]) == (400, "value")
        assert "reward_limit" in refused["error"]["message"]
        reward = {"name": "good", "value": value}
        for event in ({"kind": "reward", "body": reward}, described(run_id, rewards=[reward])):
            assert (await site.tell(who, run_id, event))[0] == 400
    assert site.gateway.store.run(run_id).rewards == []


async def test_many_rewards_of_one_run_are_bounded_too(site: Site) -> None:
    run_id = (await site.ask("ann")).run_id
    many = [{"name": f"r{n}", "value": 1e6} for n in range(1001)]
    assert (await site.tell("ann", run_id, described(run_id, rewards=many)))[0] == 400


async def test_a_reward_of_the_future_would_never_be_replaced(site: Site) -> None:
    run_id = (await site.ask("ann")).run_id
    body = {"name": "good", "value": 1.0, "time": time.time() + 86_400}
    assert (await site.tell("ann", run_id, {"kind": "reward", "body": body}))[0] == 400


async def test_records_without_an_owner_are_the_admins(tmp_path: Path) -> None:
    """Records from before owners were kept, or before the first key, belong to no key."""
    async with served(tmp_path) as gateway:
        run_id = (await gateway.ask("hello")).run_id
        assert gateway.store.run(run_id).owner == ""
        home = gateway.services.home
        ann, ops = (Keys(home).create(n, r)[1] for n, r in (("ann", Role.use), ("ops", Role.admin)))
    async with served(tmp_path) as gateway:
        site = Site(gateway, {"ann": ann, "ops": ops})
        assert denied(await site.reward("ann", run_id, value=1))
        assert (await site.ask("ann", run_id)).code == "not_the_owner"
        assert (await site.reward("ops", run_id, value=1))[0] == 200


async def test_without_keys_everything_is_this_hosts_own(gateway: Gateway) -> None:
    run_id = (await gateway.ask("hello")).run_id
    assert (await gateway.ask("again", headers={"x-run-id": run_id})).status == 200
    path = f"/v1/trajectories/{run_id}"
    events = [described(run_id, loop="l", task={"input": "x", "split": "holdout"}), REWARD]
    assert (await gateway.call("POST", f"{path}/events", json={"events": events}))[0] == 200
    _, given = await gateway.call("POST", f"{path}/rewards", json={"value": 1})
    assert given["giver"] == ""
    run = gateway.store.run(run_id)
    assert (run.owner, run.loop, {call.owner for call in run.calls}) == ("", "l", {""})


async def test_one_key_does_all_that_it_did(site: Site) -> None:
    """An agent's run as the SDK records it, feedback, files, a batch: nothing is refused."""
    run_id = (await site.ask("ann", "run_mine")).run_id
    call = site.gateway.calls(run_id)[0]
    event = described(
        run_id,
        trajectory={"messages": says("hello"), "turns": [{"call_id": call.id}]},
        rewards=[{"name": "good", "value": 0.5}],
        task={"input": "hello"},
    )
    assert (await site.tell("ann", run_id, event))[0] == 200
    assert await site.tell("ann", run_id, event) == (200, {"appended": 0, "duplicates": 1})
    assert (await site.reward("ann", run_id, value=1))[0] == 200
    assert site.gateway.store.run(run_id).reward == 1.5
    file = await site.upload("ann")
    assert (await site.call("ann", "DELETE", f"/v1/files/{file['id']}"))[0] == 200


async def test_files_are_deleted_by_their_owner_or_an_admin(site: Site) -> None:
    file = await site.upload("ann")
    path = f"/v1/files/{file['id']}"
    for who in ("bob", "tim"):
        assert denied(await site.call(who, "DELETE", path))
        assert (await site.call(who, "GET", path))[0] == 200
        assert (await site.call(who, "GET", f"{path}/content"))[0] == 200
    assert (await site.call("ann", "DELETE", path))[0] == 200
    assert (await site.call("bob", "DELETE", path))[0] == 404
    another = await site.upload("ann")
    assert (await site.call("ops", "DELETE", f"/v1/files/{another['id']}"))[0] == 200


async def test_uploads_are_gone_on_with_by_their_owner_or_an_admin(site: Site) -> None:
    announced = {"bytes": 1, "filename": "f", "mime_type": "text/plain", "purpose": "user_data"}

    def part() -> aiohttp.FormData:
        form = aiohttp.FormData()
        form.add_field("data", b"x", filename="data")
        return form

    for who in ("ann", "ops"):
        _, upload = await site.call("ann", "POST", "/v1/uploads", json=announced)
        path = f"/v1/uploads/{upload['id']}"
        assert denied(await site.call("bob", "POST", f"{path}/parts", data=part()))
        _, sent = await site.call(who, "POST", f"{path}/parts", data=part())
        whole = {"part_ids": [sent["id"]]}
        assert denied(await site.call("bob", "POST", f"{path}/complete", json=whole))
        assert denied(await site.call("bob", "POST", f"{path}/cancel"))
        assert (await site.call("bob", "GET", path))[1]["status"] == "pending"
        assert (await site.call(who, "POST", f"{path}/complete", json=whole))[0] == 200


async def test_batches_are_cancelled_by_their_owner_or_an_admin(site: Site) -> None:
    line = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"calc"}}'
    file = await site.upload("ann", "batch", line)
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    for who in ("ann", "ops"):
        _, batch = await site.call("ann", "POST", "/v1/batches", json=body)
        path = f"/v1/batches/{batch['id']}/cancel"
        assert denied(await site.call("bob", "POST", path))
        assert (await site.call(who, "POST", path))[0] == 200
    # of another's file it is the batch of who made it
    _, batch = await site.call("bob", "POST", "/v1/batches", json=body)
    path = f"/v1/batches/{batch['id']}/cancel"
    assert denied(await site.call("ann", "POST", path))
    assert (await site.call("bob", "POST", path))[0] == 200


async def test_tinkers_samplers_and_samples_are_their_keys(site: Site) -> None:
    """Whoever knows a sampler's id cannot take a number of it, nor read or end its samples."""

    async def send(who: str, path: str, body: Any) -> tuple[int, Any]:
        return await site.call(who, "POST", f"/api/v1/{path}", json=body)

    new = {"session_id": "s", "sampling_session_seq_id": 0, "base_model": "calc"}
    sampler = (await send("ann", "create_sampling_session", new))[1]["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [5, 6]}]}
    sample = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {}}
    for who in ("bob", "tim"):
        assert denied(await send(who, "create_sampling_session", new))
        assert denied(await send(who, "asample", {**sample, "seq_id": 7}))
    status, begun = await send("ann", "asample", {**sample, "seq_id": 7})
    assert status == 200
    asked = {"request_id": begun["request_id"]}
    for who in ("bob", "tim"):
        assert denied(await send(who, "cancel_future", asked))
        assert denied(await send(who, "retrieve_future", asked))
    task = site.gateway.services.tinker_samples.get(begun["request_id"]).task
    await asyncio.wait({task}, timeout=60)
    assert task.done() and not task.cancelled()
    for who in ("ann", "ops"):
        assert (await send(who, "create_sampling_session", new))[0] == 200
        assert (await send(who, "cancel_future", asked))[0] == 200


async def test_a_batchs_runs_are_its_owners(site: Site) -> None:
    """The worker asks with the platform's own key, on behalf of the owner."""
    for_ann = site.headers("platform", **{"x-run-id": "batch_1-0", "x-on-behalf-of": "key_ann"})
    assert (await site.gateway.ask("a line", headers=for_ann)).status == 200
    assert site.gateway.store.run("batch_1-0").owner == "key_ann"
    assert denied(await site.reward("bob", "batch_1-0", value=1))
    # only admins may act for another key
    forged = site.headers("bob", **{"x-on-behalf-of": key_id(site, "ann")})
    run_id = (await site.gateway.ask("hello", headers=forged)).run_id
    assert site.gateway.store.run(run_id).owner == key_id(site, "bob")


@pytest.mark.parametrize("mark", [wire.PROBE, "cray_agents_capture", "cray_agents_new"])
async def test_no_request_carries_the_platforms_marks(site: Site, mark: str) -> None:
    body: Any = {"model": "calc", "messages": says("x"), "prompt": "x", "input": "x"}
    for path in (*(api.path for api in APIS), "/v1/embeddings"):
        for who in ("ann", "ops"):
            marked = {**body, "vllm_xargs": {"session_id": "s", mark: 1}}
            status, refused = await site.call(who, "POST", path, json=marked)
            assert (status, refused["error"]["param"]) == (400, "vllm_xargs"), path
    ours = {**body, "vllm_xargs": {"session_id": "s"}}
    assert (await site.call("ann", "POST", CHAT, json=ours))[0] == 200


async def test_who_one_is(site: Site) -> None:
    status, caller = await site.call("ann", "GET", "/v1/whoami")
    assert (status, caller["key"]) == (200, key_id(site, "ann"))
    assert (caller["name"], caller["role"]) == ("ann", "use")
    assert caller["home"] is None, "only admins learn where the root lies"
    assert (await site.call("platform", "GET", "/v1/whoami"))[1]["key"] is None


@pytest.mark.slow
async def test_a_deep_follow_up_spoils_no_listing(tmp_path: Path) -> None:
    """A client's own tool call, nested 3,000 deep, once stopped each reader of the root's runs."""
    keys = Keys(Home(tmp_path / "home"))
    mine, theirs = (
        {"authorization": f"Bearer {keys.create(name, role)[1]}"}
        for name, role in (("bob", Role.use), ("tim", Role.train))
    )
    arguments = '{"a":' * 3000 + "1" + "}" * 3000
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    follow_up = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    async with served(tmp_path, api_keys="required") as gateway:
        await gateway.ask("hi", headers={**mine, "x-run-id": "mine"}, n=2)
        await gateway.ask(follow_up, headers={**mine, "x-run-id": "mine"})
        rewards = "/v1/trajectories/mine/rewards"
        await gateway.call("POST", rewards, json={"value": 1.0}, headers=theirs)
        for path in ("/mine", "", "/export?format=jsonl", "/export?format=otel"):
            status, answer = await gateway.call("GET", f"/v1/trajectories{path}", headers=theirs)
            assert status == 200, (path, answer)
        status, answer = await gateway.call("POST", "/v1/datasets", json={}, headers=theirs)
        assert status < 500, answer
