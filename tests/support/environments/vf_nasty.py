"""Taskset of verifiers v1 that fails in every way: as its task's `way` says."""

import verifiers.v1 as vf
from misbehaviour import FLOOD, misbehave

WAYS = ["good", "reset", "hangs", "dies", "nan", "floods first", "leaks"]


class NastyData(vf.TaskData):
    way: str


class NastyTask(vf.Task[NastyData]):
    async def setup(self, trace, runtime) -> None:
        misbehave(self.data.way)

    @vf.reward
    async def right(self, trace) -> float:
        return float("nan") if self.data.way == "nan" else 1.0


class NastyTaskset(vf.Taskset[NastyTask, vf.TasksetConfig]):
    def load(self):
        for way in WAYS:
            text = "Add 0 and 2." + (FLOOD if way == "floods first" else "")
            yield NastyTask(NastyData(prompt=[vf.UserMessage(content=text)], way=way))


__all__ = ["NastyTaskset"]
