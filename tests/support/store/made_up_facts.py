"""Facts of made-up events, and the index entries that a plain reading of the rules gives."""

from collections.abc import Iterable, Sequence
from typing import Any

from cray_agents.runtime.store.index import RunFacts
from cray_agents.runtime.store.segments.line_format import Fact, LinePlace, Placed


def call(event_id: str, run_id: str, time: float = 1.0, **about: Any) -> Fact:
    defaults = {
        "model": "calc@1",
        "started": time,
        "seconds": 1.0,
        "ending": "completed",
        "tags": [],
        "prompt": 10,
        "sampled": 5,
        "cached": 4,
        "redacted": False,
        "owner": "",
    }
    return Fact(event_id, run_id, "call", time, defaults | about)


def described(event_id: str, run_id: str, time: float = 1.0, **about: Any) -> Fact:
    defaults = {
        "model": "calc@1",
        "agent": "solver",
        "loop": None,
        "generation": None,
        "attempt": None,
        "task": None,
        "split": None,
        "stop_reason": "completed",
        "started": time,
        "seconds": 2.0,
        "error": None,
        "infrastructure": False,
        "tags": [],
        "rewards": [],
        "turns": 1,
        "input": "2 + 2?",
        "output": "4",
        "imported": None,
        "redacted": False,
        "owner": "",
    }
    return Fact(event_id, run_id, "run", time, defaults | about)


def reward(event_id: str, run_id: str, value: float = 1.0, time: float = 1.0, **about: Any) -> Fact:
    defaults = {
        "name": "correct",
        "source": "function",
        "value": value,
        "time": time,
        "turn": None,
        "giver": "",
    }
    return Fact(event_id, run_id, "reward", time, defaults | about)


def forget(event_id: str, run_id: str, time: float) -> Fact:
    return Fact(event_id, run_id, "forget", time, {"reason": "asked to"})


def placed(facts: Iterable[Fact], segment: str = "segment_a", start: int = 0) -> list[Placed]:
    """The facts in a segment, one after another, 100 bytes each with the newline."""
    return [Placed(fact, LinePlace(segment, start + i * 100, 99)) for i, fact in enumerate(facts)]


def live(facts: Iterable[Fact]) -> list[Fact]:
    """The events that are not forgotten, each once."""
    once = list({fact.id: fact for fact in facts}.values())
    until: dict[str, float] = {}
    for fact in once:
        if fact.kind == "forget":
            until[fact.run_id] = max(fact.time, until.get(fact.run_id, fact.time))
    return [
        fact
        for fact in once
        if fact.kind != "forget" and fact.time > until.get(fact.run_id, float("-inf"))
    ]


def expected_runs(facts: Iterable[Fact]) -> dict[str, RunFacts]:
    """The runs that a set of events tells of."""
    by_run: dict[str, list[Fact]] = {}
    for fact in live(facts):
        by_run.setdefault(fact.run_id, []).append(fact)
    runs = {run_id: _expected_run(run_id, found) for run_id, found in by_run.items()}
    return {run_id: run for run_id, run in runs.items() if run is not None}


def _expected_run(run_id: str, facts: Sequence[Fact]) -> RunFacts | None:
    calls = sorted((f for f in facts if f.kind == "call"), key=lambda f: (f.about["started"], f.id))
    runs = sorted((f for f in facts if f.kind == "run"), key=lambda f: (f.time, f.id))
    if not calls and not runs:
        return None
    if runs:
        about = runs[-1].about
    else:
        first, last = calls[0].about, calls[-1].about
        about = described("", "").about | {
            "model": last["model"],
            "agent": "",
            "stop_reason": last["ending"],
            "started": first["started"],
            "seconds": last["started"] + last["seconds"] - first["started"],
            "turns": 0,
            "input": "",
            "output": "",
            "owner": first["owner"],
        }
    rewards = [*about["rewards"]] + [
        [f.about[name] for name in ("name", "source", "value", "time", "turn", "giver")]
        for f in facts
        if f.kind == "reward"
    ]
    newest = {
        (r[0], r[1], -1 if r[4] is None else r[4]): (*r[:3], r[4])
        for r in sorted(rewards, key=lambda r: (r[3], r[2]))
    }
    given = [newest[key] for key in sorted(newest)]
    of_each = {
        (r[0], r[1], -1 if r[4] is None else r[4], r[5]): (*r[:3], r[4], r[5], r[3])
        for r in sorted(rewards, key=lambda r: (r[3], r[2]))
    }
    return RunFacts(
        run_id=run_id,
        described=bool(runs),
        imported=about["imported"],
        agent=about["agent"],
        model=about["model"],
        models=tuple(sorted({about["model"], *(f.about["model"] for f in calls)})),
        loop=about["loop"],
        iteration=about["generation"],
        attempt=about["attempt"],
        task=about["task"],
        split=about["split"],
        stop_reason=about["stop_reason"],
        error=about["error"],
        infrastructure=about["infrastructure"],
        reward=sum(r[2] for r in given) if given and about["error"] != "RewardError" else None,
        rewards=tuple(given),
        tags=tuple(sorted({*about["tags"], *(tag for f in calls for tag in f.about["tags"])})),
        started=about["started"],
        seconds=about["seconds"],
        turns=about["turns"] or len(calls),
        calls=len(calls),
        prompt_tokens=sum(f.about["prompt"] for f in calls),
        sampled_tokens=sum(f.about["sampled"] for f in calls),
        cached_tokens=sum(f.about["cached"] for f in calls),
        input=about["input"],
        output=about["output"],
        redacted=about["redacted"] or any(f.about["redacted"] for f in calls),
        owner=about["owner"],
        given=tuple(of_each[key] for key in sorted(of_each)) if any(r[5] for r in rewards) else (),
    )
