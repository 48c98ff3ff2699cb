"""04: chats that you have, as training sets, and the usual fine-tunes: SFT, LoRA, DPO, KTO.

    python cookbook/04_fine_tuning.py [FOLDER] [--seed N]    FOLDER: default ./tuning-demo

No platform, no GPU, about a minute on two cores. A tiny model, made here, is to answer for a hotel.
It does what you would type: each command is shown before it runs, and with a model and files of
yours the commands are the same. One chat asks what a benchmark asks: it is left out of the training
set, and counted. What is printed at the end was measured on conversations that were kept apart. Run
it again: every job is found finished, and trains 0 steps.

What needs the model's own samples (GRPO, rejection sampling) needs a platform that serves it: see
02_calculator_loop.py.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cray_agents.testing import make_tiny_model

CITIES = ["Oslo", "Bern", "Rome", "Lima", "Cairo", "Quito", "Tunis", "Seoul", "Riga", "Accra"]
MONTHS = ["January", "February", "March", "April", "May", "June"]
MONTHS += ["July", "August", "September", "October", "November", "December"]
BENCHMARK = "A room in Lima in January?"

STEPS = 32  # of each job


# ---- the data: one JSON object a line, as OpenAI's fine-tuning takes them
def asked(months: list[str]) -> dict[str, tuple[str, str]]:
    """Questions, and the city and month of each. Each file has its own: a run is what was said."""
    return {f"A room in {city} in {month}?": (city, month) for city in CITIES for month in months}


def polite(city: str, month: str) -> str:
    """How the hotel answers."""
    return f"Yes, {city} has a room in {month}."


def rude(city: str, month: str) -> str:
    """How it must not."""
    return f"Look it up yourself. {month}, {city}, whatever."


def spanish(city: str, month: str) -> str:
    """What it is to learn after that."""
    return f"Hay sitio en {city}, {month}."


def said(role: str, text: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": text}


def chat(question: str, answer: str) -> dict[str, Any]:
    """A conversation: of the SFT file, or one that got a thumb."""
    return {"messages": [said("user", question), said("assistant", answer)]}


def pair(question: str, better: str, worse: str) -> dict[str, Any]:
    """Two answers, one of which was preferred."""
    return {
        "input": {"messages": [said("user", question)]},
        "preferred_output": [said("assistant", better)],
        "non_preferred_output": [said("assistant", worse)],
    }


def write(file: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """JSON lines."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


# ---- the commands
def cray_agents(*words: object, answers: bool = False) -> Any:
    """Show a command and run it; with `answers`, what it prints as JSON."""
    argv = [str(word) for word in words]
    print(f"\n$ cray-agents {shlex.join(argv)}", flush=True)
    command = [sys.executable, "-P", "-m", "cray_agents", *argv]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE if answers else None).stdout
    return json.loads(out) if answers else None


@dataclass(frozen=True)
class Shop:
    """Where everything is: the shared root, and the model whose tokenizer the datasets are for."""

    root: Path
    model: Path
    seed: int = 0

    def dataset(self, loop: str, method: str, *more: object) -> str:
        """A training set of what was imported, a quarter of the questions kept apart; its id."""
        what = ("--where", f"loop={loop}", "--method", method, "--set", "validation=0.25", *more)
        how = ("--set", "render=true", "--tokenizer", self.model, "--home", self.root)
        made = cray_agents("dataset", "build", *what, *how, "--json", answers=True)
        counts = {split: count["samples"] for split, count in made["splits"].items()}
        print(f"{loop}: {made['id']} for {method}, samples: {counts}", flush=True)
        return str(made["id"])

    def train(self, parent: object, dataset: str, *more: object) -> "Trained":
        """A fine-tune, to its end; one rank is enough for a model this small."""
        what = ("--parent", parent, "--dataset", dataset, "--steps", STEPS, *more)
        what += ("--set", f"seed={self.seed}") if self.seed else ()
        how = ("--layout", "data=1", "--home", self.root)
        job = cray_agents("jobs", "submit", *what, *how, "--json", answers=True)
        events = (self.root / "jobs" / job["id"] / "events.jsonl").read_text().splitlines()
        held_out = [e for e in map(json.loads, events) if e["event"] == "evaluation"]
        return Trained(self.root / "checkpoints" / job["checkpoint"], held_out[0], held_out[-1])


@dataclass(frozen=True)
class Trained:
    """The weights, as a Hugging Face directory; what was kept apart, before and after."""

    weights: Path
    first: dict[str, Any]
    last: dict[str, Any]


