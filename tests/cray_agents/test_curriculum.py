"""Which tasks a generation draws."""

from collections import Counter

from cray_agents.curriculum import Curriculum
from cray_agents.records import Reward, Run, StopReason, Task

TASKS = [Task(input=f"{kind} {n}", metadata={"kind": kind}) for kind in "abc" for n in range(100)]


def ran(task: Task, value: float) -> Run:
    return Run(
        id=task.id,
        agent="a",
        model="m@1",
        input=task.input,
        task=task,
        stop_reason=StopReason.completed,
        rewards=[Reward(name="r", value=value)],
    )


def generation(**success: float) -> list[Run]:
    """Ten runs of each kind, with that share of successes."""
    return [
        ran(task, float(n < 10 * success[kind]))
        for kind in success
        for n, task in enumerate([t for t in TASKS if t.metadata["kind"] == kind][:10])
    ]


def kinds(tasks: list[Task]) -> Counter[str]:
    return Counter(task.metadata["kind"] for task in tasks)


def test_all_kinds_alike_while_nothing_is_known() -> None:
    assert kinds(Curriculum("kind").choose(TASKS, [], 60, "s")) == {"a": 20, "b": 20, "c": 20}


def test_most_from_where_the_outcome_is_open() -> None:
    chosen = kinds(Curriculum("kind").choose(TASKS, [generation(a=1.0, b=0.5, c=0.0)], 100, "s"))
    assert chosen["b"] > chosen["c"] > chosen["a"] > 0


def test_a_kind_that_was_not_tried_keeps_its_rate() -> None:
    curriculum = Curriculum("kind")
    known = curriculum.success([generation(a=0.2, b=0.5), generation(b=1.0)])
    assert known == {"a": 0.2, "b": 1.0}


def test_unseen_tasks_first_and_the_same_for_the_same_seed() -> None:
    seen = [generation(a=0.5, b=0.5, c=0.5)]
    used = {run.task.id for run in seen[0] if run.task}
    curriculum = Curriculum("kind")
    chosen = curriculum.choose(TASKS, seen, 200, "s")
    assert not used & {task.id for task in chosen}
    assert chosen == curriculum.choose(TASKS, seen, 200, "s")
    assert chosen != curriculum.choose(TASKS, seen, 200, "t")


def test_a_small_group_gives_all_and_others_fill_up() -> None:
    few = [task for task in TASKS if task.metadata["kind"] != "a"] + TASKS[:5]
    chosen = Curriculum("kind").choose(few, [], 150, "s")
    assert len(chosen) == len({task.id for task in chosen}) == 150
    assert kinds(chosen)["a"] == 5
    assert len(Curriculum().choose(few, [], 1000, "s")) == len(few)
