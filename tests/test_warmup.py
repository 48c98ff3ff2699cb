"""The cold start: which demonstrations a job sees, where it stops, what a second call does."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents import SFT, Agent, Loop, Task, TaskSet, Training, reward
from cray_agents.errors import BadInput, JobError
from cray_agents.iteration import Iteration
from cray_agents.loop import WarmUp, warm_up
from cray_agents.loop.methods import METHODS
from cray_agents.loop.warmup import Tried, search
from cray_agents.paths import Home
from cray_agents.records import ModelVersion, Run
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.registry.registry import Registry
from cray_agents.testing import ScriptedEngine, make_tiny_model
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.training_jobs import Hyperparameters, JobSpec
from tests.support.loops import grouped
from tests.support.scripted_platform import platform

ROOT = Path(__file__).parents[1]
STEPS = Training(steps=40, learning_rate=1e-3)
TASKS = [Task(input=f"say {n}", target=str(n), split="holdout") for n in range(10, 20)]
PLAN = WarmUp(STEPS, STEPS, demonstrations=4, more=2, band=(0.2, 0.4), jobs=4)


@reward
def right(run: Run) -> float:
    return float(run.task is not None and run.output == run.task.target)


def talk(n: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": str(n)}]


def make_loop(**changes: Any) -> Loop:
    train = Task(input="say 0", target="0")
    shown = [(talk(n), {"kind": n % 2}) for n in range(20)]
    given: dict[str, Any] = {"tasks": TaskSet([train, *TASKS]), "rewards": [right], "name": "loop",
                             "training": STEPS, "demonstrations": shown} | changes  # fmt: skip
    return Loop(Agent(name="a", model="m"), **grouped(**given))


def engine(skill: dict[str, int]) -> ScriptedEngine:
    """Each version solves so many of the ten held-out tasks."""

    def answer(request: dict[str, Any], version: str) -> str:
        number = request["messages"][-1]["content"].split()[-1]
        return number if int(number) - 10 < skill.get(version, 0) else "wrong"

    return ScriptedEngine(answer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer and chat template, which demonstrations are rendered with."""
    directory = tmp_path_factory.mktemp("model")
    make_seed_model(directory, seed=0, corpus=["say 1", "2"])
    return directory


def specs(root: Path) -> list[JobSpec]:
    home = Home(root)
    found = [JobJournal(home, path.parent.name).spec() for path in home.jobs.glob("*/spec.json")]
    return sorted(found, key=lambda spec: spec.hyperparameters.seed)


@pytest.mark.slow
def test_goes_on_with_more_until_the_band_and_is_found_done(tmp_path: Path, model: Path) -> None:
    script = engine({"m@3": 1, "m@4": 3})
    with platform(tmp_path, script, model=model) as where:
        loop = make_loop(platform=where)
        assert warm_up(loop, PLAN).id == "m@4"
        assert len(loop.data.demonstrations) == 8
        assert Registry(Home(tmp_path)).resolve("m").id == "m@4"
        list(loop.run_sync(1))  # from now on there are successful runs, which are no demonstrations
        asked = len(script.requests)
        again = make_loop(platform=where)
        assert warm_up(again, PLAN).id == "m@4"
        assert len(again.data.demonstrations) == 8
        assert len(script.requests) == asked
    assert len(specs(tmp_path)) == 3 + 1
    assert len({spec.dataset for spec in specs(tmp_path)}) == 3 + 1


@pytest.mark.slow
def test_a_later_promotion_stays(tmp_path: Path, model: Path) -> None:
    with platform(tmp_path, engine({"m@2": 3}), model=model) as where:
        warm_up(make_loop(platform=where), PLAN)
        registry = Registry(Home(tmp_path))
        checkpoint, manifest = registry.import_checkpoint(model)
        manifest = manifest.model_copy(update={"weights_sha256": "f" * 64})
        later = registry.register("m", checkpoint, manifest)
        registry.promote("m", later.number)
        warm_up(make_loop(platform=where), PLAN)
        assert Registry(Home(tmp_path)).resolve("m").id == later.id


