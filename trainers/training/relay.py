"""Relay: decisions that rank 0 makes alone, passed on to the other ranks as they are made.

The others wait in the ranks' store, not in a collective: that would keep a GPU busy, and end after
a timeout. Used by session/resident.py and session/command_run.py.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

FOR_EVER = timedelta(days=7)  # rank 0 may be idle for long; its end ends the others, too


class Relay:
    """A sequence of decisions under a name that no other sequence of these ranks has."""

    def __init__(self, name: str) -> None:
        self._name, self._number = name, 0
        self._leads = torch.distributed.get_rank() == 0
        self._alone = torch.distributed.get_world_size() == 1
        default: Any = distributed_c10d._get_default_store()
        self._store = default if self._alone else default.clone()

    def next(self, decide: Callable[[], Any]) -> Any:
        """Return what `decide` returns on rank 0, which JSON can hold, on every rank."""
        self._number += 1
        key = f"{self._name}/{self._number}"
        if not self._leads:
            self._store.wait([key], FOR_EVER)
            return json.loads(self._store.get(key))
        decision = decide()
        if not self._alone:
            self._store.set(key, json.dumps(decision))
        return decision
