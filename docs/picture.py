"""Pictures: the processes; what things are made of what; a loop's steps, with one demo's success.

.venv/bin/python docs/picture.py    writes docs/{processes,things}.svg, docs/loop.svg of demo.json
"""

import json
from collections.abc import Sequence
from pathlib import Path

Box = tuple[int, int, str, str]
Arrow = tuple[str, str, tuple[int, int], str]
HERE = Path(__file__).parent
STEPS = ("collect", "score", "build", "train", "check", "evaluate", "promote")
INK, LINE, CURVE = "#24292f", "#8c959f", "#0969da"


#: Left, top, and the two lines of each box.
PROCESSES = (
    (20, 20, "your agent, any client", "Python, OpenAI's API"),
    (290, 20, "gateway", "APIs, keys, versions"),
    (560, 20, "vLLM servers", "here, or Slurm jobs"),
    (290, 130, "shared root", "runs, datasets, versions"),
    (560, 130, "trainer", "Megatron-core"),
)
#: An arrow's path, its head, and the place and text of its caption.
MESSAGES = (
    ("M200 43 h82", "l-7 -5 m7 5 l-7 5", (241, 36), "requests"),
    ("M470 43 h82", "l-7 -5 m7 5 l-7 5", (511, 36), "prompts"),
    ("M380 66 v56", "l-5 -7 m5 7 l5 -7", (452, 98), "each call, exact tokens"),
    ("M470 147 h82", "l-7 -5 m7 5 l-7 5", (511, 141), "datasets"),
    ("M560 161 h-82", "l7 -5 m-7 5 l7 5", (515, 176), "checkpoints"),
    ("M650 130 v-56", "l-5 7 m5 -7 l5 7", (712, 98), "checked weights"),
)
THINGS = (
    (20, 20, "task", "input, target"),
    (290, 20, "run", "turns, exact tokens"),
    (560, 20, "reward", "a number"),
    (20, 130, "version", "name@N: weights"),
    (290, 130, "training job", "steps, resume points"),
    (560, 130, "dataset", "samples, loss mask"),
)
MADE_OF = (
    ("M200 43 h82", "l-7 -5 m7 5 l-7 5", (241, 36), "an agent"),
    ("M470 43 h82", "l-7 -5 m7 5 l-7 5", (511, 36), "is judged"),
    ("M650 66 v56", "l-5 -7 m5 7 l5 -7", (602, 98), "good runs"),
    ("M560 153 h-82", "l7 -5 m-7 5 l7 5", (515, 147), "learns"),
    ("M290 153 h-82", "l7 -5 m-7 5 l7 5", (245, 147), "makes"),
    (
        "M110 130 v-32 h270 v-24",
        "l-5 7 m5 -7 l5 7",
        (245, 92),
        "if promoted, samples the next runs",
    ),
)


def main() -> None:
    """Draw the pictures."""
    demo = json.loads((HERE / "demo.json").read_text())
    _write("loop", 270, [*_steps(20, 20), *_curve(demo["held_out"], demo["test"], 330, 20)])
    _write("processes", 196, _boxes(PROCESSES, MESSAGES))
    _write("things", 196, _boxes(THINGS, MADE_OF))


def _write(name: str, height: int, parts: list[str]) -> None:
    body = "\n".join(parts)
    (HERE / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 770 {height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">\n'
        f'<rect width="770" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def _boxes(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> list[str]:
    """Boxes with a name and a line about it, and arrows with captions from one to the other."""
    lines = []
    for x, y, name, about in boxes:
        lines.append(
            f'<rect x="{x}" y="{y}" width="180" height="46" rx="5" fill="none" stroke="{LINE}"/>'
            f'<text x="{x + 90}" y="{y + 19}" text-anchor="middle" font-weight="bold">{name}</text>'
            f'<text x="{x + 90}" y="{y + 37}" text-anchor="middle" font-size="11">{about}</text>'
        )
    for path, head, (x, y), caption in arrows:
        lines.append(
            f'<path d="{path} {head}" fill="none" stroke="{CURVE}"/>'
            f'<text x="{x}" y="{y}" text-anchor="middle" font-size="11">{caption}</text>'
        )
    return lines


def _steps(left: int, top: int) -> list[str]:
    """The steps in a column, with an arrow back from the last to the first."""
    lines = []
    for number, step in enumerate(STEPS):
        y = top + 34 * number
        lines.append(
            f'<rect x="{left}" y="{y}" width="120" height="24" rx="5" fill="none" stroke="{LINE}"/>'
            f'<text x="{left + 60}" y="{y + 16}" text-anchor="middle">{step}</text>'
        )
        if number:
            lines.append(f'<path d="M{left + 60} {y - 10} v9" stroke="{LINE}"/>')
    bottom = top + 34 * (len(STEPS) - 1) + 12
    lines.append(
        f'<path d="M{left + 120} {bottom} h60 V{top + 12} h-58" fill="none" stroke="{LINE}"/>'
        f'<path d="M{left + 128} {top + 7} l-7 5 l7 5" fill="none" stroke="{LINE}"/>'
        f'<text x="{left + 188}" y="{(top + bottom) // 2 + 6}">next version</text>'
    )
    return lines


def _curve(values: list[float], test: dict[str, float], left: int, top: int) -> list[str]:
    """Held-out success by iteration, on axes from 0 to 1."""
    width, height = 390, 190
    step = width / (len(values) - 1)
    points = [(left + 20 + step * n, top + height * (1 - value)) for n, value in enumerate(values)]
    lines = [f'<text x="{left + 20}" y="{top + height + 42}">held-out success by iteration; '
             f'test {test["before"]:.3f} to {test["after"]:.3f}</text>']  # fmt: skip
    for mark in (0.0, 0.5, 1.0):
        y = top + height * (1 - mark)
        lines.append(
            f'<path d="M{left + 20} {y} h{width}" stroke="{LINE}" stroke-width="0.5"/>'
            f'<text x="{left + 14}" y="{y + 4}" text-anchor="end">{mark:g}</text>'
        )
    trace = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    lines.append(f'<polyline points="{trace}" fill="none" stroke="{CURVE}" stroke-width="2"/>')
    for number, (x, y) in enumerate(points):
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{CURVE}"/>'
            f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{number}</text>'
        )
    return lines


if __name__ == "__main__":
    main()
