"""The curriculum: the tasks that an iteration draws."""

from collections import Counter

from cray_agents.loop.curriculum import AttemptOutcome, Curriculum
from cray_agents.records import Task

TASKS = [Task(input=f"{kind} {n}", metadata={"kind": kind}) for kind in "abc" for n in range(100)]
GROUPS = {task.id: task.metadata["kind"] for task in TASKS}


def iteration(**success: float) -> list[AttemptOutcome]:
    """Ten runs of each kind, with that share of successes."""
    return [
        AttemptOutcome(task.id, task.id, float(n < 10 * success[kind]))
        for kind in success
        for n, task in enumerate([t for t in TASKS if t.metadata["kind"] == kind][:10])
    ]


def kinds(tasks: list[Task]) -> Counter[str]:
    return Counter(task.metadata["kind"] for task in tasks)


def test_all_kinds_alike_while_nothing_is_known() -> None:
    assert kinds(Curriculum("kind").choose(TASKS, [], 60, "s")) == {"a": 20, "b": 20, "c": 20}


def test_most_from_where_the_outcome_is_open() -> None:
    chosen = kinds(Curriculum("kind").choose(TASKS, [iteration(a=1.0, b=0.5, c=0.0)], 100, "s"))
    assert chosen["b"] > chosen["c"] > chosen["a"] > 0


def test_success_is_where_a_reward_lies_in_its_range() -> None:
    curriculum = Curriculum("kind").over(1, 5)
    rewards = [AttemptOutcome("r", task.id, 1.0 + 4 * (n % 2)) for n, task in enumerate(TASKS[:10])]
    assert curriculum.success(GROUPS, [rewards]) == {"a": 0.5}
    assert Curriculum("kind").success(GROUPS, [rewards]) == {"a": 1.0}


def test_a_kind_that_was_not_tried_keeps_its_rate() -> None:
    curriculum = Curriculum("kind")
    known = curriculum.success(GROUPS, [iteration(a=0.2, b=0.5), iteration(b=1.0)])
    assert known == {"a": 0.2, "b": 1.0}


def test_unseen_tasks_first_and_the_same_for_the_same_seed() -> None:
    seen = [iteration(a=0.5, b=0.5, c=0.5)]
    used = {outcome.task for outcome in seen[0]}
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


def test_of_the_tried_tasks_those_whose_outcome_is_open_come_first() -> None:
    """Per task: neither always solved nor never. 30 of them among 90, for each of many seeds."""
    tasks = [task for task in TASKS if task.metadata["kind"] == "a"][:90]
    rewards = {0: (1.0, 1.0, 1.0, 1.0), 1: (1.0, 0.0, 1.0, 0.0), 2: (0.0, 0.0, 0.0, 0.0)}
    seen = [
        AttemptOutcome(f"{task.id}/{attempt}", task.id, reward)
        for n, task in enumerate(tasks)
        for attempt, reward in enumerate(rewards[n % 3])
    ]
    kind = {task.id: n % 3 for n, task in enumerate(tasks)}
    drawn: Counter[int] = Counter()
    for seed in range(50):
        chosen = Curriculum().choose(tasks, [seen], 30, str(seed))
        drawn.update(kind[task.id] for task in chosen)
    assert drawn[1] > 1.3 * drawn[2] > 1.3 * drawn[0] > 0


def test_what_others_draw_counts_as_tried() -> None:
    taken = {task.id for task in TASKS[:250]}
    chosen = Curriculum().choose(TASKS, [], 60, "s", taken)
    assert {task.id for task in TASKS[250:]} <= {task.id for task in chosen}


def test_a_share_is_revisited_while_there_are_unseen_ones() -> None:
    seen = [iteration(a=0.5, b=0.5, c=0.5)]
    used = {outcome.task for outcome in seen[0]}
    chosen = Curriculum("kind", revisit=0.2).choose(TASKS, seen, 60, "s")
    assert len(chosen) == 60
    assert len(used & {task.id for task in chosen}) == 12
