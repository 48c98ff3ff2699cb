"""OGX's client and the Open Responses specification, unmodified, against a real vLLM."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Platform, local_platform
from tests.support.environments.pythons import ROOT, venv
from tests.support.polite_model import GREETING, make_polite_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),  # the first test makes the environment, once
    pytest.mark.usefixtures("forked_servers"),
]

SUPPORT = ROOT / "tests" / "support"


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, forked_servers: None) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("ogx")
    model = make_polite_model(folder / "model")
    with local_platform(folder / "root", model=model, name="calc") as platform:
        yield platform


def printed(script: str, platform: Platform) -> Any:
    """What a script of .venv-ogx says about the platform."""
    python = venv("ogx") / "bin" / "python"
    command: list[str | Path] = [python, SUPPORT / script, platform.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


async def recorded(platform: Platform) -> list[str]:
    """The ids of all calls on record."""
    runs = [run async for run in platform.runs()]
    await platform.close()
    return [call.id for run in runs for call in run.calls]


def test_ogx_client(platform: Platform) -> None:
    said = printed("ogx_calls.py", platform)
    assert said["models"] == ["calc", "calc@1"]
    assert said["chat"] == said["streamed"] == said["response"] == said["event_text"] == GREETING
    assert said["anthropic"] == GREETING and said["counted"] > 0
    assert said["tool"] == {"name": "get_weather", "arguments": '{"location": "Paris"}'}
    assert json.loads(said["response_tool"]) == {"location": "Paris"}
    assert len(said["logprobs"]) > 1 and max(said["logprobs"]) <= 0
    assert said["completion"]["completion_tokens"] == 4 and said["pieces"] > 1
    assert (said["events"][0], said["events"][-1]) == ("response.created", "response.completed")
    assert said["unknown"] == "model_not_found"
    batch = said["batch"]
    (answer,) = batch.pop("answers")
    assert answer["custom_id"] == "a"
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == GREETING
    assert batch.keys() and all(batch.values()), batch

    assert said["response_id"] in asyncio.run(recorded(platform))


def test_answers_have_all_members_of_open_responses(platform: Platform) -> None:
    said = printed("open_responses.py", platform)
    assert said["errors"] == {name: [] for name in said["errors"]}, said["spec"]
    ends = said["ends"]
    assert ends.pop("cut off") == "incomplete"
    assert set(ends.values()) == {"completed"}
