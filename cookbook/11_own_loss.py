"""11: a training loop and a loss of your own, on a model that a training session keeps in memory.

    python cookbook/11_own_loss.py [--seed N] [--quick]

A tiny model that knows nothing is rewarded for the letter e. Each step samples 32 answers, trains
on them by the loss below, publishes the weights as the next version, and samples from that one. The
tokens are those that were sampled; nothing is tokenised again. About a minute on two cores.
"""

import argparse
import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from cray_agents import Agent, Message, Platform, Run, local_platform
from cray_agents.testing import make_tiny_model
from cray_agents.training import Datum, Hyperparameters, ModelVersion

QUESTION = "Say something."
agent = Agent(name="e", model="own", instructions="", max_turns=1, max_tokens=12)


def reward(run: Run) -> float:
    """Return the share of an answer's letters that are e."""
    text = str(run.output or "")
    return text.count("e") / max(1, len(text))


def loss(logprobs: list[torch.Tensor], data: Sequence[Datum]) -> torch.Tensor:
    """Return a policy loss whose baseline is the mean of the others' rewards (leave one out)."""
    rewards = torch.tensor([(datum.advantages or [0.0])[0] for datum in data])
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    likelihood = torch.stack([row.sum() for row in logprobs])  # of each whole answer
    return -((rewards - others) * likelihood).mean()


def datum(run: Run) -> Datum:
    """Return a run's exact tokens: only those that the model sampled are trained on."""
    call = run.trajectory.turns[0].call
    assert call is not None
    prompt, sampled = call.prompt_token_ids, call.token_ids
    weights = [0.0] * len(prompt) + [1.0] * len(sampled)
    return Datum(
        token_ids=prompt + sampled, weights=weights, advantages=[reward(run)] * len(weights)
    )


async def sample(platform: Platform, version: ModelVersion, step: int) -> list[Run]:
    """Let a version answer 32 times."""
    able = agent.override(engine=platform.engine(), model=version.id, temperature=1.0)
    return await asyncio.gather(*(able.run(QUESTION, seed=100 * step + n) for n in range(32)))


async def main(seed: int, quick: bool) -> None:
    """Sample, train, publish; again and again."""
    home = Path(".cray-agents") / f"cookbook-11-{seed}"
    shutil.rmtree(home, ignore_errors=True)  # an earlier start's
    words: list[Message] = [{"role": "user", "content": QUESTION}]
    model = make_tiny_model(home / "model", [(words, {})], seed=seed)
    with local_platform(home, model=model, name=agent.model) as platform:
        version = await platform.version(f"{agent.model}@1")
        hyper = Hyperparameters(steps=1, seed=seed)
        session = await platform.training_session("own", parent=version.id, hyperparameters=hyper)
        for step in range(2 if quick else 30):
            async with platform.staged(version, holder="own-loss"):
                runs = await sample(platform, version, step)
            await session.forward_backward([datum(run) for run in runs], loss)
            await session.optim_step(learning_rate=2e-3)
            mean = sum(map(reward, runs)) / len(runs)
            print(f"{version.id}: reward {mean:.3f}, such as {runs[0].output!r}", flush=True)
            version = await session.publish(agent.model)
        await session.end()
        await platform.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    asyncio.run(main(given.seed, given.quick))
