"""`usage keys` and `status --events`, against a gateway with a scripted engine."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import openai
import pytest

from cray_agents import Platform
from tests.runtime.views.test_run_views import Scoring, model_with_tokenizer
from tests.support.command_line import cli
from tests.support.scripted_gateway import echo
from tests.support.scripted_platform import platform

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("views") / "home"


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Platform]:
    model = model_with_tokenizer(home.parent / "model")
    with platform(home, Scoring(echo), model=model) as made:
        say(made, "scored", "abc")
        yield made


def say(served: Platform, run: str, text: str) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], extra_headers={"X-Run-Id": run}
        )


def test_usage_is_summed_up_by_key_model_and_time(
    served: Platform, home: Path, tmp_path: Path
) -> None:
    table = json.loads(cli("usage", "keys", "--json", "--home", home, cwd=tmp_path).stdout)
    (row,) = table["data"]
    assert (row["key"], row["model"], row["runs"], row["calls"]) == ("", "m@1", 1, 1)
    assert row["sampled_tokens"] > 2 and not table["has_more"]
    by_day = cli(
        "usage", "keys", "--by", "model", "--every", "1d", "--since", "7d", "--home", home,
        cwd=tmp_path,
    )  # fmt: skip
    assert by_day.returncode == 0 and "m@1" in by_day.stdout and "time" in by_day.stdout
    for words, said in ((("--by", "agent"), "key, model"), (("--every", "day"), "--every 'day'")):
        done = cli("usage", "keys", *words, "--home", home, cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr


@pytest.mark.slow
def test_events_are_told_until_ctrl_c(served: Platform) -> None:
    argv = [sys.executable, "-m", "cray_agents", "status", "--events", "--json", "--kind", "run"]
    argv += ["--url", served.url]
    with (
        subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor() as threads,
    ):
        assert process.stdout is not None
        try:
            line = threads.submit(process.stdout.readline)
            while not line.done():  # whether it reads already is not to be seen from here
                say(served, "told", "x")
                wait([line], 0.5)
            change = json.loads(line.result())
            assert (change["kind"], change["id"]) == ("run", "told")
            assert change["change"] == "appended" and "." in change["cursor"]
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
        finally:
            process.kill()
