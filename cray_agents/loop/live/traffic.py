"""Live traffic as training runs: a loop learns from rewarded runs of its users.

    Loop(agent, tasks, rewards=[...], method=KTO(), live=Live(runs=64, quiet="08:00-18:00"))
    cray-agents loop FILE --watch

All other steps are the loop's own: build, train, prove, evaluate, promote. `begin` waits until an
update is due. It writes the update's runs and parent version into the journal once, as `take-<n>`.
Then each of these runs becomes a run of this loop and iteration, of split `train`. So a loop that
was killed anywhere goes on with the same runs. A run is used in one update only, even if it is
rewarded again later. If nothing can be learned from an update's runs, or its job fails, the record
says so, and the loop waits for the next update.

Live runs with equal inputs are attempts at one task, which dpo and grpo compare.

Called by loop.py. Read next: schedule.py (due updates), components.py (canaries as judge).
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cray_agents.errors import BadInput, NotFound
from cray_agents.iteration import Iteration, promoted_version
from cray_agents.loop.collector import Collected
from cray_agents.loop.live.schedule import Live, Update, held_back, is_due
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import Rollouts
from cray_agents.records import SCAN, UNSCORED, Record, Run, Task, reward_of_givers

ANY = -1e300  # no reward is less: as a filter, it keeps the runs that have one
AT_ONCE = 8  # runs that are described at a time
SLOWER = 10  # the looks take at most one part in so many of the time


class UpdateBatch(Record):
    """An update in the journal: its runs, and the version they are trained onto.

    `givers`: the givers whose rewards count in it; None: all.
    """

    runs: list[str]
    onto: str
    time: float
    givers: list[str] | None = None


@dataclass
class LiveTraffic:
    """The live runs of one loop, and its updates.

    judged: the loop has held-out tasks.
    both_sides_of: a reward that an update's runs must not all reach, nor all miss, because kto
        learns from good and bad runs together.
    """

    rollouts: Rollouts  # names the platform and the loop; nothing is run
    clock: PhaseTimer
    watch: Live
    judged: bool
    both_sides_of: Callable[[int], float | None]
    _takes: dict[int, UpdateBatch] = field(default_factory=dict)
    _unnamed: Counter[str] = field(
        default_factory=Counter
    )  # rewards left out at the last look, by giver

    async def begin(self, done: Sequence[Iteration]) -> list[Iteration]:
        """Wait for the next update's runs, and take them; return the iterations to go on from.

        These are `done`, unless somebody else promoted or rolled back since: then the last one
        counts as having promoted the present version. Raises BadInput where a candidate could not
        be judged.
        """
        number = len(done)
        with self.clock.phase("waiting"):
            while (take := await self._recorded(number)) is None:
                await self._check_judged()
                begun = time.monotonic()
                if not await self._record_due(number, done):
                    spent = time.monotonic() - begun
                    await asyncio.sleep(max(self.watch.poll, SLOWER * spent))
        with self.clock.phase("taking runs", ""):
            await self._adopt(number, take)
        if promoted_version(done) == take.onto:
            return list(done)
        changes = {"version": take.onto, "promoted": True, "onward": None}
        return [*done[:-1], done[-1].model_copy(update=changes)]

    async def givers(self, number: int) -> list[str] | None:
        """The givers whose rewards count in an update; None: all, as in old records."""
        take = await self._recorded(number)
        return take.givers if take is not None else None

    async def next(self, done: Sequence[Iteration], last: int) -> Collected:
        """The runs of the update after the `done` ones."""
        number = len(done)
        runs = await self.rollouts.stored("train", iteration=number)
        rows = self.rollouts.platform.summaries(
            loop=self.rollouts.loop, iteration=number, split="train"
        )
        tokens = sum([row["sampled_tokens"] async for row in rows])
        models = {run.model for run in runs}
        version = models.pop() if len(models) == 1 else None
        return Collected(runs, tokens=tokens, sampled_from=version)

    async def _record_due(self, number: int, done: Sequence[Iteration]) -> bool:
        """Write an update down, if one is due."""
        givers = await self._givers()
        runs, now = await self._new(givers), time.time()
        updates = [
            Update(take.time, iteration.trainer_seconds)
            for iteration in done[1:]
            if (take := await self._recorded(iteration.iteration))
        ]
        last = updates[-1].time if updates else await self._since(now)
        reason = held_back(self.watch, updates, now)
        chosen = mixed(runs, self.watch.most, self.both_sides_of(number))
        due = is_due(self.watch, len(runs), last, now)
        if due and not chosen:
            reason = "all of them are good, or all bad"
        if not due or reason is not None:
            self._report_wait(len(runs), reason if due else None, now - last)
            return False
        version = await self.rollouts.platform.promoted(self.rollouts.agent.model)
        onto = promoted_version(done) if version is None else version.id
        take = UpdateBatch(runs=chosen, onto=onto, time=now, givers=givers)
        await self._remember(f"take-{number}", take.model_dump(mode="json"))
        return True

    def _report_wait(self, new: int, reason: str | None, since: float) -> None:
        """Report what the loop waits for. `reason`: why it waits although an update is due."""
        runs, every = self.watch.runs, self.watch.every
        left = "" if every is None else f", {max(0.0, every - since):.0f} s to the schedule"
        left += "".join(
            f"; {count} of {giver}, whom Live(givers=[...]) does not name, do not count"
            for giver, count in sorted(self._unnamed.items())
        )
        if reason is not None:
            self.clock.report(f"waiting: {reason}", note=f"{new} rewarded runs{left}")
        elif runs is None:
            self.clock.report("waiting for the schedule", note=f"{new} rewarded runs{left}")
        else:
            self.clock.report("waiting for rewarded runs", min(new, runs), runs, f"new{left}")

    async def _givers(self) -> list[str]:
        """The givers whose rewards count: the loop's own key, and those that it names."""
        me = await self.rollouts.platform.whoami()
        own = [me["name"]] if me["key"] is not None else []
        return sorted({*own, *self.watch.givers})

    async def _new(self, givers: list[str]) -> list[tuple[str, float]]:
        """Live runs that have a reward and were never used, with it, the oldest first."""
        chosen = self.watch.where
        bounds = {"min_reward", "max_reward"}  # of what counts, which the index does not know
        query = chosen.model_dump(exclude_none=True, exclude={"iterations", "tags", *bounds})
        if chosen.model is None and chosen.agent is None:
            query["model"] = self.rollouts.agent.model
        least = {"min_reward": ANY, "since": time.time() - self.watch.within}
        rows = self.rollouts.platform.summaries(
            **{**least, **query}, tag=chosen.tags, order="oldest"
        )
        low = -math.inf if chosen.min_reward is None else chosen.min_reward
        high = math.inf if chosen.max_reward is None else chosen.max_reward
        rewarded = []
        self._unnamed.clear()
        async for row in rows:
            if counts(row):
                reward = reward_of_givers(row["reward"], row["given"], givers)
                if reward is None:
                    self._unnamed.update({giver for *_, giver, _ in row["given"]})
                elif low <= reward <= high:
                    rewarded.append((row["id"], reward))
        return rewarded

    async def _adopt(self, number: int, take: UpdateBatch) -> None:
        """Make the runs of an update the loop's, unless they are already."""
        platform, loop = self.rollouts.platform, self.rollouts.loop
        present = {row["id"] async for row in platform.summaries(loop=loop, iteration=number)}
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
                if run_id not in present:
                    group.create_task(adopt(attempt, run_id))

    async def _check_judged(self) -> None:
        """Refuse to train what could only be promoted unseen. Raises BadInput."""
        if not self.judged and len(await self.rollouts.platform.pool()) < 2:
            raise BadInput(
                "without held-out tasks a candidate is judged by a canary, which needs two "
                "replicas, and there is one: give the loop tasks with a holdout split and rewards, "
                "or start the platform with `--replicas 2`",
                param="tasks",
            )

    async def _since(self, now: float) -> float:
        """The time at which this loop began to watch."""
        entry = await self.rollouts.platform.recall(self.rollouts.loop, "watching")
        if entry is None:
            await self._remember("watching", {"since": now})
        return float(entry["since"]) if entry else now

    async def _recorded(self, number: int) -> UpdateBatch | None:
        if number not in self._takes:
            entry = await self.rollouts.platform.recall(self.rollouts.loop, f"take-{number}")
            if entry is None:
                return None
            self._takes[number] = UpdateBatch.model_validate(entry)
        return self._takes[number]

    async def _remember(self, entry: str, record: dict[str, Any]) -> None:
        await self.rollouts.platform.remember(self.rollouts.loop, entry, record)


