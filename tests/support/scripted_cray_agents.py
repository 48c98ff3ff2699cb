"""The `cray-agents` command, whose replicas are scripted servers.

python -m tests.support.scripted_cray_agents up ...
"""

from dataclasses import replace

from cray_agents.cli import main
from cray_agents.config import Config
from cray_agents.runtime.pool.vllm_process import EngineSettings
from cray_agents.server import compose
from tests.support.scripted_server import PROGRAM

_settings = compose.engine_settings


def scripted_settings(config: Config, *, sleeps: bool) -> EngineSettings:
    return replace(_settings(config, sleeps=sleeps), program=PROGRAM, dtype="float32")


if __name__ == "__main__":
    compose.engine_settings = scripted_settings
    main()
