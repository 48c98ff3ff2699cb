"""The benchmark's table for BENCHMARKS.md, and its picture, from the results."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = {
    "base": "SmolLM2-135M-Instruct",
    "rft": "cray-agents, rft",
    "grpo": "cray-agents, grpo",
    "examples": "cray-agents, examples, no training",
    "examples-rft": "cray-agents, examples, then rft",
    "trl": "TRL GRPOTrainer",
    "dspy": "DSPy, bootstrapped examples",
    "control": "rft, shuffled rewards",
}
COLOURS = {
    "base": "#8c959f", "rft": "#0969da", "grpo": "#54aeff", "examples": "#1a7f37",
    "examples-rft": "#4ac26b", "trl": "#bf8700", "dspy": "#8250df", "control": "#d0d7de"
}  # fmt: skip
IN_ROW = 4  # names of arms above the picture
Marks = dict[str, str]


def publish(results: Path, picture: Path) -> None:
    """Print the tables and draw the picture."""
    arms = _arms(results)
    if "base" not in arms:
        raise SystemExit(f"{results} has no base.json yet: `make bench ARGS='bfcl base'`")
    print("\n".join([*table(arms), "", *categories(results)]))
    picture.write_text(draw(arms))


def _arms(results: Path) -> dict[str, list[dict[str, Any]]]:
    """The results of each kind of arm, by their seeds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        for file in sorted([*results.glob(f"{kind}.json"), *results.glob(f"{kind}-[0-9]*.json")]):
            found.setdefault(kind, []).append(json.loads(file.read_text()))
    return found


def table(arms: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A row a kind of arm, with the mean of its seeds and its interval, and one for each seed."""
    names = [*arms["base"][0]["right"]]
    lines = [
        "| arm | " + " | ".join(names) + " | minutes | promoted |",
        "|---" * (len(names) + 3) + "|",
    ]
    before = arms["base"][0]["right"]
    for kind, runs in arms.items():
        cells = []
        for name in names:
            marks = [run["right"][name] for run in runs]
            mean, low, high = interval(marks)
            cell = f"{mean:.3f} ({low:.2f} to {high:.2f})"
            if kind != "base":
                change, error = difference(marks, before[name])
                cell += f", {change:+.3f} ± {error:.3f}"
            cells.append(cell)
        seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
        minutes = ", ".join(f"{run.get('seconds', 0) / 60:.0f}" for run in runs)
        kept = ", ".join(promoted(run) for run in runs)
        lines.append(f"| {KINDS[kind]}{seeds} | {' | '.join(cells)} | {minutes} | {kept} |")
        for run in runs if len(runs) > 1 else []:
            alone = [f"{interval([run['right'][name]])[0]:.3f}" for name in names]
            lines.append(f"| seed {run['seed']} | {' | '.join(alone)} | | |")
    sizes = ", ".join(f"{name} {len(before[name])}" for name in names)
    return [*lines, "", f"Tests: {sizes}. In brackets: 95 % intervals over tasks."]


def promoted(run: dict[str, Any]) -> str:
    """The number of versions that a loop promoted; if it is 0, its marks are the base's."""
    learned = [each["promoted"] for each in run.get("iterations", ())[1:]]
    return f"{sum(learned)} of {len(learned)}" if learned else "-"


def categories(results: Path) -> list[str]:
    """All single-turn categories, of base and best."""
    file = results / "categories.json"
    if not file.exists():
        return []
    right = json.loads(file.read_text())["right"]
    lines = [f"| category | tests | {' | '.join(right)} |", "|---" * (len(right) + 2) + "|"]
    for name, marks in sorted(right["base"].items()):
        cells = ["{:.3f} ({:.2f} to {:.2f})".format(*interval([of[name]])) for of in right.values()]
        lines.append(f"| {name} | {len(marks)} | {' | '.join(cells)} |")
    return lines


def interval(marks: Sequence[str]) -> tuple[float, float, float]:
    """The mean over tasks and seeds, and Wilson's interval of 95 % for this number of tasks."""
    n, z = len(marks[0]), 1.96
    mean = sum(text.count("1") for text in marks) / (n * len(marks))
    middle = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return mean, max(0.0, middle - half), min(1.0, middle + half)


def difference(marks: Sequence[str], before: str) -> tuple[float, float]:
    """The mean paired difference to the base, and 1.96 standard errors over tasks."""
    changes = [
        sum(text[place] == "1" for text in marks) / len(marks) - (was == "1")
        for place, was in enumerate(before)
    ]
    n, mean = len(changes), sum(changes) / len(changes)
    spread = math.sqrt(sum((each - mean) ** 2 for each in changes) / max(n - 1, 1))
    return mean, 1.96 * spread / math.sqrt(n)


def draw(arms: dict[str, list[dict[str, Any]]]) -> str:
    """The picture: a group of bars for each category, a bar with its interval for each arm."""
    names, height, bar = [*arms["base"][0]["right"]], 180, 22
    top = 24 + 16 * math.ceil(len(arms) / IN_ROW)
    group = bar * len(arms) + 30
    width = 60 + group * len(names)
    lines = []
    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = top + height * (1 - mark)
        lines.append(
            f'<path d="M40 {y} H{width - 10}" stroke="#d0d7de" stroke-width="0.5"/>'
            f'<text x="34" y="{y + 4}" text-anchor="end">{mark:g}</text>'
        )
    for place, name in enumerate(names):
        left = 50 + group * place
        for number, (kind, runs) in enumerate(arms.items()):
            mean, low, high = interval([run["right"][name] for run in runs])
            x, y = left + bar * number, top + height * (1 - mean)
            middle, ends = x + bar / 2 - 2, [top + height * (1 - end) for end in (high, low)]
            lines.append(
                f'<rect x="{x}" y="{y:.1f}" width="{bar - 4}" height="{height * mean:.1f}" '
                f'fill="{COLOURS[kind]}"/>'
                f'<path d="M{middle} {ends[0]:.1f} V{ends[1]:.1f}" stroke="#24292f"/>'
            )
        lines.append(
            f'<text x="{left + bar * len(arms) / 2 - 2}" y="{top + height + 18}" '
            f'text-anchor="middle">{name}</text>'
        )
    for number, kind in enumerate(arms):
        x, y = 50 + 210 * (number % IN_ROW), 12 + 16 * (number // IN_ROW)
        lines.append(
            f'<rect x="{x}" y="{y}" width="10" height="10" fill="{COLOURS[kind]}"/>'
            f'<text x="{x + 14}" y="{y + 9}">{KINDS[kind]}</text>'
        )
    wide = max(width, 60 + 210 * IN_ROW)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {top + height + 30}" '
        'font-family="sans-serif" font-size="11" fill="#24292f">\n'
        f'<rect width="{wide}" height="{top + height + 30}" fill="white"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )
