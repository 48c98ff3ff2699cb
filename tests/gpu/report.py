"""Report of the GPU stages: `gpu.json`, and its tables for BENCHMARKS.md in `gpu.md`."""

import json
from pathlib import Path
from typing import Any


class Report:
    """Both files are whole after every figure. One process at a time adds to them."""

    def __init__(self, folder: Path) -> None:
        self._json, self._markdown = folder / "gpu.json", folder / "gpu.md"

    def begin(self, about: dict[str, Any]) -> None:
        """Start anew, with what is known of the machine."""
        self._json.parent.mkdir(parents=True, exist_ok=True)
        self._write({"about": about, "stages": {}})

    def read(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self._json.read_bytes())
        return content

    def know(self, **about: Any) -> None:
        """Add to what is known of the machine."""
        content = self.read()
        self._write({**content, "about": content["about"] | about})

    def add(self, stage: str, **row: Any) -> None:
        """Add a row of figures."""
        content = self.read()
        content["stages"].setdefault(stage, {}).setdefault("rows", []).append(row)
        self._write(content)

    def end(self, stage: str, state: str, seconds: float, problem: str | None = None) -> None:
        """Note how a stage ended, and print its table."""
        content = self.read()
        ended = {"state": state, "seconds": round(seconds, 1), "problem": problem}
        content["stages"].setdefault(stage, {}).update(ended)
        self._write(content)
        print("\n".join(_table(stage, content["stages"][stage])), flush=True)

    def _write(self, content: dict[str, Any]) -> None:
        for path, text in (
            (self._json, json.dumps(content, indent=1)),
            (self._markdown, _tables(content)),
        ):
            draft = path.with_name(f".{path.name}")
            draft.write_text(text)
            draft.replace(path)


def _tables(content: dict[str, Any]) -> str:
    about = ", ".join(f"{name} {_cell(value)}" for name, value in content["about"].items())
    stages = [_table(stage, found) for stage, found in content["stages"].items()]
    return "\n".join([about, *(line for lines in stages for line in lines), ""])


def _table(stage: str, found: dict[str, Any]) -> list[str]:
    """Return a stage's table; the columns are those of its rows."""
    lines = ["", f"{stage}: {found.get('state', 'under way')}, {found.get('seconds', 0):.0f} s", ""]
    if problem := found.get("problem"):
        lines += [problem.strip().splitlines()[-1], ""]
    rows = found.get("rows", [])
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if columns:
        lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(_cell(row.get(c)) for c in columns)} |" for row in rows]
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
