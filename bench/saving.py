"""Training time lost to a resume point, written in the background and waited for, and to versions.

A job publishes these while it trains: its steps a second beside those of one that does not.
"""

import itertools
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.rounds import ROUNDS, row, side_by_side
from bench.training import HYPER, start_job, write_job
from cray_agents.paths import Home
from cray_agents.training_jobs import Hyperparameters, Layout, PublishEvery

SIZES: dict[str, dict[str, int]] = {
    "10M": {"hidden_size": 256, "num_hidden_layers": 10, "intermediate_size": 896},
    "100M": {"hidden_size": 640, "num_hidden_layers": 16, "intermediate_size": 2304},
}
TOKENS = 256  # in a sequence; one sequence a step
STEPS, EVERY = 200, 50  # of a job, and between its versions


def model(name: str, folder: Path) -> Path:
    """The config of a Qwen3 of about that many parameters."""
    from transformers import Qwen3Config

    heads = SIZES[name]["hidden_size"] // 64
    Qwen3Config(
        **SIZES[name],
        vocab_size=8192 if name == "10M" else 16384,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=2 * TOKENS,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return folder


def measure(parent: Path, folder: Path, rank: int, store: Any, stop: Any) -> int:
    """In a rank: take turns at waiting for a point and not, and write the seconds down."""
    import torch

    from cray_agents.trainers.checkpointing.save import Saver
    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    torch.set_num_threads(1)
    layout, hyper = (
        Layout(),
        Hyperparameters(learning_rate=1e-3, steps=10**6, batch_size=1, init="random"),
    )
    join_ranks(layout, rank, 1, store, on_cpu=True)
    training = RankTraining(read_architecture(parent), layout, hyper, parent, on_cpu=True)
    random = np.random.default_rng(0)
    known = BaselineLogprobs(
        Samples.of([random.integers(0, 8192, TOKENS).tolist() for _ in range(16)])
    )
    points: list[int] = []
    saver = Saver(training, folder, 1, 1, lambda: True, lambda step, _: points.append(step))
    found: dict[str, list[float]] = {"waited": [], "blocked": [], "step": [], "beside": []}

    def timed(what: str, act: Any) -> float:
        begun = time.perf_counter()
        act()
        seconds = time.perf_counter() - begun
        found.setdefault(what, []).append(seconds)
        return seconds

    timed("first step", lambda: training.step(known))
    timed("first", lambda: (saver.save({}), saver.finish()))
    for number in range(ROUNDS):
        timed("step", lambda: training.step(known))
        timed("waited", lambda: (saver.save({}), saver.finish()))
        training.step(known)
        blocked = timed("save", lambda: saver.save({}))
        while len(points) < 3 + 2 * number:
            timed("beside", lambda: training.step(known))
            blocked += timed("poll", saver.poll)
        found["blocked"].append(blocked)
    found["parameters"] = [sum(p.numel() for p in training.chunks[0].parameters())]
    (folder / "seconds.json").write_text(json.dumps(found))
    return 0


async def main(home: Path) -> None:
    """A row for each size: medians of rounds that take turns, and the median of their ratios."""
    from cray_agents.trainers.job.launch import find_placement, run_ranks
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import train_step  # noqa: F401  (loaded before the fork)

    load_megatron()
    for name in SIZES:
        folder = home / name
        work = partial(measure, model(name, folder / "model"), folder)
        run_ranks(find_placement(1, "bench"), folder / "logs", work)
        found = json.loads((folder / "seconds.json").read_bytes())
        pairs = zip(found["blocked"], found["waited"], strict=True)
        ratio = statistics.median(blocked / waited for blocked, waited in pairs)
        blocked, waited, step, beside = (
            1000 * statistics.median(found[what])
            for what in ("blocked", "waited", "step", "beside")
        )
        what = f"resume point of {found['parameters'][0] / 1e6:,.1f}M parameters"
        of = "training blocked / waited for"
        print(f"| {what} | {of} | {blocked:,.0f} / {waited:,.0f} ms | {ratio:.3f} |", flush=True)
        row("", "a step / a step while a point is written", f"{step:,.0f} / {beside:,.0f} ms")
    parent, numbers = home / "10M" / "model", itertools.count()

    async def speed(every: PublishEvery | None) -> float:
        """The steps a second of a job, from its first step's end to its last one's."""
        hyper = HYPER.model_copy(update={"steps": STEPS, "batch_size": 1})
        place = Home(home / f"publishing-{next(numbers)}")
        more = {"hyperparameters": hyper, "publish_every": every, "save_every": STEPS}
        journal = write_job(place, parent, **more)
        assert start_job(journal).wait() == 0, journal.status()
        assert len(journal.versions) == (STEPS // EVERY - 1 if every else 0), journal.warnings
        times = [event["time"] for event in journal.events() if event["event"] == "step"]
        return (len(times) - 1) / (times[-1] - times[0])

    sides = {
        f"a version each {EVERY} steps": partial(speed, PublishEvery(name="m", steps=EVERY)),
        "none": partial(speed, None),
    }
    await side_by_side("training 10M parameters", "steps/s", sides)