@pytest.mark.slow
def test_what_leaps_over_the_band_is_done_again_with_half_the_steps(
    tmp_path: Path, model: Path
) -> None:
    with platform(tmp_path, engine({"m@2": 9, "m@3": 4}), model=model) as where:
        assert warm_up(make_loop(platform=where), PLAN).id == "m@3"
    steps = sorted(spec.hyperparameters.steps for spec in specs(tmp_path))
    parents = {spec.parent_sha256 for spec in specs(tmp_path)}
    assert steps == [20, 40]
    assert len(parents) == 1


def searched(plan: WarmUp, skill: Callable[[int], float]) -> tuple[Tried, list[int], int]:
    """What a search finds where success follows from the steps behind a version.

    And the steps of each job, and those behind what was found.
    """
    behind: dict[str, int] = {}
    jobs: list[int] = []

    async def attempt(
        below: ModelVersion | None, job: Hyperparameters, shown: int, tried: Sequence[Tried]
    ) -> Tried:
        jobs.append(job.steps)
        version = ModelVersion(name="m", number=len(jobs), checkpoint="", weights_sha256="")
        behind[version.id] = job.steps + (behind[below.id] if below else 0)
        return Tried(version, skill(behind[version.id]), shown, job.steps)

    found = asyncio.run(search(plan, 20, attempt))
    return found, jobs, behind[found.version.id]


@pytest.mark.parametrize("edge", range(1, 400, 7))
def test_a_leap_within_few_steps_is_searched_by_halves(edge: int) -> None:
    """From 0 to 1 within three steps, wherever that is; the checkpoints below it are kept."""
    plan = WarmUp(Training(steps=120, learning_rate=1e-3), band=(0.05, 0.9))
    found, jobs, steps = searched(
        plan, lambda steps: 0.0 if steps < edge else 0.3 if steps < edge + 3 else 1.0
    )
    assert found.success == 0.3 and edge <= steps < edge + 3
    assert len(jobs) <= 12
    assert sum(jobs) < 3 * 120 + edge  # only what leapt over the band is begun again


@pytest.mark.parametrize(("below", "taken", "steps"), [(0.0, 0.9, 75), (0.2, 0.2, 74)])
def test_a_leap_within_a_step_ends_at_the_nearest_and_says_so(
    below: float, taken: float, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """But not at a version without any success, from which nothing could be learned."""
    plan = WarmUp(Training(steps=120, learning_rate=1e-3), band=(0.3, 0.5))
    found, _, behind = searched(plan, lambda steps: below if steps < 75 else 0.9)
    assert (found.success, behind) == (taken, steps)
    assert f"{found.version.id} with {taken:.3f} is taken as the nearest" in caplog.text


def test_a_search_that_was_misled_goes_on() -> None:
    """Each job draws the data in an order of its own: what was above the band once need not be."""
    plan = WarmUp(Training(steps=40, learning_rate=1e-3), band=(0.4, 0.5))
    seen = iter([0.9, 0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.3, 0.9, 0.45])
    found, jobs, _ = searched(plan, lambda steps: next(seen))
    assert found.success == 0.45
    assert jobs == [40, 20, 10, 5, 2, 1, 1, 1, 2, 4, 2]


def test_demonstrations_grow_below_the_band_and_not_while_it_is_searched() -> None:
    plan = WarmUp(
        Training(steps=40, learning_rate=1e-3), band=(0.4, 0.5), demonstrations=4, more=10
    )
    seen = iter([0.1, 0.1, 0.1, 0.9, 0.1, 0.45])
    found, jobs, _ = searched(plan, lambda steps: next(seen))
    assert jobs == [40, 40, 40, 40, 20, 10]
    assert found.demonstrations == 20  # there are no more


@pytest.mark.slow
def test_a_loop_in_another_process_trains_on_what_was_shown(tmp_path: Path, model: Path) -> None:
    with platform(tmp_path, engine({"m@3": 3}), model=model) as where:
        warm_up(make_loop(platform=where), PLAN)  # and its process ends
        assert list(make_loop(platform=where, method=SFT).run_sync(1))
    counts = [len(list(dataset_runs(Home(tmp_path), spec.dataset))) for spec in specs(tmp_path)]
    assert counts == [6, 6, 4]  # the loop's own, and the warm-up's jobs, whose seeds go down
    with platform(tmp_path, engine({}), model=model) as where:
        others = [(talk(n), {}) for n in range(50, 70)]
        with pytest.raises(BadInput, match="showed 6 demonstrations") as refusal:
            list(make_loop(platform=where, method=SFT, demonstrations=others).run_sync(1))
        assert refusal.value.param == "demonstrations"


@pytest.mark.slow
def test_a_loop_warms_up_by_itself_once_also_from_the_command_line(
    tmp_path: Path, model: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from cray_agents import SFT\nfrom tests.test_warmup import PLAN, make_loop\n"
        "loop = make_loop(method=SFT, warm_up=PLAN)\n"
    )
    command = [sys.executable, "-m", "cray_agents", "loop", str(file), "--iterations", "1"]
    with platform(tmp_path / "root", engine({"m@2": 3}), model=model) as where:
        command += ["--json", "--url", where.url]
        path = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, check=True, capture_output=True, env=path, timeout=600)
        begun = [Iteration.model_validate(each) for each in json.loads(done.stdout)]
        assert [g.version for g in begun] == ["m@2", "m@3"]
        again = make_loop(platform=where, method=SFT, warm_up=PLAN)
        assert list(again.run_sync(1)) == begun
        assert len(again.data.demonstrations) == 4
        with pytest.raises(BadInput, match=r"warm_up\.more was 2, now 3"):
            list(make_loop(platform=where, method=SFT, warm_up=replace(PLAN, more=3)).run_sync(1))
        with pytest.raises(BadInput, match="has begun without this warm-up"):
            warm_up(make_loop(platform=where), replace(PLAN, more=3))
    assert len(specs(tmp_path / "root")) == 2


