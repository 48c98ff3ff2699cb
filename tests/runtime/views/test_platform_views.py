"""Views of the platform over HTTP: queue, loops, lineage, usage, keys, warnings, changes."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.records import Event
from cray_agents.runtime.views import change_feed
from cray_agents.runtime.views.view_records import (
    LoopSummary,
    NewKey,
    QueueState,
    ShownKey,
    UsageTable,
    WarningList,
)
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import Hyperparameters, JobSpec, JobStatus
from tests.support.scripted_gateway import Gateway, echo, served, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
TAKES_CALLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ITERATION = {"holdout_tasks": 10, "version": "calc@1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with served(tmp_path_factory.mktemp("platform"), ScriptedEngine(echo)) as gateway:
        yield gateway


async def get(gateway: Gateway, path: str, **options: Any) -> Any:
    status, answer = await gateway.call("GET", path, **options)
    assert status == 200, answer
    return answer


async def answers(gateway: Gateway, status: int, **options: Any) -> None:
    """Wait until keys are looked at again, which they are within half a second."""
    async with asyncio.timeout(120):
        while (await gateway.call("GET", "/v1/whoami", **options))[0] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def describe(gateway: Gateway, run_id: str, **fields: Any) -> None:
    body = {"agent": "a", "model": "calc@1", "input": "q", "stop_reason": "completed", **fields}
    events = {"events": [{"kind": "run", "body": body}]}
    path = f"/v1/trajectories/{run_id}/events"
    assert (await gateway.call("POST", path, json=events))[0] == 200


async def test_the_queue_counts_by_class_and_key(gateway: Gateway) -> None:
    queue = await get(gateway, "/v1/queue")
    state = QueueState.model_validate(queue)
    assert state.interactive.inside == state.batch.waiting == 0 and queue["keys"] == []
    admission = gateway.services.admission
    tickets = [admission.enter("key_a", model="calc") for _ in range(state.capacity + 2)]
    tickets.append(admission.enter("key_b", batch=True, model="calc"))
    try:
        full = QueueState.model_validate(await get(gateway, "/v1/queue"))
    finally:
        for ticket in tickets:
            ticket.release()
    assert (full.interactive.inside, full.interactive.waiting) == (state.capacity, 2)
    assert [(one.key, one.waiting) for one in full.keys] == [("key_a", 2), ("key_b", 1)]
    assert full.batch.waiting == 1


async def test_loops_tell_their_last_iteration_and_held_out_success(gateway: Gateway) -> None:
    for number in range(3):
        record = {**ITERATION, "iteration": number, "holdout_success": number / 4, "target": 0.9}
        record |= {"test_success": 0.7} if number == 2 else {}
        await gateway.call("POST", f"/v1/loops/first/iterations/{number}", json=record)
    await gateway.call("POST", "/v1/loops/foreign/iterations/0", json={"score": 1})
    await gateway.call("POST", "/v1/loops/young/journal/settings-1", json={"a": 1})
    loops = await get(gateway, "/v1/loops")
    by_id = {row["id"]: LoopSummary.model_validate(row) for row in loops["data"]}
    first = by_id["first"]
    assert first.iterations == 3 and first.last is not None and first.last.iteration == 2
    assert [point.success for point in first.holdout] == [0.0, 0.25, 0.5]
    assert [point.test for point in first.holdout] == [None, None, 0.7]
    assert first.last.target == 0.9 and first.last.control is None
    assert by_id["foreign"].last is None and by_id["foreign"].iterations == 1
    assert by_id["young"].iterations == 0
    one = await get(gateway, "/v1/loops?limit=1")
    rest = await get(gateway, f"/v1/loops?after={one['last_id']}")
    assert one["has_more"] and len(rest["data"]) == 2
    assert (await gateway.call("GET", "/v1/loops?after=none"))[0] == 400
    for entry in ("settings-2", "settings-10", "settings-of"):
        await gateway.call("POST", f"/v1/loops/young/journal/{entry}", json={"a": entry})
    settings = (await get(gateway, "/v1/loops/young/settings"))["data"]
    assert settings == [{"a": 1}, {"a": "settings-2"}, {"a": "settings-10"}]
    assert (await get(gateway, "/v1/loops/first/settings"))["data"] == []


async def test_a_replicas_log_is_read_at_its_end(gateway: Gateway) -> None:
    status, none = await gateway.call("GET", "/v1/pool/0/log")
    assert (status, none) == (200, "")
    folder = gateway.services.home.replicas / "0" / "1"
    folder.mkdir(parents=True)
    (folder / "job.txt").write_text("of Slurm\n")
    assert (await gateway.call("GET", "/v1/pool/0/log"))[1] == "of Slurm\n"
    log = gateway.services.home.logs / "replica-0.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("first\nsecond\nthird\n")
    assert (await gateway.call("GET", "/v1/pool/0/log?tail=2"))[1] == "second\nthird\n"
    for name in ("99", "one"):
        status, refused = await gateway.call("GET", f"/v1/pool/{name}/log")
        assert status == 404 and refused["error"]["param"] == "replica"


async def test_an_iteration_has_a_timeline_for_perfetto(gateway: Gateway) -> None:
    record = {**ITERATION, "iteration": 0, "holdout_success": 0, "seconds": {"rollouts": 2}}
    await gateway.call("POST", "/v1/loops/timed/iterations/0", json=record)
    trace = await get(gateway, "/v1/loops/timed/iterations/0/timeline")
    assert any(event.get("name") == "rollouts" for event in trace["traceEvents"])
    assert (await gateway.call("GET", "/v1/loops/timed/iterations/9/timeline"))[0] == 404


async def test_all_versions_have_their_lineage(gateway: Gateway) -> None:
    lineage = (await get(gateway, "/v1/models/lineage"))["data"]
    assert lineage == (await get(gateway, "/v1/models/calc/lineage"))["data"]
    assert [version["id"] for version in lineage] == ["calc@1"]


async def test_usage_is_summed_by_key_model_and_time(gateway: Gateway) -> None:
    await gateway.ask("hello", headers={"x-run-id": "used"})
    facts, _ = gateway.store.places("used")
    query = f"since={facts.started}&until={facts.started}"
    usage = await get(gateway, f"/v1/usage?by=key,model&bucket=1h&{query}")
    UsageTable.model_validate(usage)
    (row,) = usage["data"]
    assert (row["key"], row["name"], row["model"]) == ("", "", "calc@1")
    assert row["prompt_tokens"] == facts.prompt_tokens and row["calls"] == row["runs"] == 1
    assert row["time"] <= facts.started < row["time"] + 3600 == row["time"] + usage["bucket"]
    whole = await get(gateway, "/v1/usage")
    assert whole["data"][0]["key"] is None and whole["data"][0]["runs"] >= 1
    for query in ("by=task", "bucket=1", "bucket=0h", "since=x", "limit=9999"):
        status, refused = await gateway.call("GET", f"/v1/usage?{query}")
        assert status == 400 and refused["error"]["param"] == query.partition("=")[0]


async def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        status, made = await gateway.call(
            "POST", "/v1/keys", json={"name": "boss", "role": "admin"}
        )
        boss = {"authorization": f"Bearer {NewKey.model_validate(made).secret}"}
        assert status == 200
        await answers(gateway, 401)
        _, user = await gateway.call("POST", "/v1/keys", json={"name": "user"}, headers=boss)
        me = {"authorization": f"Bearer {user['secret']}"}
        await answers(gateway, 200, headers=me)
        await gateway.ask("mine", headers=me)
        await gateway.ask("not mine", headers=boss)
        mine = await get(gateway, "/v1/usage?by=key", headers=me)
        assert [(row["key"], row["name"], row["runs"]) for row in mine["data"]] == [
            (user["id"], "user", 1)
        ]
        everybody = await get(gateway, "/v1/usage?by=key", headers=boss)
        assert {row["name"] for row in everybody["data"]} == {"user", "boss"}
        assert (await get(gateway, "/v1/whoami", headers=me))["home"] is None
        assert (await get(gateway, "/v1/whoami", headers=me))["features"] == ["keys", "score"]
        listed = await get(gateway, "/v1/keys", headers=boss)
        assert [key["name"] for key in listed["data"]] == ["user", "boss"]
        assert "secret" not in json.dumps(listed) and ShownKey.model_validate(listed["data"][0])
        for body in ({"name": "boss"}, {"name": "a b"}, {"name": "c", "role": "king"}, {}):
            status, refused = await gateway.call("POST", "/v1/keys", json=body, headers=boss)
            assert (status, refused["error"]["code"]) == (400, "invalid_value")
        _, ended = await gateway.call("DELETE", "/v1/keys/user", headers=boss)
        assert [key["revoked"] for key in ended["data"]] == [True]
        assert (await gateway.call("DELETE", "/v1/keys/none", headers=boss))[0] == 404


async def test_silent_failures_are_warned_of(gateway: Gateway) -> None:
    def task(number: int) -> dict[str, Any]:
        return {"input": f"q{number}", "split": "train"}

    for number in range(8):
        await describe(gateway, f"silent-{number}", loop="silent", started=1e9)
        for attempt in range(2):
            reward = {"name": "r", "value": 0.0}
            fields = {"loop": "flat", "iteration": 1, "attempt": attempt, "rewards": [reward]}
            fields |= {"task": task(number), "started": 1e9}
            await describe(gateway, f"flat-{number}-{attempt}", **fields)
    answer = "<think>A tool is needed<tool_call>{}</tool_call>"
    await gateway.ask(answer, headers={"x-run-id": "unparsed"})
    (call,) = gateway.calls("unparsed")
    body = call.model_dump(mode="json") | {"tools": TAKES_CALLS, "id": "c2", "run_id": "missed"}
    await gateway.store.append([Event(id="c2", run_id="missed", kind="call", body=body)])
    warnings = WarningList.model_validate(await get(gateway, "/v1/health/warnings?since=1e9"))
    kinds = {(warning.kind, warning.loop) for warning in warnings.data}
    assert {("no_rewards", "silent"), ("equal_rewards", "flat"), ("zero_variance", "flat")} <= kinds
    assert {("unparsed_tool_calls", None), ("unparsed_thoughts", None)} <= kinds
    journal = JobJournal(gateway.services.home, "job-0")
    steps = Hyperparameters(steps=1)
    journal.write_spec(JobSpec(dataset="d", parent="p", parent_sha256="0", hyperparameters=steps))
    journal.write_status(JobStatus(id="job-0", state="failed", error="no room in /secret/place"))
    rows = (await get(gateway, "/v1/health/warnings"))["data"]
    (failed,) = [row for row in rows if row["kind"] == "failed_job"]
    assert (failed["job"], failed["level"]) == ("job-0", "error")
    assert "no room" in failed["message"] and "/secret" not in failed["message"]
    later = WarningList.model_validate(await get(gateway, "/v1/health/warnings?since=3e9"))
    assert later.data == []


class Reader:
    """Reads a stream of changes: `events`, and the cursor of the last one."""

    def __init__(self, gateway: Gateway, after: str | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.cursor = ""
        self.open = False
        self._task = asyncio.create_task(self._read(gateway, after))

    async def _read(self, gateway: Gateway, after: str | None) -> None:
        params = {} if after is None else {"after": after}
        timeout = aiohttp.ClientTimeout(total=None)
        url = f"{gateway.url}/v1/events"
        async with gateway.http.get(url, params=params, timeout=timeout) as response:
            assert response.content_type == "text/event-stream"
            async for line in response.content:
                self.open = True
                if line.startswith(b"id: "):
                    self.cursor = line[4:].strip().decode()
                elif line.startswith(b"data: "):
                    self.events.append(json.loads(line[6:]))

    async def saw(self, kind: str, thing: str) -> None:
        await until(lambda: any((e["kind"], e["id"]) == (kind, thing) for e in self.events))

    async def went_on_after(self, cursor: str) -> None:
        await until(lambda: self.cursor != cursor)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.mark.slow
async def test_changes_are_streamed_and_resumed(gateway: Gateway) -> None:
    reader = Reader(gateway)
    await until(lambda: reader.open)
    await gateway.ask("one", headers={"x-run-id": "streamed"})
    await reader.saw("run", "streamed")
    record = {**ITERATION, "iteration": 0, "holdout_success": 0.5}
    await gateway.call("POST", "/v1/loops/streamed/iterations/0", json=record)
    await reader.saw("loop", "streamed")
    assert set(reader.events[0]) == {"kind", "id", "change"}
    cursor = reader.cursor
    await reader.close()
    await gateway.call("DELETE", "/v1/trajectories/streamed")
    again = Reader(gateway, cursor)
    await again.saw("run", "streamed")
    seen = [e["change"] for e in again.events if (e["kind"], e["id"]) == ("run", "streamed")]
    assert seen == ["forgotten"]  # the loop of that name may have been seen half written
    await again.close()


async def test_a_cursor_of_before_a_restart_resets_its_reader(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        reader = Reader(gateway)
        await until(lambda: reader.open)
        await gateway.ask("one", headers={"x-run-id": "before"})
        await reader.saw("run", "before")
        await reader.close()
    async with served(tmp_path) as gateway:
        again = Reader(gateway, reader.cursor)
        await again.saw("reset", "")
        assert again.events == [{"kind": "reset", "id": "", "change": "restarted"}]
        await gateway.ask("two", headers={"x-run-id": "after"})
        await again.saw("run", "after")
        assert (await gateway.call("GET", "/v1/events?after=nonsense"))[0] == 400
        # the gateway ends while the stream is open, and does not wait for it


@pytest.mark.slow
async def test_who_missed_too_much_is_told_so(gateway: Gateway) -> None:
    feed = gateway.services.changes
    reader = Reader(gateway)
    await until(lambda: reader.open)
    await gateway.ask("one", headers={"x-run-id": "kept"})
    await reader.saw("run", "kept")
    await reader.close()
    many = [(f"run-{n}", "appended") for n in range(change_feed.MANY + 1)]
    again = Reader(gateway)
    await until(lambda: again.open)
    feed.note_runs(many)
    await again.saw("run", "")  # one change for all of them
    for _ in range(change_feed.KEPT // change_feed.MANY + 1):
        before = again.cursor
        feed.note_runs(many[1:])
        await again.went_on_after(before)
    await again.close()
    late = Reader(gateway, reader.cursor)
    await late.saw("reset", "")
    assert late.events[0]["change"] == "lagged"
    await late.close()
