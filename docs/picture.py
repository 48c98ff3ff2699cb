"""Picture of the README: the steps of an iteration, and the held-out success of one demo.

.venv/bin/python docs/picture.py        writes docs/loop.svg from docs/demo.json
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
STEPS = ("collect", "score", "build", "train", "prove", "evaluate", "promote")
INK, LINE, CURVE = "#24292f", "#8c959f", "#0969da"


def main() -> None:
    """Draw the picture."""
    demo = json.loads((HERE / "demo.json").read_text())
    parts = [*_steps(20, 20), *_curve(demo["held_out"], demo["test"], 330, 20)]
    body = "\n".join(parts)
    (HERE / "loop.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 270" font-family="sans-serif" '
        f'font-size="13" fill="{INK}">\n<rect width="760" height="270" fill="white"/>\n{body}\n'
        "</svg>\n"
    )


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
