"""The cold start: which demonstrations a job sees, where it stops, what a second call does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Agent, Loop, ScriptedEngine, Task, TaskSet, reward
from cray_agents.errors import JobError
from cray_agents.paths import Home
from cray_agents.records import Run
from cray_agents.runtime.datasets import dataset_runs
from cray_agents.runtime.registry import Registry
from cray_agents.trainers.seed_model import make_seed_model
from cray_agents.training import Hyperparameters, JobSpec, Lora
from cray_agents.warmup import WarmUp, warm_up
from tests.scripted_platform import platform

STEPS = Hyperparameters(steps=40)
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
    loop = Loop(Agent(name="a", model="m"), TaskSet([train, *TASKS]), rewards=[right],
                hyperparameters=STEPS, demonstrations=shown, name="loop")  # fmt: skip
    return replace(loop, **changes)


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
    found = [path.read_text() for path in Home(root).jobs.glob("*/spec.json")]
    return sorted(
        map(JobSpec.model_validate_json, found), key=lambda spec: spec.hyperparameters.seed
    )


def test_goes_on_with_more_until_the_band_and_is_found_done(tmp_path: Path, model: Path) -> None:
    script = engine({"m@3": 1, "m@4": 3})
    with platform(tmp_path, script, model=model) as where:
        loop = make_loop(platform=where)
        assert warm_up(loop, PLAN).id == "m@4"
        assert len(loop.demonstrations) == 8
        assert Registry(Home(tmp_path)).resolve("m").id == "m@4"
        list(loop.run(1))  # from now on there are successful runs, which are no demonstrations
        asked = len(script.requests)
        again = make_loop(platform=where)
        assert warm_up(again, PLAN).id == "m@4"
        assert len(again.demonstrations) == 8
        assert len(script.requests) == asked
    assert len(specs(tmp_path)) == 3 + 1
    assert len({spec.dataset for spec in specs(tmp_path)}) == 3 + 1


def test_the_optimizer_goes_on_where_this_root_trained_all_the_parents_weights(
    tmp_path: Path, model: Path
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    with platform(there, engine({"m@2": 3}), model=model) as where:
        warm_up(make_loop(platform=where), PLAN)
    (job,) = specs(there)
    plan = replace(PLAN, first=STEPS.model_copy(update={"lora": Lora()}))
    trained = Home(there).checkpoint(job.id)
    with platform(here, engine({"m@2": 1, "m@4": 3}), model=trained) as where:
        assert warm_up(make_loop(platform=where), plan).id == "m@4"
    third, second, first = specs(here)  # the seeds go down
    assert first.hyperparameters.lora is not None and second.hyperparameters.lora is None
    found = [first.optimizer_from, second.optimizer_from, third.optimizer_from]
    assert found == [None, None, second.id]


def test_what_is_held_out_is_not_shown_even_at_first(tmp_path: Path, model: Path) -> None:
    taken: list[Any] = [(talk(n), {}) for n in (0, 15, 1, 2)]
    with platform(tmp_path, engine({"m@2": 3}), model=model) as where:
        warm_up(make_loop(platform=where, demonstrations=taken), PLAN)
    (job,) = specs(tmp_path)
    lines = dataset_runs(Home(tmp_path), job.dataset)
    assert [line["reason"] for line in lines] == [None, "contaminated", None, None]


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


def test_a_jump_over_the_band_is_done_again_with_half_the_steps(
    tmp_path: Path, model: Path
) -> None:
    with platform(tmp_path, engine({"m@2": 9, "m@3": 4}), model=model) as where:
        assert warm_up(make_loop(platform=where), PLAN).id == "m@3"
    steps = sorted(spec.hyperparameters.steps for spec in specs(tmp_path))
    parents = {spec.parent_sha256 for spec in specs(tmp_path)}
    assert steps == [20, 40]
    assert len(parents) == 1


def test_never_in_the_band_is_an_error(tmp_path: Path, model: Path) -> None:
    with (
        platform(tmp_path, engine({}), model=model) as where,
        pytest.raises(JobError, match="4 warm-up jobs did not reach"),
    ):
        warm_up(make_loop(platform=where), PLAN)
    assert Registry(Home(tmp_path)).resolve("m").id == "m@1"
