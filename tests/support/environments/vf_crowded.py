"""Taskset of verifiers v1 whose server has thousands of tools, or one whose result has no end."""

import verifiers.v1 as vf


class CrowdConfig(vf.ToolsetConfig):
    count: int = 2000


class Crowd(vf.Toolset[CrowdConfig]):
    def register(self, mcp) -> None:
        for n in range(self.config.count):
            mcp.add_tool(submit, name=f"tool_{n}", description="Submit the sum.")


def submit(number: int) -> str:
    return "x" * 5_000_000


class CrowdedTaskConfig(vf.TaskConfig):
    tools: CrowdConfig = CrowdConfig()


class CrowdedTask(vf.Task[vf.TaskData, vf.State, CrowdedTaskConfig]):
    @classmethod
    def toolsets(cls, config: CrowdedTaskConfig) -> list[vf.Toolset]:
        return [Crowd(config.tools)]

    @vf.reward
    async def right(self, trace) -> float:
        return 1.0


class CrowdedConfig(vf.TasksetConfig):
    task: CrowdedTaskConfig = CrowdedTaskConfig()


class CrowdedTaskset(vf.Taskset[CrowdedTask, CrowdedConfig]):
    def load(self):
        yield CrowdedTask(vf.TaskData(prompt="Add 0 and 2."), self.config.task)


__all__ = ["CrowdedTaskset"]

if __name__ == "__main__":  # as verifiers starts it
    Crowd.run()
