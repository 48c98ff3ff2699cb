"""XIDs of NVIDIA's driver, in texts that are made up after its documentation: no GPU wrote them."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import SetupError
from cray_agents.trainers.job.failures import gpu_errors
from cray_agents.trainers.job.failures.gpu_errors import find_xids, recent_xids
from cray_agents.trainers.job.failures.health_gate import check_node
from cray_agents.trainers.job.failures.rank_monitor import RankProcess, describe

LOG = """\
NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023
NVRM: GPU at PCI:0000:3b:00: GPU-5a3c0e1f-0b1d-4c8e-9d55-8f6f1f0f7a11
NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
NVRM: Xid (PCI:0000:c6:00): 94, pid=7194, name=python, Contained: CE User Channel (0x9). RST: No
NVRM: Xid (PCI:0000:1a:00): 31, pid=7195, name=python, Ch 00000008, MMU Fault: ENGINE GRAPHICS
NVRM: Xid (PCI:0000:1a:00): 45, pid=7195, Ch 00000008
NVRM: Xid (0000:af:00): 119, pid=1, Timeout waiting for RPC from GSP! Expected function 76
"""


def test_xids_are_read_and_blame_gpu_or_program() -> None:
    xids = find_xids(iter(LOG.splitlines()))
    assert [(xid.number, xid.gpu, xid.pid) for xid in xids] == [
        (79, "0000:3b:00", None),
        (94, "0000:c6:00", 7194),
        (31, "0000:1a:00", 7195),
        (45, "0000:1a:00", 7195),
        (119, "0000:af:00", 1),
    ]
    assert [xid.number for xid in xids if xid.lost] == [79, 119]
    assert [xid.number for xid in xids if xid.blames(7195)] == [79, 94, 31, 119]
    assert [xid.number for xid in xids if xid.blames(5)] == [79, 94, 119]
    assert str(xids[1]).endswith("RST: No [contained ECC error]")


@pytest.fixture
def write_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """Write the kernel's log of a node with a driver: its lines, and their age in seconds."""
    records: list[str] = []

    def write(lines: str, age: float) -> None:
        microseconds = 1e6 * (time.monotonic() - age)
        records[:] = [
            f"3,{number},{microseconds:.0f},-;{line}\n SUBSYSTEM=pci\n"
            for number, line in enumerate(lines.splitlines())
        ]

    gpu_errors.own_gpus.cache_clear()
    monkeypatch.setattr(gpu_errors, "DRIVER", tmp_path)
    monkeypatch.setattr(gpu_errors, "_kernel_records", lambda: records)
    return write


def test_the_last_minutes_of_the_log_count(write_log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recent_xids(600) == []
    write_log(LOG, 60)
    assert len(recent_xids(600)) == 5 and recent_xids(30) == []
    monkeypatch.setattr(gpu_errors, "DRIVER", Path("/missing"))
    assert recent_xids(600) == []


def test_a_log_that_cannot_be_read_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_errors, "DRIVER", tmp_path)
    monkeypatch.setattr(gpu_errors, "KERNEL_LOG", tmp_path / "missing")
    assert recent_xids(600) == []


def test_the_gate_refuses_a_node_whose_gpu_was_lost_minutes_ago(
    write_log: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    older = 'case "$1" in *remapped*) echo \'Field "remapped_rows.failure" is not a valid field\''
    asks = tmp_path / "bin" / "nvidia-smi"
    asks.parent.mkdir()
    asks.write_text(f"#!/bin/sh\n{older}; exit 2;; esac\necho 0, ${{ECC:-0}}\n")
    asks.chmod(0o755)
    monkeypatch.setenv("PATH", str(asks.parent), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    write_log(LOG.replace(" 79,", " 13,").replace(" 119,", " 63,"), 60)
    check_node(tmp_path)
    write_log(LOG, 60)
    with pytest.raises(SetupError, match=r"health gate: node n3: in the last 10 minutes: .*: 79,"):
        check_node(tmp_path)
    write_log(LOG, 3600)
    check_node(tmp_path)
    monkeypatch.setenv("ECC", "2")  # an older driver still tells this
    with pytest.raises(SetupError, match="GPU 0 has 2 uncorrectable ECC errors"):
        check_node(tmp_path)


def test_a_bad_end_carries_the_xids_that_explain_it(write_log: Any, tmp_path: Path) -> None:
    write_log(LOG, 100)
    (tmp_path / "rank.txt").write_text("RuntimeError: CUDA error: unspecified\n")
    ended = RankProcess(0, 7195, -1, code=1)
    said = describe(ended, "died", "", tmp_path / "rank.txt").log_tail.splitlines()
    assert said[0].startswith("RuntimeError") and len(said) == 5
    assert sum("Xid" in line and "31, pid=7195" in line for line in said) == 1


def test_a_neighbours_gpu_on_the_same_node_blames_nobody_here(
    write_log: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nvidia-smi is a script that prints what the real one does for the GPUs it is asked for."""
    asks = tmp_path / "bin" / "nvidia-smi"
    asks.parent.mkdir()
    asks.write_text(
        '#!/bin/sh\ncase "$1 $4" in *pci.bus_id*1,2*)'
        " echo 00000000:C6:00.0; echo 00000000:1A:00.0;; *) exit 6;; esac\n"
    )
    asks.chmod(0o755)
    monkeypatch.setenv("PATH", str(asks.parent), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    write_log(LOG, 60)
    assert [xid.number for xid in recent_xids(600)] == [94, 31, 45]
    gpu_errors.own_gpus.cache_clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-9a")  # not known: all of the node's count
    assert len(recent_xids(600)) == 5
    gpu_errors.own_gpus.cache_clear()
