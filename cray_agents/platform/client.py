"""Platform: the HTTP client of a running platform, used by Loop, demo and the CLI.

The routes are the gateway's (runtime/gateway); transport.py sends the requests. Read next:
loop/loop.py, its biggest user.
"""

import asyncio
import math
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from cray_agents.cell_html import Shown
from cray_agents.engines.openai_engine import KeySource, OpenAIEngine, run_event
from cray_agents.errors import BadInput, Corrupt, CrayError, JobError, NotFound
from cray_agents.platform.training_session import TrainingSession
from cray_agents.platform.transport import Recording, Transport
from cray_agents.queries import DatasetRecipe
from cray_agents.records import ModelVersion, ProbeReport, Prompt, Reward, Run
from cray_agents.training_jobs import (
    DECIDED_BY_TRAINER,
    Hyperparameters,
    JobSpec,
    JobStatus,
    Layout,
    MethodName,
    PublishEvery,
)

# ---- Views: what pages show of a platform, for programs: parts of runs, statistics, usage, changes
Json = dict[str, Any]


class Views:
    """The routes of a platform that show things. Filters are those of `Platform.runs`.

    Raises the errors of `Platform`.
    """

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def get(self, path: str, **query: Any) -> Json:
        """Return what a route that shows something answers, as `get("/cost", by="loop")`.

        `path`: as the HTTP reference lists it, behind `/v1`.
        """
        return await self._http.get(path, query)

    async def outline(self, run_id: str, first: int = 0, limit: int = 10_000) -> Json:
        """Return a run's facts, rewards, and a mark for each turn: sizes, tools, errors."""
        return await self._http.get(
            f"/trajectories/{run_id}/outline", {"from": first, "limit": limit}
        )

    async def stats(self, by: str = "", **options: Any) -> Json:
        """Return figures of the matching runs by group.

        `options`: filters, and bucket, facets, histograms, bins, sample, percentiles, limit.
        """
        return await self._http.get("/trajectories/stats", {"by": by, **options})

    async def queue(self) -> Json:
        """Return the requests at the engines and those that wait, by class and key."""
        return await self._http.get("/queue")

    async def warnings(self, since: float | None = None) -> list[Json]:
        """Return failures that raise no error, in runs begun since then (24 hours ago)."""
        query = {} if since is None else {"since": since}
        return list((await self._http.get("/health/warnings", query))["data"])

    async def jobs(self) -> list[Json]:
        """Return the newest training jobs, newest first."""
        return list((await self._http.get("/jobs"))["data"])

    async def loops(self) -> AsyncIterator[Json]:
        """Yield the loops, newest change first, with last iteration and held-out success."""
        async for row in self._http.rows("/loops", {"limit": 100}):
            yield row

    async def changes(self, after: str | None = None) -> AsyncIterator[Json]:
        """Yield what changes on the platform: kind, id, change, and the `cursor` to go on after.

        It ends when the platform does; call it again with the last cursor then.
        """
        query = {} if after is None else {"after": after}
        async for cursor, data in self._http.events("/events", query):
            yield {**data, "cursor": cursor}


URL = "http://127.0.0.1:8000"
POLL = 0.02, 0.25  # seconds between looks at a running job, at least and at most
LEASE = 60.0  # seconds of a lease on a replica, renewed while in use


