"""A root that cost something: a ledger, runs of keys and of a loop, and jobs, in plain numbers."""

from typing import Any

from cray_agents.paths import Home
from cray_agents.records import Event
from cray_agents.runtime.accounting.ledger import LedgerFile, LedgerLine
from cray_agents.runtime.store import Store
from tests.support.scraped_metrics import put

HOUR = 3600.0
T = 472_222 * HOUR  # a whole hour
GPUS = {"gpus": ("0", "1"), "gpu_type": "nvidia_h100_80gb_hbm3", "cores": 8}


def line(hours: float, event: str, holder: str, **values: Any) -> LedgerLine:
    kind = holder.split("-")[0]
    return LedgerLine(time=T + hours * HOUR, event=event, kind=kind, holder=holder, **values)


def run_events(
    name: str,
    hours: float,
    prompt: int,
    sampled: int,
    *,
    model: str = "m@1",
    owner: str = "",
    reward: float | None = None,
    split: str = "train",
    **fields: Any,
) -> list[Event]:
    """A run of one call that began so many hours after T."""
    asked = [{"role": "user", "content": "q"}]
    answer = {"role": "assistant", "content": "a"}
    call = {
        "id": f"{name}.0", "run_id": name, "model": model, "messages": asked, "message": answer,
        "prompt_token_ids": [1] * prompt, "token_ids": [2] * sampled, "logprobs": [-0.5] * sampled,
        "finish_reason": "stop", "started": T + hours * HOUR, "seconds": 1.0, "owner": owner,
    }  # fmt: skip
    run = {
        "id": name, "agent": "a", "model": model, "input": "q", "output": "a",
        "stop_reason": "completed", "started": T + hours * HOUR, "seconds": 1.0, "owner": owner,
        "trajectory": {"messages": [*asked, answer], "turns": [{"call_id": f"{name}.0"}]},
        "task": {"id": "t", "input": "q", "split": split},
        "rewards": [] if reward is None else [{"name": "r", "value": reward, "time": T}],
        **fields,
    }  # fmt: skip
    return [
        Event(id=f"{name}.0", run_id=name, kind="call", body=call, time=T),
        Event(id=f"{name}.run", run_id=name, kind="run", body=run, time=T),
    ]


def write_ledger(home: Home) -> None:
    """Six hours of a replica on two GPUs, a session on four cores, and a job that was killed once.

    The replica answers half an hour of its second hour, and a quarter of its third one. It sleeps
    in the fifth. The GPUs measure 3.6 MJ in the second and third hour.
    """
    replica = {"node": "a", "what": "m@1", **GPUS}
    session = {"node": "b", "what": "loop", "cores": 4, "attempt": 1}
    job = {"node": "b", "cores": 2}
    kept = {"within": "session-1", "within_attempt": 1, "attempt": 1, "first": 0}
    file = LedgerFile(home.ledger, "w")
    file.write(
        [
            line(0, "hold", "replica-0", state="starting", **replica),
            line(1, "hold", "replica-0", state="serving", joules=0.0, **replica),
            line(1, "served", "platform"),
            line(
                2, "busy", "replica-0", state="serving", seconds=HOUR / 2, joules=2.4e6, **replica
            ),
            line(2, "served", "platform"),
            line(
                3, "busy", "replica-0", state="serving", seconds=HOUR / 4, joules=1.2e6, **replica
            ),
            line(4, "hold", "replica-0", state="asleep", **replica),
            line(5, "leave", "replica-0", state="asleep", **replica),
            line(0, "hold", "session-1", state="training", **session),
            line(1, "steps", "job-warm", last=4, seconds=HOUR / 4, **kept),
            line(3, "steps", "job-one", last=10, seconds=HOUR, **kept),
            line(4, "leave", "session-1", state="training", **session),
            line(0, "hold", "job-own", state="training", attempt=1, **job),
            line(1, "leave", "job-own", state="training", attempt=1, **job),
            line(1, "steps", "job-own", attempt=1, first=0, last=10, seconds=HOUR / 2),
            line(2, "hold", "job-own", state="training", attempt=2, **job),
            line(3, "leave", "job-own", state="training", attempt=2, **job),
            line(3, "steps", "job-own", attempt=2, first=5, last=10, seconds=HOUR / 2),
        ]
    )
    file.close()


def write_loop(home: Home) -> None:
    """The loop `loop`: a warm-up, held-out success 0.2, then 0.3, then a rejected candidate."""
    for job, session in (("job-warm", "loop"), ("job-one", "loop"), ("job-own", None)):
        put(home.job(job) / "spec.json", {"session": session})
    for number, (success, promoted, job) in enumerate(
        ((0.2, True, "job-warm"), (0.3, True, "job-one"), (0.25, False, None))
    ):
        record = {
            "iteration": number, "holdout_success": success, "holdout_tasks": 10,
            "version": f"m@{number + 1}", "promoted": promoted, "job": job,
        }  # fmt: skip
        put(home.loop("loop") / "generations" / f"{number}.json", record)


async def write_runs(store: Store) -> None:
    """Runs of the second hour, of 400 weighted tokens: a key's, another's, and two of the loop.

    In the third hour there is none, though the replica answered. One of an hour without a replica
    took nothing.
    """
    runs = [
        run_events("mine", 1.1, 20, 20, owner="key_1", reward=1.0),
        run_events("theirs", 1.2, 40, 15, owner="key_2", reward=0.0),
        run_events("train", 1.3, 20, 15, reward=1.0, loop="loop", iteration=1),
        run_events("held", 1.4, 60, 15, reward=1.0, split="holdout", model="m@2", loop="loop"),
        run_events("early", -5.0, 1000, 1000),
    ]
    await store.append([event for run in runs for event in run])
