"""A finished loop as pictures: a PNG plot and one self-contained HTML page.

The page contains its plot as inline SVG and its own style, so it can be mailed as it is.
matplotlib (extra `export`) is imported only when a report is written.
"""

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cray_agents.cli.iteration_table import COLUMNS, row
from cray_agents.iteration import Iteration
from cray_agents.records import Run

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1f24; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid #e3e6ea }
tr.rejected { color: #8a929c } svg { width: 100%; height: auto }
.runs { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem }
pre { background: #f5f6f8; padding: .8rem; white-space: pre-wrap; font-size: .85rem }
dt { font-weight: 600 } dd { margin: 0 0 .4rem 1.2rem } details { margin-top: .8rem }
.figure { font-size: 2rem; font-weight: 600 } .dim { color: #68707a }
@media (prefers-color-scheme: dark) {
  body { background: #14171a; color: #e6e8ea } pre { background: #1e2226 }
  th, td { border-color: #2c3137 } }
"""


def figure(iterations: Sequence[Iteration], title: str) -> Any:
    """Plot held-out, test and training success by iteration, and the loss of each job."""
    from matplotlib.figure import Figure

    numbers = [g.iteration for g in iterations]
    picture = Figure(figsize=(9, 4), layout="constrained")
    left, right = picture.subplots(1, 2, width_ratios=[2, 1])
    judged = [g for g in iterations if g.holdout_tasks]
    held_out = [g.holdout_success for g in judged]
    left.plot([g.iteration for g in judged], held_out, "o-", label="held-out (greedy)")
    trained = [g for g in iterations if g.runs]
    rates = [g.accepted_runs / g.runs for g in trained]
    left.plot([g.iteration for g in trained], rates, "s--", alpha=0.6, label="training runs (T=1)")
    tested = [g for g in iterations if g.test_success is not None]
    left.plot(
        [g.iteration for g in tested], [g.test_success for g in tested], "*", ms=14, label="test"
    )
    if rejected := [g for g in judged if not g.promoted]:
        at = [g.iteration for g in rejected]
        left.plot(at, [g.holdout_success for g in rejected], "kx", ms=9, label="not promoted")
    left.set(title=title, xlabel="iteration", ylabel="success", ylim=(0, 1.02), xticks=numbers)
    left.grid(alpha=0.3)
    left.legend(loc="lower right", fontsize=8)
    jobs = [g for g in iterations if g.loss_last is not None]
    right.plot([g.iteration for g in jobs], [g.loss_first for g in jobs], "v-", label="first step")
    right.plot([g.iteration for g in jobs], [g.loss_last for g in jobs], "o-", label="last step")
    right.set(title="loss of each job", xlabel="iteration", ylabel="nats per token", yscale="log")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    return picture


def write_report(
    directory: Path,
    title: str,
    iterations: Sequence[Iteration],
    facts: dict[str, str],
    examples: Sequence[tuple[str, Run]],
) -> tuple[Path, Path]:
    """Write `report.png` and `report.html`; return their paths.

    `facts` are shown as they are; `examples` are runs with a caption, two in a row.
    """
    directory.mkdir(parents=True, exist_ok=True)
    picture = figure(iterations, title)
    png, page = directory / "report.png", directory / "report.html"
    picture.savefig(png, dpi=150)
    svg = io.StringIO()
    picture.savefig(svg, format="svg")
    drawing = svg.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    page.write_text(_page(title, iterations, facts, examples, drawing), encoding="utf-8")
    return png, page


def _page(
    title: str,
    iterations: Sequence[Iteration],
    facts: dict[str, str],
    examples: Sequence[tuple[str, Run]],
    drawing: str,
) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
    body = "".join(
        f'<tr class="{"" if g.promoted else "rejected"}">'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row(g).values())
        + "</tr>"
        for g in iterations
    )
    meanings = "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>"
        for name, text in COLUMNS.items()
    )
    about = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in facts.items()
    )
    pairs = "".join(
        f"<div><b>{html.escape(caption)}</b><pre>{html.escape(transcript(run))}</pre></div>"
        for caption, run in examples
    )
    tested = [g.test_success for g in iterations if g.test_success is not None]
    ends = f'<p class="figure">{tested[0]:.1%} → {tested[-1]:.1%}</p>' if len(tested) > 1 else ""
    note = '<p class="dim">success on test tasks that neither training nor promotion looked at</p>'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>{ends}{note if ends else ""}
{drawing}
<h2>Iterations</h2><table><tr>{head}</tr>{body}</table>
<details><summary>What the columns mean</summary><dl>{meanings}</dl></details>
<h2>The same questions, before and after</h2><div class="runs">{pairs}</div>
<h2>How it was made</h2><table>{about}</table>
</body></html>
"""


def transcript(run: Run) -> str:
    """Return a run as people read it, with its reward."""
    lines = []
    for message in run.trajectory.messages:
        calls = [
            f"→ {call['function']['name']}({call['function']['arguments']})"
            for call in message.get("tool_calls") or []
        ]
        text = " ".join([str(message.get("content") or ""), *calls]).strip()
        lines.append(f"{message['role']}: {text}")
    reward = "none" if run.reward is None else f"{run.reward:g}"
    return "\n".join([*lines, f"reward: {reward}   ({run.model})"])
