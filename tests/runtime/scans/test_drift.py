"""Habits of two versions: what differs is found, what does not is left alone."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.records import ModelCall, Run, StopReason, ToolCall, Trajectory, Turn
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.scans.drift import HABITS, compare_habits
from tests.support.bare_models import bare_model
from tests.support.command_line import cli
from tests.support.datasets.dataset_runs import call, run_events, stored

EMPTY: Run[Any] = Run(id="r", agent="a", model="m@1", input="", stop_reason=StopReason.completed)


def run_of(tokens: list[int], text: str = "", **more: Any) -> Run[Any]:
    made = ModelCall(
        id="c",
        run_id="r",
        model="m@1",
        messages=[],
        message={"role": "assistant", "content": text},
        token_ids=tokens,
        logprobs=[-0.25] * len(tokens),
    )
    turn = Turn(call_id="c", call=made, tool_calls=more.pop("tool_calls", []))
    return EMPTY.model_copy(update={"trajectory": Trajectory(turns=[turn]), **more})


def habit(name: str, run: Run[Any]) -> float:
    return HABITS[name][0](run)


def test_each_habit_is_what_it_says() -> None:
    failed = ToolCall(id="t", name="f", arguments="{}", error="no")
    assert habit("tokens", run_of([1, 2, 3])) == 3
    assert (habit("turns", run_of([1])), habit("turns", EMPTY)) == (1, 0)
    assert habit("tool_errors", run_of([1], tool_calls=[failed])) == 1
    assert habit("unfinished", run_of([1], stop_reason=StopReason.max_turns)) == 1
    assert habit("repetition", run_of([1, 2, 3, 4, 1, 2, 3, 4])) == pytest.approx(1 / 5)
    assert habit("repetition", run_of(list(range(20)))) == 0
    assert habit("surprise", run_of([1, 2])) == 0.25
    for text in ("I'm sorry, no.", "I cannot do that", "As an AI, I", "I\u2019m unable to"):
        assert habit("refusals", run_of([1], text)) == 1, text
    assert habit("refusals", run_of([1], "Nothing is refused. Sorry to wait.")) == 0
    assert all(measure(EMPTY) == 0 for measure, _ in HABITS.values())


def pairs(seed: int, longer: int, count: int) -> list[tuple[Run[Any], Run[Any]]]:
    rng = random.Random(seed)

    def draw(more: int) -> Run[Any]:
        tokens = [rng.randrange(100) for _ in range(rng.randrange(20, 60) + more)]
        return run_of(tokens, rng.choice(["I cannot", "Yes."]))

    return [(draw(0), draw(longer)) for _ in range(count)]


@pytest.mark.slow
def test_versions_that_are_alike_are_reported_at_most_at_the_stated_level() -> None:
    reported = [
        any(row["drifted"] for row in compare_habits(pairs(seed, 0, 300), 0.05))
        for seed in range(40)
    ]
    assert sum(reported) <= 4  # of 40 at 0.05 at most: more than 4 have a probability of 0.05


def test_a_version_that_says_more_is_found() -> None:
    for seed in range(5):
        rows = {row["habit"]: row for row in compare_habits(pairs(seed, 15, 300), 0.05)}
        assert rows["tokens"]["drifted"] == "more" and rows["refusals"]["drifted"] is None
        assert rows["tokens"]["later"] - rows["tokens"]["earlier"] == pytest.approx(15, abs=4)
        back = [(later, earlier) for earlier, later in pairs(seed, 15, 300)]
        less = {row["habit"]: row["drifted"] for row in compare_habits(back, 0.05)}
        assert less["tokens"] == "less"


def test_the_command_tells_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    events = []
    for n in range(60):
        for version, length in ((1, 4), (2, 9)):
            made = call(f"{version}-{n}", [1], [5] * length, model=f"m@{version}", started=1.0 + n)
            events += run_events(f"r{version}-{n}", calls=[made], model="m", started=1.0 + n)
    asyncio.run(stored(home.root, events))
    registry = Registry(home)
    for number in (1, 2):
        model = bare_model(tmp_path / f"model{number}", str(number).encode())
        registry.register("m", *registry.import_checkpoint(model))

    def drift(*words: object) -> Any:
        return cli("scan", "drift", *words, "--home", home.root, cwd=tmp_path)

    done = drift("m@1", "m@2", "--json")
    assert done.returncode == 1, done.stderr
    rows = {row["habit"]: row for row in json.loads(done.stdout)["habits"]}
    assert (rows["tokens"]["pairs"], rows["tokens"]["drifted"]) == (60, "more")
    assert rows["turns"]["drifted"] is None
    none = drift("m@1", "m@2", "--where", "loop=another")
    assert none.returncode == 0 and "no runs of both m@1 and m@2" in none.stdout
    for words, message in (
        (("m@1", "m@1"), "are the same version"),
        (("m@1", "m@9"), "m@9"),
        (("m@1", "m@2", "--alpha", "2"), "give a probability"),
        (("m@1", "m@2", "--where", "model=m"), "takes no model"),
    ):
        wrong = drift(*words)
        assert wrong.returncode == 2 and message in " ".join(wrong.stderr.split())
