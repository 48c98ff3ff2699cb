"""A part's table: printed, and put in its place in BENCHMARKS.md."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.rivals.environments import ROOT, Rivals

FILE = ROOT / "BENCHMARKS.md"
HEADING = "## Beside rivals"


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
        """Print it, and replace the part's earlier table in BENCHMARKS.md."""
        text = self.text(rivals)
        print(text, flush=True)
        if os.environ.get("CRAY_BENCH_WRITE") != "no":
            FILE.write_text(place(FILE.read_text(), self.part, text))


def place(document: str, part: str, text: str) -> str:
    """Put a part's text between its marks, which are added where they are not there yet."""
    begin, end = f"<!-- rivals {part} -->\n", f"<!-- end of rivals {part} -->\n"
    before, found, rest = document.partition(begin)
    if found:
        return before + begin + text + end + rest.partition(end)[2]
    head, found, tail = document.partition(f"{HEADING}\n\n")
    if not found:
        head, found, tail = document.rstrip("\n") + "\n\n", f"{HEADING}\n\n", ""
    return head + found + begin + text + end + ("\n" + tail if tail else "")
