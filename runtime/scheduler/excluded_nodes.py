"""Excluded nodes: nodes that failed, which jobs leave out until a time is over.

Each is a file `excluded_nodes/<node>.json` on the shared root, so that every platform of the root
sees it. `MegatronTrainer` writes them after a failure, and gives their names to the scheduler.
slurm.py leaves out as many as it can: a job always finds enough nodes.
"""

import re
import time
from pathlib import Path

from cray_agents.errors import Corrupt
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class ExcludedNode(Record):
    """A node that jobs leave out. `until`: unix seconds."""

    node: str
    until: float
    why: str
    job: str = ""


def exclude_node(folder: Path, node: str, minutes: float, why: str, job: str) -> bool:
    """Leave a node out from now on; return False if it cannot be a node's name."""
    if not _NODE.fullmatch(node) or minutes <= 0:
        return False
    record = ExcludedNode(node=node, until=time.time() + 60 * minutes, why=why, job=job)
    folder.mkdir(parents=True, exist_ok=True)
    durable.replace_file(folder / f"{node}.json", checksums.record_text(record))
    return True


def excluded_nodes(folder: Path) -> list[ExcludedNode]:
    """Return the nodes that are left out now, the newest first; forget those whose time is over."""
    nodes = []
    for path in folder.glob("*.json"):
        try:
            record = checksums.read_record(ExcludedNode, path)
        except FileNotFoundError:
            continue
        except Corrupt:  # a hint only: without it a bad node may be tried once more
            path.unlink(missing_ok=True)
            continue
        if record.until > time.time():
            nodes.append(record)
        else:
            path.unlink(missing_ok=True)
    return sorted(nodes, key=lambda node: -node.until)
