"""The trainer's speed on the CPU, against a plain transformers loop with torch's AdamW.

Every side is a process of its own (`python -m bench.training <side> <folder>`), one thread a
rank, float32, the same model and the same sequences in the same order. It gets ready and takes a
step, and then, for each line it reads, takes some more and writes how many tokens a second it
trained on. Equal sequences are as good as packed for transformers too; ragged ones it must pad.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.rounds import ROUNDS, Measure, row, side_by_side
from cray_agents.paths import Home
from cray_agents.runtime.disk import durable
from cray_agents.trainers.checkpointing.hf_export import parent_sha256
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import Backend, Hyperparameters, JobSpec, Layout

VOCAB, TOKENS, BATCH = 4096, 256, 8  # the vocabulary; of a sequence, in the mean; sequences a step
STEPS = 3  # in a measurement
PROMPT, ANSWER = 400, 32  # tokens of a prompt, and of an answer to it
QUESTION = 100  # tokens of a prompt after those that all have in common
HYPER = Hyperparameters(steps=10**6, batch_size=BATCH, learning_rate=1e-4, init="random")


async def main(home: Path) -> None:
    """Equal sequences, ragged ones, two data ranks, and the start of a job."""
    parameters = write_model(home / "model") / 1e6
    what = f"training {parameters:.1f}M parameters, {BATCH} x {TOKENS} tokens a step"
    with Side("trainer", home) as ours, Side("transformers", home) as theirs:
        sides: dict[str, Measure] = {"trainer": ours.speed, "transformers": theirs.speed}
        await side_by_side(what, "tokens/s", sides)
    for shape, lengths in (("uniform", "16 to 496"), ("chats", "16 to 1,024, median 180")):
        with Side(f"trainer-{shape}", home) as ours, Side(f"transformers-{shape}", home) as theirs:
            sides = {"trainer, packed": ours.speed, "transformers, padded": theirs.speed}
            await side_by_side(f"the same, {lengths} tokens a sequence", "tokens/s", sides)
    with (
        Side("backend-chats", home) as ours,
        Side("trainer-chats", home) as megatron,
        Side("transformers-chats", home) as theirs,
    ):
        sides = {
            "backend=transformers, packed": ours.speed,
            "backend=megatron, packed": megatron.speed,
            "transformers, padded": theirs.speed,
        }
        await side_by_side("the same, chats, both backends", "tokens/s", sides)
    for shape, to in (
        ("groups", f"a prompt of {PROMPT}: the prompt"),
        ("systems", f"prompts of {PROMPT}, {PROMPT - QUESTION} in common: these"),
    ):
        with Side(f"trainer-{shape}", home) as ours, Side(f"trainer-{shape}-each", home) as theirs:
            sides = {"once": ours.speed, "with each answer": theirs.speed}
            what = f"the same, {BATCH} answers of {ANSWER} tokens to {to}"
            await side_by_side(what, "tokens of answers/s", sides)
    with Side("trainer-two", home) as ours, Side("trainer", home) as theirs:
        sides = {"two data ranks": ours.speed, "one": theirs.speed}
        await side_by_side("the same, equal", "tokens/s", sides)
    started = statistics.median(start_of_a_job(home, number) for number in range(ROUNDS))
    row("a job of this model", "process start to first step done", f"{started:.1f} s")


def write_model(folder: Path) -> int:
    """The config of a Qwen3; returns how many parameters it has."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=320,
        num_hidden_layers=8,
        intermediate_size=896,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=4 * TOKENS,
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder)
    network = AutoModelForCausalLM.from_config(config)
    network.save_pretrained(folder)
    return int(network.num_parameters())


