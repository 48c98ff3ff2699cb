"""The benchmark's table for BENCHMARKS.md, and its picture, from the results."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cray_agents import Examples

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
#: The arms of the picture: their colour, and what a line of theirs is.
CURVES = {
    "control": ("#8c959f", "with shuffled rewards"),
    "rft": ("#0969da", "RFT, a line a seed"),
}
TOP = 0.5  # of the axis of success
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
        "| arm | " + " | ".join(names) + " | minutes | promoted | calls for examples |",
        "|---" * (len(names) + 4) + "|",
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
        calls = ", ".join(calls_for_examples(kind, run) for run in runs)
        row = [f"{KINDS[kind]}{seeds}", *cells, minutes, kept, calls]
        lines.append(f"| {' | '.join(row)} |")
        for run in runs if len(runs) > 1 else []:
            alone = [f"{interval([run['right'][name]])[0]:.3f}" for name in names]
            lines.append(f"| seed {run['seed']} | {' | '.join(alone)} | | | |")
    sizes = ", ".join(f"{name} {len(before[name])}" for name in names)
    return [*lines, "", f"Tests: {sizes}. In brackets: 95 % intervals over tasks."]


def promoted(run: dict[str, Any]) -> str:
    """The number of versions that a loop promoted; if it is 0, its marks are the base's."""
    learned = [each["promoted"] for each in run.get("iterations", ())[1:]]
    return f"{sum(learned)} of {len(learned)}" if learned else "-"


def calls_for_examples(kind: str, run: dict[str, Any]) -> str:
    """The model calls by which an arm chose its examples: one a run, of training and of trials.

    Results from before trials were recorded have the most that the method's settings allow.
    """
    if not kind.startswith("examples"):
        return str(run.get("calls", "-"))
    chosen, method = run["iterations"][1], Examples(iterations=1)
    if (trials := chosen.get("trials")) is None:
        return f"at most {chosen['runs'] + method.sets * method.trials}"
    return str(chosen["runs"] + trials)


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
    """The picture: held-out success of each iteration's version, a line for each loop of CURVES."""
    width, height, left, top = 640, 240, 50, 36
    curves = {kind: [run["iterations"] for run in arms.get(kind, ()) if "iterations" in run]
              for kind in CURVES}  # fmt: skip
    last = max((len(each) for runs in curves.values() for each in runs), default=2) - 1

    def y(success: float) -> float:
        return top + height * (1 - success / TOP)

    def x(iteration: int) -> float:
        return left + (width - 20) * iteration / last

    lines = []
    for tenth in range(round(TOP * 10) + 1):
        at = y(tenth / 10)
        lines.append(
            f'<path d="M{left} {at:.1f} h{width}" stroke="#d0d7de" stroke-width="0.5"/>'
            f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{tenth / 10:g}</text>'
        )
    for iteration in range(last + 1):
        lines.append(f'<text x="{x(iteration):.1f}" y="{top + height + 18}" '
                     f'text-anchor="middle">{iteration}</text>')  # fmt: skip
    for number, (kind, runs) in enumerate(curves.items()):
        colour, name = CURVES[kind]
        for iterations in runs:
            points = [(x(n), y(each["holdout_success"])) for n, each in enumerate(iterations)]
            trace = " ".join(f"{across:.1f},{up:.1f}" for across, up in points)
            lines.append(f'<polyline points="{trace}" fill="none" stroke="{colour}"/>')
            for (across, up), each in zip(points, iterations, strict=True):
                fill = colour if each["promoted"] else "white"
                lines.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.5" fill="{fill}" '
                             f'stroke="{colour}"/>')  # fmt: skip
        start = left + 200 * number
        lines.append(
            f'<path d="M{start} 16 h22" stroke="{colour}"/>'
            f'<text x="{start + 28}" y="20">{name}</text>'
        )
    lines.append(
        f'<circle cx="{left + 406}" cy="16" r="3.5" fill="#24292f"/>'
        f'<text x="{left + 416}" y="20">promoted</text>'
        f'<text x="{left + width / 2}" y="{top + height + 38}" text-anchor="middle">'
        "right answers to held-out tasks, by iteration</text>"
    )
    wide, high = left + width + 10, top + height + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="13" fill="#24292f">\n'
        f'<rect width="{wide}" height="{high}" fill="white"/>\n' + "\n".join(lines) + "\n</svg>\n"
    )
