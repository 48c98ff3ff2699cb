"""A host's caches of the shared root: a job's files that another host writes are seen at once."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.trainers.job.failures.rank_monitor import BadEnd, note_end
from cray_agents.trainers.job.journal import CommandJournal, JobJournal
from cray_agents.training_commands import CommandResult, OptimStep
from tests.support.faults import root_views
from tests.support.faults.root_views import RootView

pytestmark = [
    pytest.mark.skipif(bool(root_views.missing()), reason=root_views.missing()),
    pytest.mark.slow,
]

#: Another host: it says what it sees, at each line of its input.
HOST = """
import json, sys
from pathlib import Path
from cray_agents.trainers.job.failures.rank_monitor import read_end
from cray_agents.trainers.job.journal import size_of_log, tail_from
from cray_agents.trainers.job.journal import CommandJournal

folder = Path(sys.argv[1])
for line in sys.stdin:
    end, log, commands = read_end(folder), folder / "log.txt", CommandJournal(folder)
    told = tail_from(log, 0), size_of_log(log)
    print(json.dumps([end and end.how, *told, commands.last, commands.done]), flush=True)
"""


@contextmanager
def other_host(view: RootView, folder: Path) -> Iterator[subprocess.Popen[str]]:
    host = subprocess.Popen(
        [*view.enter, sys.executable, "-c", HOST, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield host
    finally:
        host.kill()
        host.communicate()


def seen(host: subprocess.Popen[str]) -> Any:
    assert host.stdin is not None and host.stdout is not None
    host.stdin.write("look\n")
    host.stdin.flush()
    return json.loads(host.stdout.readline())


def test_ends_logs_commands_and_results_of_another_host_are_seen_at_once(tmp_path: Path) -> None:
    """The host that looks has looked before, and believes for 30 s that a name is absent."""
    disk, root = tmp_path / "disk", tmp_path / "home"
    disk.mkdir()
    view = RootView(tmp_path / "view", disk, root)
    try:
        journal = JobJournal(Home(disk), "job-1")
        commands = CommandJournal(journal.folder)
        commands.prepare()
        with other_host(view, Home(root).job("job-1")) as host:
            assert seen(host) == [None, "", 0, 0, 0]
            journal.log.write_text("first\n")
            commands.append(1, OptimStep(learning_rate=1e-3))
            assert seen(host) == [None, "first\n", 6, 1, 0]
            note_end(journal.folder, BadEnd(rank=1, how="died"))
            commands.write_result(CommandResult(sequence=1))
            assert seen(host) == ["died", "first\n", 6, 1, 1]
    finally:
        view.close()