def test_a_tiny_model_is_made_whole_and_once(tmp_path: Path) -> None:
    shown, folder = [(talk(n), {}) for n in range(4)], tmp_path / "model"
    with pytest.raises(BadInput, match="give some"):
        make_tiny_model(folder, [])
    (tmp_path / "model.draft").mkdir()  # of a call that was killed
    assert make_tiny_model(str(folder), shown, seed=1) == folder
    assert sorted(tmp_path.iterdir()) == [folder]
    made = (folder / "model.safetensors").read_bytes()
    assert make_tiny_model(folder, shown, seed=2) == folder
    assert (folder / "model.safetensors").read_bytes() == made


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"demonstrations": []}, "demonstrations"), ({"band": (0.5, 0.2)}, "band"),
     ({"more": -1}, "more"), ({"shown": 0}, "demonstrations")],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadInput) as refusal:
        asked = {"demonstrations" if name == "shown" else name: value
                 for name, value in changes.items() if name != "demonstrations"}  # fmt: skip
        make_loop(warm_up=replace(PLAN, **asked), demonstrations=changes.get("demonstrations", [1]))
    assert refusal.value.param == param


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "shown", "solved", "said"),
    [
        ("rft", False, 0, "none of 10 held-out runs got a reward of 1, and a loop learns"),
        ("rft", True, 0, "learns from the demonstrations alone"),
        ("grpo", False, 0, "none of 10 held-out runs got any reward"),
        ("grpo", False, 1, ""),
        ("rft", False, 1, ""),
    ],
)
def test_iteration_0_says_that_nothing_succeeded_and_what_helps(
    tmp_path: Path, method: Any, shown: bool, solved: int, said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    hard = TaskSet([Task(input="say 99", target="99"), *TASKS])
    changes: dict[str, Any] = {"tasks": hard} | ({} if shown else {"demonstrations": []})
    with platform(tmp_path, engine({"m@1": solved})) as where:
        changes |= {"platform": where, "method": METHODS[method], "group_size": 2}
        loop = make_loop(**changes)
        runs = loop.run_sync(1)
        first = next(runs)
        if solved == 0 and not shown:  # what comes of it says it again
            with pytest.raises(BadInput, match="cold start"):
                list(make_loop(**changes).run_sync(3))
        runs.close()
    assert said in first.note and bool(said) == bool(first.note)
    assert first.note in caplog.text
    assert ("warm_up=WarmUp(" in first.note) == bool(said)


@pytest.mark.slow
def test_never_in_the_band_is_an_error(tmp_path: Path, model: Path) -> None:
    with (
        platform(tmp_path, engine({}), model=model) as where,
        pytest.raises(JobError, match="4 warm-up jobs did not reach"),
    ):
        warm_up(make_loop(platform=where), PLAN)
    assert Registry(Home(tmp_path)).resolve("m").id == "m@1"
