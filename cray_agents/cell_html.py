"""HTML of records, as a notebook shows them: tables, curves, runs. All text is escaped.

Called by `_repr_html_` in records.py, iteration.py and notebook.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from cray_agents.messages import text_of, text_or_json, tool_calls_of

WIDTH, HEIGHT, MARGIN = 460, 200, 34  # of a curve, in pixels
COLOURS = ("#2a78d6", "#d9730d", "#3f8f5b")
LEFT = "text-align:left;vertical-align:top"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; without headings it has rows alone."""
    head = "".join(f"<th style='{LEFT}'>{escape(name)}</th>" for name in headings)
    body = "".join(
        "<tr>" + "".join(f"<td style='{LEFT}'>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if headings else ''}{body}</table>"


def curves(series: Mapping[str, Sequence[tuple[int, float]]], x: str) -> str:
    """Return a picture of shares, 0 to 1, over whole numbers of `x`: a line for each name."""
    last = max((at for points in series.values() for at, _ in points), default=0)

    def place(at: int, share: float) -> tuple[float, float]:
        across = MARGIN + (WIDTH - 2 * MARGIN) * (at / last if last else 0.5)
        return across, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share

    def text(at: tuple[float, float], words: str, more: str = "") -> str:
        return f"<text x='{at[0]:.0f}' y='{at[1]:.0f}' {more}>{escape(words)}</text>"

    parts = []
    for share in (0.0, 0.5, 1.0):
        (_, y), label = place(0, share), f"{share:.0%}"
        parts.append(
            f"<line x1='{MARGIN}' x2='{WIDTH - MARGIN}' y1='{y}' y2='{y}' stroke='#9998'/>"
        )
        parts.append(text((MARGIN - 4, y + 4), label, "text-anchor='end'"))
    for at in sorted({0, last // 2, last}):
        parts.append(text((place(at, 0)[0], HEIGHT - MARGIN + 14), str(at)))
    parts.append(text((WIDTH / 2, HEIGHT - 4), x, "text-anchor='middle'"))
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*point) for point in points))
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2'/>")
        for at, share in points:
            a, b = place(at, share)
            told = escape(f"{name} {share:.3f}, {x} {at}")
            parts.append(f"<circle cx='{a:.1f}' cy='{b:.1f}' r='3' fill='{colour}'>"
                         f"<title>{told}</title></circle>")  # fmt: skip
        parts.append(text((MARGIN + 90 * number, 14), name, f"style='fill:{colour}'"))
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' fill='currentColor' font-size='11'>"
        f"{''.join(parts)}</svg>"
    )


def run_html(run: Any) -> str:
    """Return a records.Run: what came of it, then its messages with their tool calls."""
    said = {
        "run": run.id,
        "model": run.model,
        "target": text_or_json(run.target),
        "output": text_or_json(run.output),
        "error": "" if run.error is None else f"{run.error.type}: {run.error.message}",
        "rewards": ", ".join(f"{reward.name} {reward.value:g}" for reward in run.rewards),
        "tokens": f"{run.usage.prompt_tokens} read, {run.usage.completion_tokens} sampled",
    }
    rows = []
    for message in run.trajectory.messages:
        functions = [call.get("function") or {} for call in tool_calls_of(message)]
        calls = [f"{f.get('name')}({f.get('arguments') or ''})" for f in functions]
        rows.append((str(message.get("role")), "\n".join(filter(None, [text_of(message), *calls]))))
    facts = table((), [(name, value) for name, value in said.items() if value])
    return f"{facts}<div style='white-space:pre-wrap'>{table((), rows)}</div>"


class Shown(dict[str, Any]):
    """An object of the platform's, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return table((), [(name, text_or_json(value)) for name, value in self.items()])