def main(folder: Path, seed: int = 0) -> None:
    """Make a model and data, train in four ways, say what came of it."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    root, model = folder / "root", folder / "model"
    home = ("--home", root)
    first, second, third = (asked(MONTHS[n : n + 4]).items() for n in (0, 4, 8))

    # Any Hugging Face directory of a Llama, Mistral, Mixtral, Qwen2 or Qwen3 will do. This one has
    # random weights: as `--init random` gives them to any config.json, to train from scratch.
    styles = (polite, spanish, rude)
    words = [chat(q, style(*of)) for q, of in asked(MONTHS).items() for style in styles]
    make_tiny_model(model, [(each["messages"], {}) for each in words], seed=seed)
    shop = Shop(root, model, seed)

    # SFT: conversations to imitate, all of them worth a reward of 1. The result becomes bot@1
    chats = write(folder / "chats.jsonl", [chat(q, polite(*of)) for q, of in first])
    cray_agents("import", chats, "--format", "openai", "--loop", "chats", "--reward", 1, *home)
    cray_agents("runs", "stats", "--by", "agent,model", *home)
    benchmark = folder / "benchmark.txt"
    benchmark.write_text(BENCHMARK + "\n")
    fast = ("--set", "learning_rate=2e-3", "--name", "bot")
    sft = shop.train(model, shop.dataset("chats", "sft", "--held-out", benchmark), *fast)

    # LoRA: adapters learn, the weights stay. The result is adapter/ alone, which PEFT and vLLM load
    # over bot@1
    more = write(folder / "spanish.jsonl", [chat(q, spanish(*of)) for q, of in first])
    cray_agents("import", more, "--format", "openai", "--loop", "spanish", "--reward", 1, *home)
    adapters = ("--lora-rank", 8, "--set", "lora.alpha=16", "--set", "learning_rate=1e-2")
    lora = shop.train("bot@1", shop.dataset("spanish", "sft"), *adapters)

    # DPO: of two answers the better one. The reference is the parent
    pairs = write(folder / "pairs.jsonl", [pair(q, polite(*of), rude(*of)) for q, of in second])
    cray_agents("import", pairs, "--format", "openai", "--loop", "pairs", *home)
    gently = ("--set", "learning_rate=2e-4", "--set", "preference.beta=0.1")
    dpo = shop.train("bot@1", shop.dataset("pairs", "dpo"), *gently)

    # KTO: single answers with a thumb up or down, here one for every other question
    for thumb, style, reward in (("up", polite, 1), ("down", rude, 0)):
        rated = list(third)[1 - reward :: 2]
        thumbs = write(folder / f"thumbs-{thumb}.jsonl", [chat(q, style(*of)) for q, of in rated])
        form = ("--format", "openai", "--loop", "thumbs", "--reward", reward)
        cray_agents("import", thumbs, *form, *home)
    kto = shop.train("bot@1", shop.dataset("thumbs", "kto"), *gently)

    # The same conversations in formats that other tools read; no folder is overwritten
    what = ("--format", "trl", "--where", "loop=chats")
    cray_agents("export", *what, "-o", folder / "chats.trl.jsonl", *home)
    shutil.rmtree(folder / "huggingface", ignore_errors=True)
    cray_agents("export", "--format", "huggingface", "-o", folder / "huggingface", *home)
    cray_agents("maintain", "fsck", *home)

    tell([("sft", sft), ("lora", lora), ("dpo", dpo), ("kto", kto)])


# ---- what came of it
def tell(jobs: list[tuple[str, Trained]]) -> None:
    """A table of what was measured on the questions that were kept apart."""
    print(f"\n{'job':<6}{'measured':<10}{'before':>9}{'after':>9}  weights")
    for job, trained in jobs:
        (what, first), (_, last) = measured(trained.first), measured(trained.last)
        print(f"{job:<6}{what:<10}{first:>9.3f}{last:>9.3f}  {trained.weights}")


def measured(event: dict[str, Any]) -> tuple[str, float]:
    """By how much the better answers are above the worse ones; where there are none, the loss."""
    if "desirable_reward" in event:  # kto
        return "margin", event["desirable_reward"] - event["undesirable_reward"]
    return (
        ("margin", event["reward_margin"]) if "reward_margin" in event else ("loss", event["loss"])
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("tuning-demo"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("on two cores that do nothing else: about a minute", file=sys.stderr)
    main(given.folder, given.seed)
