"""09: an agent that learns from what its users think of its answers.

    python cookbook/09_feedback.py [--quick]

A hotel's agent was shown polite answers and rude ones, and gives both. People ask it over the
OpenAI endpoint, with no more than the openai client, and give a thumb up or down over HTTP: the
`x-run-id` of an answer says what the thumb is for. Meanwhile a loop watches. Whenever enough new
answers have a thumb it trains on them (KTO: each is good or bad by itself, nothing is compared),
proves the candidate, and promotes it if it is more polite on questions that nobody asked.

`--quick` does little of everything, to see that it runs: too little to be polite by, and so every
second thumb is up whatever was said. In a shop of yours the last lines are a
command: `cray-agents loop 09_feedback.py --watch --quiet 08:00-18:00 --updates-per-day 3`.
"""

import itertools
import json
import random
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai

from cray_agents import Agent, Hyperparameters, Loop, PromotionTest, Run, Task, TaskSet, reward
from cray_agents.hours import Watch
from cray_agents.records import Message
from cray_agents.training import Preference
from cray_agents.warmup import WarmUp, warm_up

CITIES = ["Oslo", "Bern", "Rome", "Lima", "Cairo", "Quito", "Tunis", "Seoul", "Riga", "Accra"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August"]
QUESTIONS = [f"A room in {city} in {month}?" for city, month in itertools.product(CITIES, MONTHS)]
POLITE, RUDE = "Yes, with pleasure.", "Look it up yourself."


@dataclass(frozen=True)
class Size:
    """How much of everything. `thumbs`: in an update; `shown`: steps of imitation before."""

    held_out: int
    thumbs: int
    updates: int
    shown: int
    steps: int


FULL = Size(40, 64, 3, 120, 32)
QUICK = Size(4, 8, 1, 4, 2)

agent = Agent(name="hotel", model="hotel", max_turns=1, max_tokens=12)


@reward
def polite(run: Run) -> float:
    """What people like, where it can be checked: it is how candidates are compared."""
    return float(run.output == POLITE)


def shown(question: str, answer: str) -> list[Message]:
    """A conversation to imitate."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def make_loop(quick: bool = False) -> Loop:
    """A loop without tasks to train on: those come from its users."""
    size = QUICK if quick else FULL
    held_out = random.Random(0).sample(QUESTIONS, size.held_out)
    both = [shown(q, a) for q in QUESTIONS if q not in held_out for a in (POLITE, RUDE)]
    random.Random(1).shuffle(both)
    return Loop(
        agent,
        TaskSet([Task(input=question, target=POLITE, split="holdout") for question in held_out]),
        rewards=[polite],
        method="kto",
        name="hotel-feedback",
        hyperparameters=Hyperparameters(
            steps=size.steps,
            batch_size=16,
            learning_rate=3e-4,
            preference=Preference(beta=0.1),
        ),
        demonstrations=[(conversation, {}) for conversation in both],
        promotion=PromotionTest(hidden=0),
        temperature=1.0,
        watch=Watch(runs=size.thumbs, most=size.thumbs, poll=1),
    )


loop = make_loop()


def ask_and_judge(url: str, number: int, quick: bool) -> bool:
    """One of the users: asks, reads, and gives a thumb. Returns whether it is up."""
    held_out = {task.input for task in loop.tasks}
    question = random.Random(number).choice([q for q in QUESTIONS if q not in held_out])
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    answered = client.chat.completions.with_raw_response.create(
        model=agent.model,
        messages=[{"role": "user", "content": question}],
        temperature=1.0,
        max_tokens=agent.max_tokens,
    )
    up = answered.parse().choices[0].message.content == POLITE
    up = up or (quick and number % 2 == 1)
    thumb = {"name": "thumb", "value": float(up), "source": f"user-{number}"}
    run = answered.headers["x-run-id"]
    told = urllib.request.Request(
        f"{url}/v1/trajectories/{run}/rewards",
        json.dumps(thumb).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer none"},
    )
    urllib.request.urlopen(told).close()
    return up


def users(url: str, count: int, quick: bool) -> list[bool]:
    """So many people, four at a time, while the loop goes on; returns their thumbs."""
    with ThreadPoolExecutor(4) as people:
        return list(people.map(lambda number: ask_and_judge(url, number, quick), range(count)))


def make_model(directory: Path) -> None:
    """Write a model that knows nothing; its tokenizer knows the words of the shop."""
    from cray_agents.trainers.seed_model import make_seed_model, render

    corpus = [render(said, []) for said, _ in loop.demonstrations]
    make_seed_model(directory, seed=0, corpus=corpus)


def main(quick: bool) -> None:
    """Serve the agent, let people judge it, and watch."""
    from cray_agents import local_platform

    size, watching = QUICK if quick else FULL, make_loop(quick)
    home = Path(".cray-agents") / ("cookbook-09-quick" if quick else "cookbook-09")
    if not (home / "seed-model").exists():
        make_model(home / "seed-model")
    imitate = Hyperparameters(steps=size.shown, batch_size=16, learning_rate=2e-3)
    band = (0.0, 1.0) if quick else (0.05, 0.9)
    plan = WarmUp(imitate, imitate, len(watching.demonstrations), 0, band)
    with local_platform(home, model=home / "seed-model", name=agent.model) as watching.platform:
        warm_up(watching, plan)
        with ThreadPoolExecutor(1) as outside:
            count = size.updates * size.thumbs
            thumbs = outside.submit(users, watching.where.url, count, quick)
            for done in watching.run(size.updates):
                print(done.generation, done.version, done.runs, done.accepted_runs,
                      done.holdout_success, done.note)  # fmt: skip
        print(f"{sum(thumbs.result())} of {len(thumbs.result())} thumbs were up")


if __name__ == "__main__":
    main("--quick" in sys.argv)
