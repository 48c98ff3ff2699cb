"""A taskset of verifiers v1, as its authors write them: typed data, rewards, a failing one."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    a: int
    b: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if self.data.a == 3:
            raise RuntimeError("no score today")
        return float(str(self.data.a + self.data.b) in trace.last_reply)

    @vf.reward
    async def short(self, trace) -> float:
        return 0.5 * (len(trace.last_reply) < 20)


class SumConfig(vf.TasksetConfig):
    count: int = 4


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for n in range(self.config.count):
            yield SumTask(SumData(prompt=f"What is {n} + {n + 1}?", a=n, b=n + 1))


__all__ = ["SumTaskset"]
