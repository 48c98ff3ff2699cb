"""Processes: a program of ours ends at once, after its exit handlers."""

import subprocess
import sys

ENDING = """
import atexit
from cray_agents.processes import exit_at_once

class Imported:
    def __del__(self):
        print("torn down")

kept = Imported()
atexit.register(print, "handled", end=" ")
print("said", end=" ")
exit_at_once(7)
"""


def test_a_program_ends_after_its_exit_handlers_and_tears_nothing_down() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "said handled "), done.stderr
