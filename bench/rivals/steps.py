"""Training steps beside TRL's: SFT and GRPO on the same batches, tokens a second and memory.

Both sides have the same weights, sequences, order, optimizer, float32 and one thread, and the same
releases of torch and transformers: TRL is one of the tests' own packages. A round is four steps of
eight sequences; for grpo also the log-probabilities before them, which both sides compute. All
sides in turn, ROUNDS rounds. The first round is a check: its losses must agree, and it warms.
"""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.rivals.environments import ROOT, Rivals, version_of
from bench.rivals.report import Report
from bench.rivals.step_batches import BATCH, STEPS, round_of, tokens_of, write_model

ROUNDS = int(os.environ.get("CRAY_BENCH_ROUNDS", "3"))
HIDDEN, LAYERS, VOCABULARY, LONGEST = 320, 8, 4096, 1024
NAMES = {"ours": "cray-agents, packed", "trl": "TRL, packed", "trl-padded": "TRL, padded"}
OF_METHOD = {"sft": ("ours", "trl", "trl-padded"), "grpo": ("ours", "trl-padded")}
CLOSE = 1e-4  # nats: between losses of the same weights and tokens


@dataclass(frozen=True)
class StepsTaken:
    """A side's answer to a round."""

    seconds: float
    losses: list[float]
    peak_mib: float


class Side:
    """The process of a side."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def go(self) -> StepsTaken:
        """Take the next round. Raises RuntimeError with the end of its log if it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{self._log.stem} ended:\n{self._log.read_text()[-3000:]}")
        return StepsTaken(**json.loads(line))


@contextlib.contextmanager
def side(name: str, method: str, model: Path, vocabulary: int, longest: int) -> Iterator[Side]:
    """Start a side; it ends with the context."""
    log = model.parent / f"{name}-{method}.log"
    argv = ["bench.rivals.step_sides", name, method, model, vocabulary, longest]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, argv)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TRL_EXPERIMENTAL_SILENCE": "1",
            },
            text=True,
        )
    try:
        yield Side(process, log)
    finally:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


async def main(home: Path) -> None:
    """A table: a row a method."""
    await asyncio.to_thread(_measure, home)


def _measure(home: Path) -> None:
    packages = ("trl", "transformers", "torch", "megatron-core")
    rivals = Rivals(versions={name: version_of(Path(sys.executable), name) for name in packages})
    report = Report("steps", "Training steps beside TRL", ["method", "what", *NAMES.values()])
    parameters = write_model(home / "model", HIDDEN, LAYERS, VOCABULARY, LONGEST) / 1e6
    for method, names in OF_METHOD.items():
        with tempfile.TemporaryDirectory(dir=home), ExitStack() as stack:
            sides = {
                name: stack.enter_context(side(name, method, home / "model", VOCABULARY, LONGEST))
                for name in names
            }
            rounds = [{name: one.go() for name, one in sides.items()} for _ in range(ROUNDS + 1)]
        _add(report, method, rounds)
    report.notes += [
        f"A Qwen3 of {parameters:.1f}M parameters, float32, one thread; {STEPS} steps of {BATCH} "
        "sequences a round, the answers alone trained on. Tokens are those read, without padding. "
        f"Medians of {ROUNDS} rounds; in brackets the median of the rounds' ratios to ours. Memory "
        "is the most that the process has had in RAM, its libraries included.",
        "TRL packed is its `padding_free`, with torch's attention: `flash-attn` is for GPUs. "
        "GRPOTrainer has no such way: it pads prompts and answers, here to the longest of a round. "
        "It takes no batches that others made either, so it got the same prompts and answers "
        "through its `rollout_func`, in our order, for which its shuffle is replaced. Rewards, "
        "advantages, log-probabilities before and the loss (`bnpo`) are its own.",
    ]
    report.publish(rivals)


def _add(report: Report, method: str, rounds: list[dict[str, StepsTaken]]) -> None:
    """The rows of a method. The first round warms, and with its losses is a check."""
    apart = max(difference(answers) for answers in rounds)
    if difference(rounds[0]) > CLOSE:
        raise RuntimeError(f"{method}: losses of the same tokens differ by {apart}: {rounds[0]}")
    rates: dict[str, list[float]] = {name: [] for name in rounds[0]}
    for number, answers in enumerate(rounds[1:], 1):
        tokens = tokens_of(round_of(number, VOCABULARY, LONGEST))
        for name, answer in answers.items():
            rates[name].append(tokens / answer.seconds)
    speeds, peaks = [], []
    for name in NAMES:
        if name not in rates:
            speeds.append("has none")
            peaks.append("")
            continue
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates["ours"], strict=True))
        speeds.append(f"{statistics.median(rates[name]):,.0f} ({ratio:.2f})")
        peaks.append(f"{rounds[-1][name].peak_mib:,.0f}")
    report.add(method, "tokens/s", *speeds)
    report.add(method, "peak memory, MiB", *peaks)
    report.notes.append(
        f"{method}: losses of the sides after the same steps differ by {apart:.1e} at most, over "
        f"{len(rounds) * STEPS} steps."
    )


def difference(answers: dict[str, StepsTaken]) -> float:
    """The largest difference of a round's losses from ours."""
    ours = answers["ours"].losses
    return max(
        abs(mine - theirs)
        for answer in answers.values()
        for mine, theirs in zip(ours, answer.losses, strict=True)
    )
