"""Echo as a taskset of verifiers v1."""

import verifiers.v1 as vf
from echo import numbers, question


class EchoData(vf.TaskData):
    number: str


class EchoTask(vf.Task[EchoData]):
    @vf.reward
    async def exact(self, trace) -> float:
        return float(trace.last_reply == self.data.number)


class EchoTaskset(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self):
        for number in numbers():
            yield EchoTask(EchoData(prompt=question(number), number=number))


__all__ = ["EchoTaskset"]
