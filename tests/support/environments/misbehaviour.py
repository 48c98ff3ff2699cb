"""Misbehaviour that environments of all frameworks share; it takes the standard library alone."""

import os
import subprocess
import time

FLOOD = "x" * 50_000_000


def misbehave(way: str) -> None:
    """Do what an environment may do wrong before the model is asked for anything."""
    if way == "reset":
        raise RuntimeError("no world today")
    if way == "wordy":
        raise RuntimeError("it went so:\n" + "  a frame\n" * 1000 + "KeyError: 'the cause'")
    if way == "hangs":
        time.sleep(3600)
    if way == "dies":
        os.kill(os.getpid(), 9)
    if way == "leaks":
        for _ in range(70):
            subprocess.Popen(["sleep", "98765"], start_new_session=True)