def mixed(runs: Sequence[tuple[str, float]], most: int, least: float | None) -> list[str]:
    """Choose the first runs, on both sides of `least` if it is given; none if that cannot be."""
    first = list(runs[:most])
    if least is None:
        return [run for run, _ in first]
    for good in (True, False):
        kind = [pair for pair in runs if (pair[1] >= least) == good]
        if not kind:
            return []
        if kind[0] not in first:
            first[-1] = kind[0]
    return [run for run, _ in first]


def counts(row: dict[str, Any]) -> bool:
    """Tell whether a row of the index is rewarded live traffic."""
    return (
        row["loop"] is None
        and row["split"] in (None, "train")
        and row["imported"] is None
        and row["reward"] is not None
        and not (row["infrastructure"] or row["error"] == UNSCORED)
        and not row["redacted"]
        and row["sampled_tokens"] > 0
        and "judge" not in row["tags"]
        and not any(tag.startswith(SCAN) for tag in row["tags"])
    )


def adopted(run: Run, loop: str, iteration: int, attempt: int) -> Run:
    """A live run as a run of the loop, with its input as the task."""
    task = run.task or (Task(input=run.input) if run.input else None)
    about = {"loop": loop, "iteration": iteration, "attempt": attempt, "task": task}
    return run.model_copy(update=about)