class Platform:
    """A platform at `url` (default: $CRAY_AGENTS_URL, else http://127.0.0.1:8000).

    Every call raises EngineUnavailable when no platform answers, EngineTimeout when the answer
    takes too long, and otherwise the typed error that the gateway's envelope names.
    """

    def __init__(self, url: str | None = None, api_key: KeySource | None = None) -> None:
        self.url = (url or os.environ.get("CRAY_AGENTS_URL") or URL).rstrip("/").removesuffix("/v1")
        self._http = Transport(self.url, api_key)
        self._recording: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Recording] = (
            weakref.WeakKeyDictionary()
        )

    def engine(self) -> OpenAIEngine:
        """Return the engine for agents: the platform's chat completions, with exact tokens."""
        return self._http.engine

    @property
    def views(self) -> Views:
        """The routes for looking: outlines of runs, statistics, usage, keys, changes."""
        return Views(self._http)

    async def info(self) -> dict[str, Any]:
        """Return engine, trainer and scheduler with their versions, and the home directory."""
        return await self._http.get("/platform")

    async def whoami(self) -> dict[str, Any]:
        """Return this client's key (its id; None without one), name and role, and home, version.

        `features` has `keys` where requests need an API key.
        """
        return await self._http.get("/whoami")

    async def dashboard_token(self) -> str:
        """Return a token for which a browser gets this client's key, once, within a minute."""
        return str((await self._http.post("/dashboard/sign_ins", {}))["token"])

    async def pool(self, *, spares: bool = False) -> list[dict[str, Any]]:
        """Return the replicas: version, state, requests in flight, restarts, pid.

        With `spares`, include those started for versions that no other replica serves.
        """
        pool = await self._http.get("/pool")
        return [*pool["data"], *(pool.get("spares", ()) if spares else ())]

    async def turns(self) -> dict[str, float]:
        """Return the number of turns that training had on the replicas' GPUs, as `turns`.

        And all their seconds by phase. Nothing, if there were none.
        """
        pool = await self._http.get("/pool")
        return pool.get("turns") or {}

    async def record(self, runs: list[Run]) -> None:
        """Store finished runs with their rewards. They are durable when this returns.

        Storing the same run twice is the same as once. Of different states of a run, such as one
        that was scored again, the newest counts.
        """
        new = Recording(self._send_events)
        recording = self._recording.setdefault(asyncio.get_running_loop(), new)
        events = [{**run_event(run), "run_id": run.id} for run in runs]
        await asyncio.gather(*(recording.put(event) for event in events))

    async def _send_events(self, events: list[dict[str, Any]]) -> None:
        path, body = "/trajectories/events", {"events": events}
        if await self._http.engine.post_directly(path, body) is None:
            await self._http.post(path, body)

    async def run(self, run_id: str) -> Run:
        """Return one stored run, whole, with its tokens. Raises NotFound."""
        return Run.model_validate(await self._http.get(f"/trajectories/{run_id}"))

    async def reward(
        self,
        run_id: str,
        value: float,
        *,
        name: str = "feedback",
        who: str = "human",
        turn: int | None = None,
        comment: str | None = None,
        time: float | None = None,
    ) -> Reward:
        """Reward a stored run, or one of its turns. It replaces an earlier reward by `who`.

        `time`: when the run was looked at, in unix seconds; default: now.
        Raises NotFound, or BadInput if there is no such turn or the value is not finite.
        """
        if not math.isfinite(value):
            raise BadInput(f"{value} is no reward: give a finite number", param="value")
        body = {"value": value, "name": name, "source": who, "turn": turn, "comment": comment}
        body |= {} if time is None else {"time": time}
        return Reward.model_validate(await self._http.post(f"/trajectories/{run_id}/rewards", body))

    async def runs(self, *, page: int = 1000, **filters: Any) -> AsyncIterator[Run]:
        """Yield stored runs without their token lists, read `page` at a time.

        The filters are those of GET /v1/trajectories: loop, iteration, agent, task, split, model,
        stop_reason, min_reward, max_reward, error, since, until, text, and tag, which may be a list
        (runs with all of them); and order.
        """
        async for item in self._http.rows("/trajectories", {**filters, "limit": page}):
            yield Run.model_validate(item)

    async def summaries(self, **filters: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the index rows of stored runs, with their token counts; `filters` as of `runs`."""
        query = {**filters, "view": "summary", "limit": 1000}
        async for row in self._http.rows("/trajectories", query):
            yield row

    async def build_dataset(self, recipe: DatasetRecipe) -> dict[str, Any]:
        """Build the training set, or find it; return its id, its counts, and what was left out."""
        return Shown(await self._http.post("/datasets", recipe.model_dump(mode="json")))

    async def submit_job(
        self,
        *,
        dataset: str,
        parent: str,
        hyperparameters: Hyperparameters,
        method: MethodName = "sft",
        reference: str | None = None,
        teacher: str | None = None,
        optimizer_from: str | None = None,
        layout: Layout | None = None,
        publish_every: PublishEvery | None = None,
        evaluate_every: int | None = None,
        logprob_limit: float | None = None,
        session: str | None = None,
        changes_only: bool | None = None,
        oversubscribe: bool | None = None,
    ) -> JobStatus:
        """Start a training job, or find it; see JobSpec. The platform chooses what is None.

        `parent`, `reference` and `teacher` are `name@N` or a checkpoint directory. `optimizer_from`
        "parent" is the job that made the parent, if it ran on this root and both train the same
        weights: all of them, or adapters of the same `lora`.
        """
        body = {
            "method": method,
            "dataset": dataset,
            "parent": parent,
            "hyperparameters": _given(hyperparameters),
            "reference": reference,
            "teacher": teacher,
            "optimizer_from": optimizer_from,
            "layout": layout.model_dump() if layout is not None else None,
            "publish_every": publish_every.model_dump() if publish_every is not None else None,
            "evaluate_every": evaluate_every,
            "logprob_limit": logprob_limit,
            "session": session,
            "changes_only": changes_only,
            "oversubscribe": oversubscribe,
        }
        given = {name: value for name, value in body.items() if value is not None}
        return JobStatus.model_validate(await self._http.post("/jobs", given))

    async def submit_spec(self, spec: JobSpec) -> JobStatus:
        """Start a spec's job, or find it. The platform fills unset fields and the code version."""
        body = spec.model_dump(mode="json", exclude={"code"}, exclude_unset=True)
        return JobStatus.model_validate(await self._http.post("/jobs", body))

    async def job(self, job_id: str) -> JobStatus:
        """Return a job's status."""
        return JobStatus.model_validate(await self._http.get(f"/jobs/{job_id}"))

    async def pause_job(self, job_id: str) -> JobStatus:
        """Let a job save its state and stop; it is `running` until then. Raises BadInput."""
        return JobStatus.model_validate(await self._http.post(f"/jobs/{job_id}/pause", {}))

    async def resume_job(self, job_id: str) -> JobStatus:
        """Continue a paused job. Raises BadInput if it is not paused."""
        return JobStatus.model_validate(await self._http.post(f"/jobs/{job_id}/resume", {}))

    async def cancel_job(self, job_id: str) -> JobStatus:
        """End a job for good. A job that has ended does not change."""
        return JobStatus.model_validate(await self._http.post(f"/jobs/{job_id}/cancel", {}))

    async def training_session(
        self,
        name: str,
        *,
        parent: str,
        hyperparameters: Hyperparameters | None = None,
        layout: Layout | None = None,
        state_from: str | None = None,
    ) -> TrainingSession:
        """Begin to train `parent` by a loop of your own, or go on with the session of this name.

        `parent` is `name@N` or a checkpoint directory. Of the hyperparameters, `dtype`, `lora`,
        `learning_rate`, the betas and epsilon of Adam, `seed` and `max_tokens_per_microbatch`
        count. `state_from` is what `TrainingSession.keep_state` returned in a session of the same
        parent and hyperparameters: this one begins with its weights and optimizer. Raises BadInput.
        """
        hyper = hyperparameters or Hyperparameters(steps=1)
        body = {
            "commands": name,
            "state_from": state_from,
            "session": "commands",  # clients take turns on one set of ranks
            "parent": parent,
            "hyperparameters": _given(hyper),
            "layout": None if layout is None else layout.model_dump(),
        }
        job = JobStatus.model_validate(await self._http.post("/jobs", body))
        last = (await self._http.get(f"/jobs/{job.id}/commands"))["last"]
        register = partial(self.register, prompts=await self._prompts_of(parent))
        return TrainingSession(self._http, job, last, register)

    async def wait_for(self, job: JobStatus, on_progress: Callable[[JobStatus], None]) -> JobStatus:
        """Wait for a job's end, pauses included. Raises JobError with its log's tail."""
        shortest, longest = POLL
        begun = time.monotonic()
        while job.state in ("queued", "running", "paused"):
            on_progress(job)
            waited = time.monotonic() - begun
            await asyncio.sleep(min(longest, max(shortest, waited / 20)))
            job = await self.job(job.id)
        on_progress(job)
        if job.state != "succeeded":
            raise JobError(
                f"job {job.id} {job.state}: {job.error or 'no reason given'}",
                log_tail=await self.job_log(job.id),
            )
        return job

    async def job_log(self, job_id: str, tail: int = 20) -> str:
        """Return the last lines of a job's log."""
        return await self._http.text(f"/jobs/{job_id}/logs", {"tail": tail})

    async def register(
        self, name: str, checkpoint: str, prompts: Mapping[str, Prompt] | None = None
    ) -> ModelVersion:
        """Make a checkpoint the next version of a name, or return its existing version.

        `prompts`: what it has beside the weights, by agent; another prompt is another version.
        """
        body: dict[str, Any] = {"checkpoint": checkpoint}
        if prompts:
            body["prompts"] = {agent: one.model_dump(mode="json") for agent, one in prompts.items()}
        answer = await self._http.post(f"/models/{name}/versions", body)
        return ModelVersion.model_validate(answer)

    async def _prompts_of(self, parent: str) -> dict[str, Prompt]:
        """Return the prompts of a parent that is `name@N` or `name`; other parents have none."""
        name, numbered, _ = parent.partition("@")
        if "/" in name:
            return {}
        try:
            version = await (self.version(parent) if numbered else self.promoted(name))
        except NotFound:  # a checkpoint's id
            return {}
        return {} if version is None else version.prompts

    async def versions(self, name: str) -> list[dict[str, Any]]:
        """Return all versions of a name, oldest first; `promoted` marks the promoted one."""
        return list((await self._http.get(f"/models/{name}/versions"))["data"])

    async def version(self, version_id: str) -> ModelVersion:
        """Return the version `name@N`. Raises NotFound."""
        name, _, number = version_id.rpartition("@")
        for version in await self.versions(name):
            if str(version["number"]) == number:
                return ModelVersion.model_validate(version)
        raise NotFound(f"no version {version_id} in the registry", param="model")

    async def promoted(self, name: str) -> ModelVersion | None:
        """Return the promoted version, which the bare name means, if there is one."""
        for version in await self.versions(name):
            if version["promoted"]:
                return ModelVersion.model_validate(version)
        return None

    async def stage(
        self,
        version: ModelVersion,
        *,
        force: bool = False,
        holder: str = "",
        seconds: float = LEASE,
    ) -> ProbeReport:
        """Load a version into the pool and check it. Raises SwapError; the old one then serves.

        Raises Displaces if this would take a promoted version off its last replica. With `force`
        (role admin) it does so: requests for the promoted version then wait until it is loaded
        again. That happens when it is staged, when the candidate is promoted, or `seconds` after
        the last `renew` of the `holder`. Raises PoolBusy while another holder has the replica.
        """
        path = f"/models/{version.name}/versions/{version.number}/stage"
        body = {"force": force, "holder": holder, "seconds": seconds}
        return ProbeReport.model_validate(await self._http.post(path, body, patient=True))

    async def receive(self, job_id: str, *, force: bool = False, holder: str = "") -> bool:
        """Let a replica receive the weights that a job offers while it writes its files.

        `stage` then loads no files. `force` and `holder` are as there. Returns False if the job
        offers none. Raises PoolBusy if no replica can be spared, SwapError if they did not come.
        """
        body = {"force": force, "holder": holder}
        answer = await self._http.post(f"/jobs/{job_id}/receive", body, patient=True)
        return bool(answer["received"])

    async def renew(self, holder: str, seconds: float = LEASE) -> None:
        """Keep a holder's version staged by force for `seconds` from now; 0: give it back.

        Raises NotFound if the holder has no replica.
        """
        await self._http.post("/pool/lease", {"holder": holder, "seconds": seconds})

    @asynccontextmanager
    async def staged(self, version: ModelVersion, holder: str) -> AsyncIterator[ProbeReport]:
        """Stage a version, by force if necessary, until the end of the block or of this process.

        Unless the block promotes it, the promoted version then comes back. Raises SwapError,
        PoolBusy.
        """
        report = await self.stage(version, force=True, holder=holder)
        renewing = asyncio.create_task(self.keep_renewing(holder))
        try:
            yield report
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            with suppress(NotFound):  # the version was promoted, or displaced none
                await self.renew(holder, 0)

    async def keep_renewing(self, holder: str) -> None:
        """Renew a holder's lease regularly, until cancelled."""
        while True:
            await asyncio.sleep(LEASE / 4)
            with suppress(CrayError):  # the holder has no replica, or the platform does not answer
                await self.renew(holder)

    async def promote(
        self,
        version: ModelVersion,
        *,
        who: str,
        reason: str,
        numbers: dict[str, Any] | None = None,
        force: bool = False,
    ) -> dict[str, Any]:
        """Make the bare name mean this version. `numbers` are those behind the decision.

        Raises Displaces if another name's version would not be served any more, unless `force`.
        """
        body = {"version": version.number, "who": who, "reason": reason, "numbers": numbers or {}}
        body["force"] = force
        return await self._http.post(f"/models/{version.name}/promote", body, patient=True)

    async def reject(
        self,
        version: ModelVersion,
        *,
        who: str,
        reason: str,
        numbers: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Record that a version is not good enough. Raises BadInput if it is promoted."""
        body = {"version": version.number, "who": who, "reason": reason, "numbers": numbers or {}}
        return await self._http.post(f"/models/{version.name}/reject", body)

    async def rollback(
        self, name: str, to: int | None = None, *, who: str, reason: str, force: bool = False
    ) -> dict[str, Any]:
        """Make a name mean its previous version again, or its version `to`.

        Raises BadInput when there is none, or when `to` never was promoted, unless forced. The
        request is sent once only, as a second one would go back further.
        """
        body = {"to": to, "who": who, "reason": reason, "force": force}
        once = f"look at `cray-agents models show {name}` before you ask again"
        return await self._http.post(f"/models/{name}/rollback", body, patient=True, once=once)

    async def history(self, name: str) -> list[dict[str, Any]]:
        """Return a name's history, oldest first: kind, version, who, reason, numbers, time."""
        return list((await self._http.get(f"/models/{name}/history"))["data"])

    async def lineage(self, reference: str) -> list[dict[str, Any]]:
        """Return the origins and results of the versions of a name, or of `name@N`."""
        return list((await self._http.get(f"/models/{reference}/lineage"))["data"])

    async def canary(
        self, version: ModelVersion, *, who: str = "", reason: str = "", **test: Any
    ) -> dict[str, Any]:
        """Let a version answer a share of the live sessions; roll it back if it does worse.

        `test`: share, promote_after, alpha, error_margin, reward_margin, low, high, givers,
        scanners, scan_margin. Raises BadInput if there is only one replica, or a canary runs
        already.
        """
        path = f"/models/{version.name}/canary"
        body = {"version": version.number, "who": who, "reason": reason, **test}
        once = f"look at `cray-agents models canary {version.name}` before you ask again"
        return await self._http.post(path, body, patient=True, once=once)

    async def canary_status(self, name: str) -> dict[str, Any]:
        """Return the running canary, with both sides' results under `seen`. Raises NotFound."""
        return await self._http.get(f"/models/{name}/canary")

    async def stop_canary(self, name: str, *, who: str = "", reason: str = "") -> dict[str, Any]:
        """Let the promoted version answer all sessions again. Raises NotFound."""
        query = {"who": who or None, "reason": reason or None}
        return await self._http.delete(f"/models/{name}/canary", query, patient=True)

    async def ask_for_rollout(self, spec: dict[str, Any]) -> str:
        """Ask for a run by a worker of an environment; return queued, running or done."""
        return str((await self._http.post("/rollouts", spec))["state"])

    async def wait_for_rollout(self, run_id: str, seconds: int) -> tuple[str, int]:
        """Wait for the end of such a run; return its state, and the number of workers.

        Raises NotFound where the platform was restarted since.
        """
        answer = await self._http.get(f"/rollouts/{run_id}", {"wait": seconds})
        return str(answer["state"]), int(answer["workers"])

    async def iterations(self, loop: str) -> list[dict[str, Any]]:
        """Return the finished iterations of a loop, in order.

        Raises Corrupt where one is damaged: a loop does not go on as if it had not been.
        """
        answer = await self._http.get(f"/loops/{loop}/iterations")
        for each in answer.get("damaged", ()):
            raise Corrupt(f"loop {loop!r}: iteration {each['id']}: {each['reason']}")
        return list(answer["data"])

    async def finish_iteration(self, loop: str, number: int, record: dict[str, Any]) -> None:
        """Write an iteration's record. It cannot be changed later."""
        await self._http.post(f"/loops/{loop}/iterations/{number}", record)

    async def remember(self, loop: str, entry: str, record: dict[str, Any]) -> bool:
        """Write an entry of a loop's journal, unless it exists; return True if it was written."""
        return bool((await self._http.post(f"/loops/{loop}/journal/{entry}", record))["created"])

    async def recall(self, loop: str, entry: str) -> dict[str, Any] | None:
        """Return an entry of a loop's journal; None if there is none."""
        try:
            return await self._http.get(f"/loops/{loop}/journal/{entry}")
        except NotFound:
            return None

    async def close(self) -> None:
        """Close this event loop's connections."""
        self._recording.pop(asyncio.get_running_loop(), None)
        await self._http.engine.close()


def _given(hyper: Hyperparameters) -> dict[str, Any]:
    """Return hyperparameters as JSON; those that the trainer decides stay out if not given."""
    left = DECIDED_BY_TRAINER - hyper.model_fields_set
    return hyper.model_dump(mode="json", exclude=left)
