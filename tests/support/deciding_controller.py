"""A process that stands by, and decides again and again once it controls: the tests kill it.

    python -m tests.support.deciding_controller HOME HOST LEASE

Each decision is an event of the registry's name `m`. HOST is what it takes for its host's name. Its
wall clock jumps by a day at each look, which nothing may rest on. Tests start it with `controller`.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def controller(home: Path, host: str, lease: float) -> "subprocess.Popen[str]":
    """The process, whose errors can be read."""
    argv = [sys.executable, "-m", "tests.support.deciding_controller", home, host, lease, "cray"]
    return subprocess.Popen(
        [str(word) for word in argv], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


def claim_of(home: Path) -> dict[str, Any]:
    """What platform.json says; {} without one."""
    try:
        found: dict[str, Any] = json.loads((home / "platform.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def main() -> None:
    from cray_agents.processes import die_with_parent

    home, host, lease = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    die_with_parent()
    socket.gethostname = lambda: host
    wall = time.time
    time.time = lambda: wall() + random.uniform(-86400, 86400)

    from cray_agents.config import Config
    from cray_agents.runtime.registry.registry import Registry
    from cray_agents.server.root_claim import stand_by

    config = Config.model_validate({"home": home, "port": 0, "lease_seconds": lease})
    control = stand_by(config, "m", "0")
    if control is None:
        return
    registry, number = Registry(config.root, control.lease.check), 0
    while True:
        number += 1
        registry.promote("m", 1 + number % 2, who=str(os.getpid()))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
