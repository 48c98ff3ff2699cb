"""A part's table: printed as Markdown, with versions and command."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.rivals.environments import ROOT, Rivals


@dataclass
class Report:
    """The table of one part. `notes` are sentences below it."""

    part: str
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    load: tuple[float, float, float] = field(default_factory=os.getloadavg)

    def add(self, *cells: str) -> None:
        """Add a row, and print it."""
        self.rows.append(cells)
        print("| " + " | ".join(cells) + " |", flush=True)

    def text(self, rivals: Rivals) -> str:
        """The Markdown, from its heading to its notes."""
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        versions = ", ".join(f"{name} {version}" for name, version in rivals.versions.items())
        lines = [
            f"### {self.title}",
            "",
            f'`make bench ARGS="rivals {self.part}"`, {time.strftime("%Y-%m-%d")}, commit '
            f"{commit or 'unknown'}, {os.cpu_count()} cores, Python {platform.python_version()}, "
            f"load {self.load[0]:.1f} before it began. {versions}.",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|" + "---|" * len(self.columns),
            *("| " + " | ".join(row) + " |" for row in self.rows),
            "",
        ]
        for name, reason in rivals.missing.items():
            lines.append(f"- {name} did not take part: {reason}")
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines).rstrip() + "\n"

    def publish(self, rivals: Rivals) -> None:
        """Print it."""
        print(self.text(rivals), flush=True)
