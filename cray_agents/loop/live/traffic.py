"""Continual training: a loop whose training runs are live traffic that people rewarded.

    Loop(agent, tasks, rewards=[...], method="kto", watch=Watch(runs=64, quiet="08:00-18:00"))
    cray-agents loop FILE --watch

All other steps are the loop's own: build, train, prove, evaluate, promote. `take` waits until an
update is due, and writes down which runs it takes and onto which version, `take-<n>`, once; then
each of these becomes a run of this loop and generation, of split `train`. So a loop that was killed
anywhere goes on with the same runs, and a run that was taken is none of the live ones any more: it
is never taken again, whatever is said of it later. Where nothing can be learned from an update's
runs, or its job fails, the record says so, and the next one is waited for.

Live runs that were asked the same are attempts at one task, which is what dpo and grpo compare.

Called by loop.py. When an update is due is in hours.py; without held-out tasks the candidate is
judged by a canary: canarying.py.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cray_agents.errors import BadInput, NotFound
from cray_agents.generation import Generation, promoted_by
from cray_agents.loop.collector import Collected
from cray_agents.loop.live.schedule import Update, Watch, held_back, is_due
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import Rollouts
from cray_agents.records import UNSCORED, Record, Run, Task, reward_by

ANY = -1e300  # no reward is less: as a filter, it keeps the runs that have one
AT_ONCE = 8  # runs that are described at a time
SLOWER = 10  # the looks take at most one part in so many of the time


class UpdateBatch(Record):
    """The journal's word for an update: its runs, and the version they are trained onto.

    `givers`: whose rewards count in it; None: anybody's.
    """

    runs: list[str]
    onto: str
    time: float
    givers: list[str] | None = None


@dataclass
class LiveTraffic:
    """Finds and takes the live runs of one loop.

    `judged`: whether it has held-out tasks. `both_sides_of`: a reward that an update's runs must
    not all reach, nor all miss: kto learns from good ones and bad ones together.
    """

    rollouts: Rollouts  # for where they are and whose; nothing is run
    clock: PhaseTimer
    watch: Watch
    judged: bool
    both_sides_of: Callable[[int], float | None]
    _takes: dict[int, UpdateBatch] = field(default_factory=dict)
    _unnamed: Counter[str] = field(default_factory=Counter)  # whose rewards were left, at a look

    async def take(self, done: Sequence[Generation]) -> list[Generation]:
        """Wait for the next update's runs, and take them; returns what it goes on from.

        That is `done`, unless somebody else promoted or rolled back since: then the promoted
        version is taken for what the last generation promoted. Raises BadInput where a candidate
        could not be judged.
        """
        number = len(done)
        with self.clock.phase("waiting"):
            while (take := await self._recorded(number)) is None:
                await self._check_judged()
                begun = time.monotonic()
                if not await self._begin(number, done):
                    spent = time.monotonic() - begun
                    await asyncio.sleep(max(self.watch.poll, SLOWER * spent))
        with self.clock.phase("taking runs", ""):
            await self._adopt(number, take)
        if promoted_by(done) == take.onto:
            return list(done)
        changes = {"version": take.onto, "promoted": True, "onward": None}
        return [*done[:-1], done[-1].model_copy(update=changes)]

    async def givers(self, number: int) -> list[str] | None:
        """Whose rewards count in an update that was taken; None: anybody's, as it was once."""
        take = await self._recorded(number)
        return take.givers if take is not None else None

    async def collected(self, number: int) -> Collected:
        """The runs of an update that was taken."""
        runs = await self.rollouts.stored("train", generation=number)
        rows = self.rollouts.platform.summaries(
            loop=self.rollouts.loop, generation=number, split="train"
        )
        tokens = sum([row["sampled_tokens"] async for row in rows])
        models = {run.model for run in runs}
        version = models.pop() if len(models) == 1 else None
        return Collected(runs, tokens=tokens, sampled_from=version)

    async def _begin(self, number: int, done: Sequence[Generation]) -> bool:
        """Write an update down, if one is due."""
        givers = await self._givers()
        found, now = await self._new(givers), time.time()
        updates = [
            Update(take.time, generation.trainer_seconds)
            for generation in done[1:]
            if (take := await self._recorded(generation.generation))
        ]
        last = updates[-1].time if updates else await self._since(now)
        reason = held_back(self.watch, updates, now)
        chosen = mixed(found, self.watch.most, self.both_sides_of(number))
        due = is_due(self.watch, len(found), last, now)
        if due and not chosen:
            reason = "all of them are good, or all bad"
        if not due or reason is not None:
            self._tell(len(found), reason if due else None, now - last)
            return False
        version = await self.rollouts.platform.promoted(self.rollouts.agent.model)
        onto = promoted_by(done) if version is None else version.id
        take = UpdateBatch(runs=chosen, onto=onto, time=now, givers=givers)
        await self._remember(f"take-{number}", take.model_dump(mode="json"))
        return True

    def _tell(self, found: int, reason: str | None, since: float) -> None:
        """What it waits for; `reason` is why it does although an update is due."""
        runs, every = self.watch.runs, self.watch.every
        left = "" if every is None else f", {max(0.0, every - since):.0f} s to the schedule"
        left += "".join(
            f"; {count} of {giver}, whom Watch(givers=[...]) does not name, do not count"
            for giver, count in sorted(self._unnamed.items())
        )
        if reason is not None:
            self.clock.report(f"waiting: {reason}", note=f"{found} rewarded runs{left}")
        elif runs is None:
            self.clock.report("waiting for the schedule", note=f"{found} rewarded runs{left}")
        else:
            self.clock.report("waiting for rewarded runs", min(found, runs), runs, f"new{left}")

    async def _givers(self) -> list[str]:
        """Whose rewards count: the loop's own key's, and those that it names."""
        me = await self.rollouts.platform.whoami()
        own = [me["name"]] if me["key"] is not None else []
        return sorted({*own, *self.watch.givers})

    async def _new(self, givers: list[str]) -> list[tuple[str, float]]:
        """The live runs that have a reward and were never taken, with it, the oldest first."""
        where = self.watch.where
        bounds = {"min_reward", "max_reward"}  # of what counts, which the index does not know
        asked = where.model_dump(exclude_none=True, exclude={"generations", "tags", *bounds})
        if where.model is None and where.agent is None:
            asked["model"] = self.rollouts.agent.model
        least = {"min_reward": ANY, "since": time.time() - self.watch.within}
        rows = self.rollouts.platform.summaries(
            **{**least, **asked}, tag=where.tags, order="oldest"
        )
        low = -math.inf if where.min_reward is None else where.min_reward
        high = math.inf if where.max_reward is None else where.max_reward
        found = []
        self._unnamed.clear()
        async for row in rows:
            if counts(row):
                reward = reward_by(row["reward"], row["given"], givers)
                if reward is None:
                    self._unnamed.update({giver for *_, giver, _ in row["given"]})
                elif low <= reward <= high:
                    found.append((row["id"], reward))
        return found

    async def _adopt(self, number: int, take: UpdateBatch) -> None:
        """Make the runs of an update the loop's: those that are not yet."""
        platform, loop = self.rollouts.platform, self.rollouts.loop
        there = {row["id"] async for row in platform.summaries(loop=loop, generation=number)}
        places = asyncio.Semaphore(AT_ONCE)

        async def adopt(attempt: int, run_id: str) -> None:
            async with places:
                try:
                    run = await platform.run(run_id)
                except NotFound:  # somebody wanted it forgotten
                    return
                await platform.record([adopted(run, loop, number, attempt)])

        async with asyncio.TaskGroup() as group:
            for attempt, run_id in enumerate(take.runs):
                if run_id not in there:
                    group.create_task(adopt(attempt, run_id))

    async def _check_judged(self) -> None:
        """Nothing is trained that could then only be promoted unseen."""
        if not self.judged and len(await self.rollouts.platform.pool()) < 2:
            raise BadInput(
                "without held-out tasks a candidate is judged by a canary, which needs two "
                "replicas, and there is one: give the loop tasks with a holdout split and rewards, "
                "or start the platform with `--replicas 2`",
                param="tasks",
            )

    async def _since(self, now: float) -> float:
        """When this loop began to watch."""
        found = await self.rollouts.platform.recall(self.rollouts.loop, "watching")
        if found is None:
            await self._remember("watching", {"since": now})
        return float(found["since"]) if found else now

    async def _recorded(self, number: int) -> UpdateBatch | None:
        if number not in self._takes:
            found = await self.rollouts.platform.recall(self.rollouts.loop, f"take-{number}")
            if found is None:
                return None
            self._takes[number] = UpdateBatch.model_validate(found)
        return self._takes[number]

    async def _remember(self, entry: str, record: dict[str, Any]) -> None:
        await self.rollouts.platform.remember(self.rollouts.loop, entry, record)


def mixed(found: Sequence[tuple[str, float]], most: int, least: float | None) -> list[str]:
    """The first of those found; with some of both kinds where `least` divides them, else none."""
    first = list(found[:most])
    if least is None:
        return [run for run, _ in first]
    for good in (True, False):
        kind = [pair for pair in found if (pair[1] >= least) == good]
        if not kind:
            return []
        if kind[0] not in first:
            first[-1] = kind[0]
    return [run for run, _ in first]


def counts(row: dict[str, Any]) -> bool:
    """Whether a run, as the index tells it, is live traffic that was rewarded."""
    return (
        row["loop"] is None
        and row["split"] in (None, "train")
        and row["imported"] is None
        and row["reward"] is not None
        and not (row["infrastructure"] or row["error"] == UNSCORED)
        and not row["redacted"]
        and row["sampled_tokens"] > 0
        and "judge" not in row["tags"]
    )


def adopted(run: Run, loop: str, generation: int, attempt: int) -> Run:
    """A live run as a loop's, on the task that its input is."""
    task = run.task or (Task(input=run.input) if run.input else None)
    about = {"loop": loop, "generation": generation, "attempt": attempt, "task": task}
    return run.model_copy(update=about)
