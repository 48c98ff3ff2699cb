"""The environment of Tinker's client, and an engine that continues token ids without vLLM."""

import os
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson
import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.ports import EngineCall, SampledSequence

ROOT = Path(__file__).parents[3]


def python() -> Path:
    """The interpreter that has Tinker's client. Skips the test where it cannot be had."""
    script = ROOT / "requirements" / "environment.sh"
    done = subprocess.run([script, "tinker"], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"no .venv-tinker: {done.stderr.strip()[-300:]}")
    return ROOT / ".venv-tinker" / "bin" / "python"


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """What a program of .venv-tinker prints. It may not ask the hub for anything."""
    done = subprocess.run(
        [python(), *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), **environment},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


class TokenEngine(ScriptedEngine):
    """Continues token ids by the number of its version and of the sample: [2, 0], [2, 1], ..."""

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        request: dict[str, Any] = exchange.request
        self.requests.append(request)
        exchange.version = self.version
        number = int(self.version.partition("@")[2])
        exchange.samples = [
            SampledSequence(request["prompt"], [number, index], [-1.0, -0.5], "stop")
            for index in range(request["n"])
        ]
        choices = [{"index": index, "text": "..."} for index in range(request["n"])]
        yield orjson.dumps({"id": exchange.id, "model": self.version, "choices": choices})
