"""Methods in a loop: recipes, jobs, stages, and the runs each iteration draws."""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Distill, PromotionTest, TaskSet, Training, reward
from cray_agents.cli.iteration_table import disagreement
from cray_agents.cli.why import explain
from cray_agents.errors import BadInput
from cray_agents.iteration import Iteration, row
from cray_agents.loop import Curriculum
from cray_agents.loop.live.schedule import Live
from cray_agents.loop.methods import DPO, GRPO, KTO, RFT, SFT
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.queries import RunQuery
from cray_agents.records import LogprobDistance, Run, Task
from cray_agents.runtime.datasets.reader import dataset_runs, read_dataset
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.training_jobs import JobSpec, Lora, Policy
from tests.support.killable_loop import echo, site_loop
from tests.support.scripted_platform import bare_model, platform

pytestmark = pytest.mark.slow


def specs(root: Path, done: list[Iteration]) -> list[JobSpec]:
    """Of the iterations' jobs, in their order."""
    jobs = [g.job for g in done if g.iteration and g.job]
    return [JobJournal(Home(root), job).spec() for job in jobs]


def used(root: Path, iteration: Iteration) -> set[str]:
    lines = dataset_runs(Home(root), iteration.dataset or "")
    return {line["run"] for line in lines if line["accepted"]}


def train_runs(root: Path, iteration: int) -> list[Run]:
    return Store(Home(root)).runs(RunQuery(loop="loop", iteration=iteration))


def by_task(runs: list[Run]) -> dict[str, list[float]]:
    found = defaultdict(list)
    for run in runs:
        assert run.task is not None and run.reward is not None
        found[run.task.id].append(run.reward)
    return found


