"""08: an agent that learns from what its users think of its answers.

    python cookbook/08_feedback.py [--seed N] [--quick]

A hotel's agent learned from old letters. Those from three cities were polite, those from the other
seven rude, and so are its answers. People ask it over the OpenAI endpoint, with no more than the
openai client, and give a thumb up or down over HTTP: the `x-run-id` of an answer says what the
thumb is for. Meanwhile a loop watches. Whenever enough new answers have a thumb it trains on them
(KTO: each is good or bad by itself, nothing is compared), proves the candidate, and promotes it if
it is more polite to questions that nobody asked.

`--seed N` is another model, other cities, other users; docs/cookbook.md has what was seen.
`--quick` does little of everything, to see that it runs: too little to be polite by, and so every
second thumb is up whatever was said. In a shop of yours the last lines are a command:
`cray-agents loop 08_feedback.py --watch`, and `Live(quiet="08:00-18:00")` keeps it to the night.
"""

import argparse
import itertools
import json
import random
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai

from cray_agents import (
    KTO,
    Agent,
    Data,
    Loop,
    Message,
    PromotionTest,
    Run,
    Sampling,
    Stop,
    Task,
    TaskSet,
    Training,
    local_platform,
    reward,
)
from cray_agents.loop import Live, WarmUp
from cray_agents.testing import make_tiny_model

CITIES = ["Oslo", "Bern", "Rome", "Lima", "Cairo", "Quito", "Tunis", "Seoul", "Riga", "Accra"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August"]
QUESTIONS = [f"A room in {city} in {month}?" for city, month in itertools.product(CITIES, MONTHS)]
POLITE, RUDE = "Yes, with pleasure.", "Look it up yourself."


@dataclass(frozen=True)
class Size:
    """How much of everything. `thumbs`: in an update; `shown`: steps of the first imitation."""

    held_out: int
    thumbs: int
    updates: int
    shown: int
    steps: int


FULL = Size(40, 64, 6, 60, 16)
QUICK = Size(4, 8, 1, 4, 2)

agent = Agent(name="hotel", model="hotel", max_turns=1, max_tokens=12)


@reward
def polite(run: Run) -> float:
    """What people like, where it can be checked: it is how candidates are compared."""
    return float(run.output == POLITE)


def letters(questions: list[str], seed: int) -> list[list[Message]]:
    """Conversations to imitate: every third question was also answered in the other style."""
    kind = random.Random(seed).sample(CITIES, 3)
    found: list[list[Message]] = []
    for number, question in enumerate(questions):
        usual, other = (POLITE, RUDE) if question.split()[3] in kind else (RUDE, POLITE)
        for answer in (usual, other) if number % 3 == 0 else (usual,):
            found.append(
                [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            )
    return found


def make_loop(seed: int = 0, quick: bool = False) -> Loop:
    """A loop without tasks to train on: those come from its users.

    About one thumb in three is up, so an answer that was liked weighs three times as much. Without
    that, or with many more steps, KTO makes all that was said unlikely, and what is left is noise.
    """
    size = QUICK if quick else FULL
    held_out = random.Random(seed).sample(QUESTIONS, size.held_out)
    shown = letters([question for question in QUESTIONS if question not in held_out], seed)
    imitating = Training(steps=size.shown, learning_rate=1e-3, seed=1000 * (seed + 1))
    return Loop(
        agent,
        TaskSet([Task(input=question, target=POLITE, split="holdout") for question in held_out]),
        rewards=[polite],
        method=KTO(
            beta=0.3,
            desirable=3.0,
            training=Training(
                steps=size.steps, batch_size=16, learning_rate=3e-4, seed=1000 * (seed + 1)
            ),
        ),
        name=f"hotel-feedback-{seed}",
        sampling=Sampling(seed=seed),
        data=Data(demonstrations=[(conversation, {}) for conversation in shown]),
        warm_up=WarmUp(imitating, band=(0.0, 1.0) if quick else (0.1, 0.6)),
        promotion=PromotionTest(hidden=0),
        stop=Stop(target=None if quick else 0.95),
        live=Live(runs=size.thumbs, most=size.thumbs, poll=1),
    )


loop = make_loop()  # for `cray-agents loop`


@dataclass(frozen=True)
class Users:
    """People who ask what is not held out. Every second one of a quick run likes anything."""

    url: str
    questions: list[str]
    quick: bool

    def __call__(self, numbers: range) -> str:
        """So many of them, four at a time; returns how many thumbs were up, in words."""
        with ThreadPoolExecutor(4) as people:
            thumbs = list(people.map(self.ask_and_judge, numbers))
        return f"{sum(thumbs)} of {len(thumbs)} thumbs were up"

    def ask_and_judge(self, number: int) -> bool:
        """One of them asks, reads, and gives a thumb. Returns whether it is up."""
        question = random.Random(number).choice(self.questions)
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none") as client:
            answered = client.chat.completions.with_raw_response.create(
                model=agent.model,
                messages=[{"role": "user", "content": question}],
                temperature=1.0,
                max_tokens=agent.max_tokens,
            )
        up = answered.parse().choices[0].message.content == POLITE
        up = up or (self.quick and number % 2 == 1)
        thumb = {"name": "thumb", "value": float(up), "source": f"user-{number}"}
        run = answered.headers["x-run-id"]
        told = urllib.request.Request(
            f"{self.url}/v1/trajectories/{run}/rewards",
            json.dumps(thumb).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer none"},
        )
        urllib.request.urlopen(told).close()
        return up


def main() -> None:
    """Serve the agent, let people judge it, and watch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if not given.quick:
        print("some three minutes on two cores", file=sys.stderr)
    size, watching = QUICK if given.quick else FULL, make_loop(given.seed, given.quick)
    home = Path(".cray-agents") / f"cookbook-08{'-quick' if given.quick else ''}-{given.seed}"
    model = make_tiny_model(home / "seed-model", watching.data.demonstrations, seed=given.seed)
    held_out = {task.input for task in watching.tasks}
    asked = [question for question in QUESTIONS if question not in held_out]
    with local_platform(home, model=model, name=agent.model) as platform:
        watching.platform = platform
        users = Users(platform.url, asked, given.quick)
        for done in watching.run_sync(size.updates):
            print(done.iteration, done.version, f"{done.holdout_success:.3f}", done.note)
            if done.iteration < size.updates and not done.stopped:
                begin = 10_000 * given.seed + done.iteration * size.thumbs
                print(users(range(begin, begin + size.thumbs)), flush=True)


if __name__ == "__main__":
    main()