def sequences(shape: str) -> list[list[int]]:
    """The data, 8 steps of it: sequences of one length, `uniform` ones, or such as chats have."""
    random, count = np.random.default_rng(0), 8 * BATCH
    sizes = {
        "equal": np.full(count, TOKENS),
        "uniform": random.integers(16, 2 * TOKENS - 15, count),
        "chats": np.exp(random.normal(np.log(180), 0.8, count)).clip(16, 4 * TOKENS),
        "groups": np.full(count, ANSWER),
        "systems": np.full(count, QUESTION + ANSWER),
    }[shape]
    if shape in ("groups", "systems"):
        number, first = (count // BATCH, PROMPT) if shape == "groups" else (1, PROMPT - QUESTION)
        begin = random.integers(0, VOCAB, (number, first)).tolist()
        ends = [random.integers(0, VOCAB, size).tolist() for size in sizes]
        return [begin[place // BATCH % number] + end for place, end in enumerate(ends)]
    # the last token is only ever a target
    return [random.integers(0, VOCAB, int(size) + 1).tolist() for size in sizes]


class Side:
    """A process that trains when asked to. Use as a context manager."""

    def __init__(self, name: str, home: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.training", name, str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        self._read()

    def _read(self) -> float:
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    async def speed(self) -> float:
        """Tokens trained on per second, over the next steps."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return await asyncio.to_thread(self._read)

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# ---- in the processes
def serve(
    step: Callable[[], int], out: int, agree: Callable[[Any], Any] = lambda value: value
) -> None:
    """Take a step, then some for each line of stdin; rank 0 writes their tokens a second."""
    main_rank = agree(os.getpid()) == os.getpid()

    def timed(steps: int) -> None:
        begun = time.perf_counter()
        tokens = sum(step() for _ in range(steps))
        if main_rank:
            os.write(out, f"{tokens / (time.perf_counter() - begun)}\n".encode())

    timed(1)
    while agree(sys.stdin.readline() if main_rank else None):
        timed(STEPS)


def trainer(
    home: Path, ranks: int, shape: str, backend: Backend = "megatron", *, share: bool = True
) -> None:
    """Our side: ranks forked as a job forks them."""
    from cray_agents.trainers.job.launch import find_placement, run_ranks
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import train_step  # noqa: F401  (loaded before the fork)

    load_megatron()
    layout, out = Layout(data=ranks), os.dup(1)
    work = partial(trainer_rank, home / "model", layout, shape, backend, share, out)
    run_ranks(find_placement(ranks, "bench"), home / "logs", work)


def trainer_rank(
    parent: Path,
    layout: Layout,
    shape: str,
    backend: Backend,
    share: bool,
    out: int,
    rank: int,
    store: Any,
    stop: Any,
) -> int:
    """One of them."""
    import torch

    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.training.parallel_groups import broadcast_from_rank0, join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    torch.set_num_threads(1)
    join_ranks(layout, rank, layout.world, store, on_cpu=True)
    hyper = HYPER if backend == "megatron" else HYPER.model_copy(update={"init": "parent"})
    training = RankTraining(read_architecture(parent, backend), layout, hyper, parent, on_cpu=True)
    training.shares_prompts &= share
    rows = sequences(shape)
    samples = Samples.of(rows)
    if shape in ("groups", "systems"):
        mask = (np.arange(PROMPT + ANSWER) >= PROMPT).astype(np.float32)
        samples = Samples.of(rows, [mask] * len(rows)).grouped()
    known = BaselineLogprobs(samples)
    serve(lambda: training.step(known).tokens, out, broadcast_from_rank0)
    return 0


def transformers(home: Path, shape: str) -> None:
    """The other side: what its documentation's loop comes to, with nothing computed in vain."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoConfig, AutoModelForCausalLM

    from cray_agents.trainers.data.packer import step_units

    torch.set_num_threads(1)
    data = [torch.tensor(row) for row in sequences(shape)]
    config = AutoConfig.from_pretrained(home / "model")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    adam = torch.optim.AdamW(model.parameters(), lr=HYPER.learning_rate, betas=(0.9, 0.95))
    done = iter(range(HYPER.steps))

    def step() -> int:
        chosen = [data[i] for i in step_units(HYPER, next(done), np.ones(len(data)))]
        ids = pad_sequence([row[:-1] for row in chosen], batch_first=True)
        labels = pad_sequence([row[1:] for row in chosen], batch_first=True, padding_value=-100)
        mask = None if shape == "equal" else (labels >= 0).long()
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), HYPER.clip_grad)
        adam.step()
        return int((labels >= 0).sum())

    serve(step, 1)


def start_of_a_job(home: Path, number: int) -> float:
    """Seconds from a job's process to its first step."""
    home = home / f"start-{number}"
    journal = write_job(Home(home), home.parent / "model")
    begun = time.perf_counter()
    job = start_job(journal)
    while not any(event["event"] == "step" for event in journal.events()):
        assert job.poll() is None, journal.log_tail()
        time.sleep(0.01)
    seconds = time.perf_counter() - begun
    job.terminate()
    job.wait()
    return seconds


def start_job(journal: JobJournal) -> "subprocess.Popen[bytes]":
    """The process of a job, with one thread a rank."""
    return subprocess.Popen(
        [sys.executable, "-m", "cray_agents.trainers.job.job", str(journal.folder / "spec.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def write_job(home: Home, parent: Path, **changes: Any) -> JobJournal:
    """A job over the same sequences, ready to be run. `changes`: of its spec's fields."""
    rows = sequences("equal")
    folder = home.dataset("bench")
    folder.mkdir(parents=True)
    path = folder / "train-00000.parquet"
    columns = {
        "input_ids": pa.array(rows, pa.list_(pa.int32())),
        "loss_mask": pa.array([[1] * len(row) for row in rows], pa.list_(pa.int8())),
        "weight": pa.array([1.0] * len(rows), pa.float64()),
    }
    pq.write_table(pa.table(columns), path)
    files = {path.name: {"sha256": durable.sha256_file(path)}}
    (folder / "manifest.json").write_text(json.dumps({"method": "sft", "files": files}))
    fields: dict[str, Any] = {
        "dataset": "bench",
        "parent": str(parent),
        "parent_sha256": parent_sha256(parent, "random"),
        "hyperparameters": HYPER,
    }
    spec = JobSpec(**fields | changes)
    journal = JobJournal(home, spec.id)
    journal.write_spec(spec)
    return journal


SIDES: dict[str, Callable[[Path], None]] = {
    "trainer": partial(trainer, ranks=1, shape="equal"),
    "trainer-two": partial(trainer, ranks=2, shape="equal"),
    "backend-chats": partial(trainer, ranks=1, shape="chats", backend="transformers"),
    "transformers": partial(transformers, shape="equal"),
    **{
        f"trainer-{shape}": partial(trainer, ranks=1, shape=shape)
        for shape in ("uniform", "chats", "groups", "systems")
    },
    **{
        f"trainer-{shape}-each": partial(trainer, ranks=1, shape=shape, share=False)
        for shape in ("groups", "systems")
    },
    **{
        f"transformers-{shape}": partial(transformers, shape=shape)
        for shape in ("uniform", "chats")
    },
}

if __name__ == "__main__":
    SIDES[sys.argv[1]](Path(sys.argv[2]))