def test_grpo_trains_on_its_own_iteration_and_goes_on_from_the_latest(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        loop = site_loop(method=GRPO, group_size=4, temperature=0.7, clip_high=0.28,
                         training=Training(steps=1, seed=5), evaluate_every=3,
                         platform=where)  # fmt: skip
        done = list(loop.run_sync(4))
    first, second, third, _ = jobs = specs(tmp_path, done)
    assert {job.method for job in jobs} == {"grpo"}
    assert first.hyperparameters.policy == Policy(clip_high=0.28, temperature=0.7)
    assert [job.hyperparameters.seed for job in jobs] == [6, 7, 8, 9]
    assert [job.optimizer_from for job in jobs] == [None, first.id, second.id, third.id]
    assert [g.sampled_from for g in done[1:]] == ["m@1", "m@2", "m@3", "m@4"]
    # the third was evaluated, against m@1, and it is better; those before were passed on. The last
    # one is judged, too
    assert [(g.promoted, g.onward, g.holdout_tasks > 0) for g in done[1:]] == [
        (False, "m@2", False),
        (False, "m@3", False),
        (True, None, True),
        (False, "m@5", True),
    ]
    assert done[1].holdout_success == done[0].holdout_success
    for iteration in done[1:]:
        runs = {run.id: run for run in train_runs(tmp_path, iteration.iteration)}
        mixed = {task for task, got in by_task(list(runs.values())).items() if len(set(got)) > 1}
        expected = {run.id for run in runs.values() if run.task and run.task.id in mixed}
        assert used(tmp_path, iteration) == expected
        assert iteration.zero_variance_groups == 12 - len(mixed)
        assert iteration.tokens == sum(call.usage.completion_tokens for call in runs.values())


def test_distill_trains_on_its_own_iteration_by_a_teacher(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    big, manifest = Registry(home).import_checkpoint(bare_model(tmp_path / "big", b"big"))
    teacher = str(home.checkpoint(big))
    methods = [Distill(iterations=2, teacher=teacher), RFT(iterations=1), Distill(teacher="m@1")]
    with platform(tmp_path / "home", ScriptedEngine(echo)) as where:
        loop = site_loop(method=methods, temperature=0.7, training=Training(steps=1, seed=5),
                         platform=where)  # fmt: skip
        done = list(loop.run_sync(4))
    root = home.root
    jobs = specs(root, done)
    assert [job.method for job in jobs] == ["distill", "distill", "sft", "distill"]
    first = Registry(home).resolve("m@1")
    assert [job.teacher_sha256 for job in jobs] == [
        *[manifest.weights_sha256] * 2, None, first.weights_sha256]  # fmt: skip
    assert jobs[0].hyperparameters.policy == Policy(temperature=0.7)
    for iteration in (done[1], done[2], done[4]):  # all of its runs, whatever their rewards
        assert used(root, iteration) == {run.id for run in train_runs(root, iteration.iteration)}
    assert [g.sampled_from for g in done[1:3]] == ["m@1", done[1].onward or done[1].version]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": Distill}, "teacher\n  Field required"),
        ({"method": Distill, "teacher": "big"}, "the promoted one may change"),
        ({"method": Distill, "teacher": 3}, "teacher\n.*valid string"),
        ({"method": Distill, "teacher": "b@1", "temperature": 0.0}, "Distill learns from draws"),
        ({"method": Distill, "teacher": "b@1", "control": "shuffled-rewards"}, "uses no rewards"),
        ({"method": Distill, "teacher": "b@1", "history": 2}, "history has no effect"),
        ({"method": Distill, "teacher": "b@1", "live": Live(runs=8)}, "the loop's own runs"),
    ],
)
def test_a_loop_with_a_teacher_that_does_not_add_up_is_refused(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        site_loop(**changes)


def test_a_loop_leaves_the_promoted_version_serving(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        loop = site_loop(method=GRPO, group_size=2, evaluate_every=3, platform=where)
        steps = loop.run_sync(4)
        assert [next(steps).onward for _ in range(2)] == [None, "m@2"]
        assert held(where) == ["m@2"]
        steps.close()
        assert held(where) == ["m@1"]


def held(where: Platform) -> list[str]:
    async def pool() -> list[str]:
        replicas = await where.pool()
        await where.close()
        return [replica["version"] for replica in replicas]

    return asyncio.run(pool())


def test_groups_without_variance_are_replaced_within_the_budget(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        loop = site_loop(method=GRPO, group_size=2, dynamic_sampling=0.5, platform=where)
        (_, first) = list(loop.run_sync(1))
        again = site_loop(method=GRPO, group_size=2, dynamic_sampling=0.5, platform=where)
        assert list(again.run_sync(1))
    groups = by_task(train_runs(tmp_path, 1))
    assert set(map(len, groups.values())) == {2}
    alike = sum(len(set(got)) == 1 for got in groups.values())
    assert first.resampled == len(groups) - 12 == 6  # half of twelve
    assert (first.zero_variance_groups, first.runs) == (alike, 36)


def test_groups_are_replaced_by_tasks_that_no_iteration_tried(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        loop = site_loop(method=GRPO, group_size=2, dynamic_sampling=0.5, platform=where)
        assert [iteration.resampled for iteration in loop.run_sync(3)] == [0, 6, 6, 6]
    tried = [set(by_task(train_runs(tmp_path, number))) for number in (1, 2, 3)]
    assert [len(tasks) for tasks in tried] == [18, 18, 18]
    assert len(set[str].union(*tried)) == 54


def test_dpo_and_kto_get_what_they_compare(tmp_path: Path) -> None:
    stages = [DPO(iterations=1, group_size=3), KTO()]
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        done = list(site_loop(method=stages, platform=where).run_sync(2))
    dpo, kto = specs(tmp_path, done)
    assert (dpo.method, kto.method, dpo.reference, kto.reference) == ("dpo", "kto", None, None)
    pairs = read_dataset(Home(tmp_path), done[1].dataset or "")
    assert pairs["method"] == "dpo"
    runs = {run.id: run for run in train_runs(tmp_path, 1)}
    rewards = [runs[name].reward for name in used(tmp_path, done[1])]
    assert rewards.count(1.0) == rewards.count(0.0) > 3
    assert len(used(tmp_path, done[2])) == 36 + 12  # kto: good and bad, of both iterations


def test_a_schedule_of_demonstrations_imitation_and_policy_gradient(tmp_path: Path) -> None:
    make_seed_model(tmp_path / "model", seed=0, corpus=["say 1", "2"])
    shown = [([{"role": "user", "content": f"show {n}"},
               {"role": "assistant", "content": str(n)}], {}) for n in range(8)]  # fmt: skip
    stages = [SFT(iterations=1), RFT(iterations=1, tasks_per_iteration=20),
              GRPO(training=Training(steps=2), group_size=3)]  # fmt: skip
    with platform(tmp_path / "home", ScriptedEngine(echo), model=tmp_path / "model") as where:
        done = list(site_loop(method=stages, demonstrations=shown, platform=where).run_sync(3))
    assert [g.method for g in done[1:]] == ["sft", "rft", "grpo"]
    assert [g.runs for g in done[1:]] == [0, 20, 36]
    assert [g.promoted for g in done[1:]] == [True, False, True]
    assert [g.sampled_from for g in done[1:]] == [None, "m@2", "m@2"]
    root = tmp_path / "home"
    assert [job.method for job in specs(root, done)] == ["sft", "sft", "grpo"]
    assert specs(root, done)[2].hyperparameters.steps == 2
    assert len(used(root, done[1])) == 8
    grpo_runs = {run.id for run in train_runs(root, 3)}
    assert used(root, done[3]) <= grpo_runs  # what rft left over is not grpo's


@pytest.mark.parametrize("control", [None, "shuffled-rewards"])
def test_an_iteration_tells_its_set_and_a_control_has_no_demonstrations(
    tmp_path: Path, control: Any
) -> None:
    """Also how often it saw the set, and the kinds that never succeed; steps follow the set."""
    make_seed_model(tmp_path / "model", seed=0, corpus=["say 1", "2"])
    shown = [([{"role": "user", "content": f"show {n}"},
               {"role": "assistant", "content": str(n)}], {}) for n in range(30)]  # fmt: skip
    tasks = [Task(input=f"say {n}", metadata={"kind": "odd" if n % 2 else "even"},
                  split="train" if n < 40 else "holdout") for n in range(80)]  # fmt: skip

    @reward
    def odd(run: Run) -> float:
        return float(run.input[-1] in "13579" and run.input[-1] != "9")

    with platform(tmp_path / "home", ScriptedEngine(echo), model=tmp_path / "model") as where:
        loop = site_loop(
            tasks=TaskSet(tasks),
            rewards=[odd],
            demonstrations=shown,
            control=control,
            training=Training(batch_size=4, learning_rate=1e-3),
            tasks_per_iteration=40,
            curriculum=Curriculum("kind"),
            platform=where,
        )
        (_, trained) = loop.run_sync(1)
    demonstrations = 0 if control else 30
    samples = 16 + demonstrations
    (spec,) = specs(tmp_path / "home", [trained])
    assert spec.hyperparameters.steps == -(-3 * samples // 4)
    assert (trained.samples, trained.demonstrations) == (samples, demonstrations)
    assert trained.epochs == pytest.approx(spec.hyperparameters.steps * 4 / samples)
    assert trained.kinds == {"even": 0, "odd": 16}
    told = " / ".join(trained.remarks)
    assert f"a set of {samples} samples, each seen 3" in told and "temperature, such as 0.8" in told
    assert ("65% of the set are demonstrations" in told) == (not control)
    assert "without any success so far: even" in told
    assert row(trained)["set"] == f"{samples} ×{trained.epochs:.3g}"
    assert "without any success so far: even" in str(explain(Home(tmp_path / "home"), "loop"))


def test_a_loop_tells_what_trainer_and_sampler_disagreed_by() -> None:
    distances = [
        LogprobDistance(tokens=9, mean=mean, p99=1.0, max=4 * mean, kl=mean / 10)
        for mean in (0.01, 0.02)
    ]
    done = [
        Iteration(iteration=0, holdout_success=0, holdout_tasks=9, version="m@1"),
        *(
            Iteration(
                iteration=number,
                holdout_success=0,
                holdout_tasks=9,
                version=f"m@{number}",
                agreement=distance,
                mean_metrics={"engine_clip_fraction": number / 1000},
            )
            for number, distance in enumerate(distances, 1)
        ),
    ]
    assert disagreement(done[:1]) == ""
    assert disagreement(done) == (
        "logprobs of trainer and sampler differ by 0.01 to 0.02 nats on average, 0.08 at most, KL"
        " 0.001 to 0.002, tokens clipped by importance_cap 0.10% to 0.20%"
    )


def test_adapters_go_on_with_their_optimizer_but_not_in_other_weights(tmp_path: Path) -> None:
    lora = Training(steps=1, lora=Lora(rank=4))
    stages = [RFT(iterations=2, training=lora), RFT(iterations=1), RFT()]
    with platform(tmp_path, ScriptedEngine(echo)) as where:
        done = list(site_loop(method=stages, platform=where).run_sync(4))
    assert [g.promoted for g in done] == [True, True, False, True, False]
    first, second, third, fourth = specs(tmp_path, done)
    assert first.hyperparameters.lora == second.hyperparameters.lora == Lora(rank=4)
    # the second's parent was made by the first, the third's too: the third trains all weights
    assert [first.optimizer_from, second.optimizer_from] == [None, first.id]
    assert third.optimizer_from is None
    assert fourth.optimizer_from == third.id


def test_no_optimizer_goes_on_that_another_root_has_or_another_loops_adapters(
    tmp_path: Path,
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    lora = Training(steps=1, lora=Lora(rank=4))
    with platform(there, ScriptedEngine(echo)) as where:
        list(site_loop(training=lora, platform=where).run_sync(1))
        version = asyncio.run(where.promoted("m"))
        done = list(site_loop(name="whole", platform=where).run_sync(1))
    assert version is not None and version.job is not None
    (job,) = specs(there, done)
    assert (Path(job.parent).name, job.optimizer_from) == (version.job, None)
    trained = Home(there).checkpoint(job.id)
    with platform(here, ScriptedEngine(echo), model=trained) as where:
        done = list(site_loop(platform=where).run_sync(2))
        brought = asyncio.run(where.version("m@1"))
    first, second = specs(here, done)
    assert brought.job == job.id and first.optimizer_from is None
    assert second.optimizer_from == first.id


def even(run: Run) -> float:
    """The same for every version: attempts differ, versions do not."""
    return float((run.attempt or 0) % 2)


def test_an_iteration_without_variance_is_no_update_and_two_are_an_error(tmp_path: Path) -> None:
    def three(run: Run) -> float:
        return 0.0 if run.iteration == 2 or run.iteration in (4, 5) else even(run)

    with platform(tmp_path, ScriptedEngine(echo)) as where:
        loop = site_loop(method=GRPO, group_size=2, rewards=[three], platform=where)
        steps = loop.run_sync(5)
        done = [next(steps) for _ in range(6)]
        assert [g.dataset is None for g in done] == [True, False, True, False, True, True]
        assert done[2].note.startswith("no update: no run can be trained on")
        assert (done[2].version, done[3].sampled_from) == ("m@2", "m@2")
        with pytest.raises(BadInput, match="zero_variance"):
            next(steps)
        again = site_loop(method=GRPO, group_size=2, rewards=[three], platform=where)
        (*same, sixth) = list(again.run_sync(6))
        assert (same, sixth.dataset is not None) == (done, True)


def test_runs_of_which_none_was_good_are_an_error_and_the_next_ones_are_tried_after_it(
    tmp_path: Path,
) -> None:
    def later(run: Run) -> float:
        return float(run.iteration != 1)

    with platform(tmp_path, ScriptedEngine(echo)) as where:
        steps = site_loop(rewards=[later], platform=where).run_sync(2)
        assert [next(steps).dataset, next(steps).dataset] == [None, None]
        with pytest.raises(BadInput, match=r"iteration 1: no update: no run can .* goes on with"):
            next(steps)
        done = list(site_loop(rewards=[later], platform=where).run_sync(2))
    assert [g.dataset is None for g in done] == [True, True, False]
    tried = [set(by_task(train_runs(tmp_path, number))) for number in (1, 2)]
    assert tried[0] != tried[1]


def test_the_control_draws_by_the_shuffled_rewards_too(tmp_path: Path) -> None:
    """Neither the training set, nor the draw, nor the resampling may follow the true ones."""
    shuffled: dict[str, Any] = {"control": "shuffled-rewards", "method": GRPO, "group_size": 2,
                                "dynamic_sampling": 1.0, "tasks_per_iteration": 20}  # fmt: skip
    drawn = []
    for name, rewards in (("a", [first_half]), ("b", [second_half])):
        with platform(tmp_path / name, ScriptedEngine(echo)) as where:
            loop = site_loop(rewards=rewards, platform=where, **shuffled)
            (_, iteration) = list(loop.run_sync(1))
        groups = by_task(train_runs(tmp_path / name, 1))
        assert all(len(set(got)) == 1 for got in groups.values())  # the true ones never vary
        assert used(tmp_path / name, iteration)  # and yet there is something to learn
        drawn.append((len(groups), iteration.zero_variance_groups))
    assert drawn[0][1] < drawn[0][0]


def first_half(run: Run) -> float:
    return float(int(run.input.split()[-1]) % 2)


def second_half(run: Run) -> float:
    return 1.0 - first_half(run)


def test_a_worse_candidate_is_rejected_before_all_tasks_were_tried(tmp_path: Path) -> None:
    def worse(run: Run) -> float:
        return float(run.model == "m@1")

    with platform(tmp_path, ScriptedEngine(echo)) as where:
        loop = site_loop(rewards=[worse], promotion=PromotionTest(hidden=0.2, batch=8),
                         platform=where)  # fmt: skip
        (start, first) = list(loop.run_sync(1))
    assert not first.promoted
    assert 0 < first.holdout_tasks < start.holdout_tasks
    assert first.losses == first.holdout_tasks
