"""Failures told apart: the verdict on a command that ended early, and the rule that follows."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from cray_agents.cli.job_page import job_report, sentence
from cray_agents.cli.why import explain
from cray_agents.paths import Home
from cray_agents.ports import CommandStatus
from cray_agents.records import canonical
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.scheduler.excluded_nodes import exclude_node, excluded_nodes
from cray_agents.runtime.scheduler.slurm import LEDGER
from cray_agents.runtime.scheduler.slurm_reports import describe_reason
from cray_agents.trainers import progress
from cray_agents.trainers.job.failures.failure import FailureSettings, FailureVerdict, judge
from cray_agents.trainers.job.failures.hang_report import RankStack, culprit, report_hang
from cray_agents.trainers.job.failures.rank_monitor import (
    BadEnd,
    NodeClocks,
    RankProcess,
    first_end,
    forget_end,
    note_end,
    read_end,
    start_patience,
)
from cray_agents.trainers.job.job_state import read_handover, read_status
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MAX_RESTARTS, MegatronTrainer
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.trainers.models.transformers_backend.parent_files import ParentFiles
from cray_agents.trainers.models.weights import SafeTensors
from cray_agents.trainers.planning.cluster_resources import Resources, this_host
from cray_agents.trainers.progress import CLOCK, ProgressClock
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout
from tests.support.waiting_scheduler import WaitingScheduler

TRACEBACK = "Traceback (most recent call last):\n  File 'x.py', line 1, in f\n"
# as the driver writes them; made up after NVIDIA's documentation, not recorded on a machine of ours
XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus."
XID_94 = "NVRM: Xid (PCI:0000:c6:00): 94, pid=7194, name=python, Contained: CE User Channel (0x9)."
XID_31 = "NVRM: Xid (PCI:0000:1a:00): 31, pid=7194, Ch 00000008, MMU Fault: ENGINE GRAPHICS"
XID_45 = "NVRM: Xid (PCI:0000:1a:00): 45, pid=7194, Ch 00000008"
RANK = BadEnd(rank=1, node="n7", how="died (exit code 1)")


def verdict_on(
    log: str = "", *, rank: str | None = None, reason: str = "", code: int = 1, **more: Any
) -> FailureVerdict:
    end = None if rank is None else RANK.model_copy(update={"log_tail": rank})
    command = CommandStatus(
        state="failed", exit_code=code, reason=reason, node=more.get("node", "")
    )
    started, on_cpu = more.get("started", True), more.get("on_cpu", False)
    return judge(command, end, log, started=started, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("said", "kind", "rule"),
    [
        ({"reason": "NODE_FAIL", "node": "n3"}, "node", "elsewhere"),
        ({"rank": "NVRM: Xid (PCI:0000:3b): 79, GPU has fallen off the bus"}, "gpu", "elsewhere"),
        ({"rank": XID_79, "node": "n3"}, "gpu", "elsewhere"),
        ({"rank": f"{TRACEBACK}ValueError: x\n{XID_94}"}, "gpu", "elsewhere"),
        ({"rank": XID_31}, "program", "give_up"),
        ({"rank": f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory\n{XID_45}"},
         "gpu_memory", "smaller"),
        ({"rank": "CUDA error: uncorrectable ECC error encountered"}, "gpu", "elsewhere"),
        ({"rank": "RuntimeError: ncclRemoteError: a peer went away"}, "network", "back_off"),
        (
            {"rank": f"{TRACEBACK}RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:4"},
            "network",
            "back_off",
        ),
        ({"rank": f"{TRACEBACK}OSError: [Errno 116] Stale file handle"}, "storage", "back_off"),
        ({"reason": "OUT_OF_MEMORY"}, "host_memory", "back_off"),
        ({"reason": "OUT_OF_MEMORY", "on_cpu": True}, "host_memory", "smaller"),
        ({"rank": f"{TRACEBACK}MemoryError", "on_cpu": True}, "host_memory", "smaller"),
        (
            {"rank": f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory. Tried to"},
            "gpu_memory",
            "smaller",
        ),
        ({"reason": "PREEMPTED"}, "preempted", "again"),
        ({"log": "slurmstepd: error: *** JOB 5 ON n1 CANCELLED DUE TO PREEMPTION ***"}, "preempted",
         "again"),
        ({"reason": "TIMEOUT: TimeLimit"}, "time_limit", "again"),
        ({"reason": "time limit"}, "time_limit", "again"),
        ({"code": 75}, "stopped", "again"),
        ({"reason": "it died with its platform"}, "stopped", "again"),
        ({"log": "srun: error: Unable to create step", "started": False}, "launcher", "back_off"),
        ({"code": 127, "started": False}, "launcher", "back_off"),
        ({"rank": f"{TRACEBACK}TypeError: 'int' object is not callable"}, "program", "give_up"),
        ({"rank": f"{TRACEBACK}my.own.KeyError: 'x'"}, "program", "give_up"),
        ({"rank": f"{TRACEBACK}RuntimeError: something odd"}, "unknown", "again"),
        ({"rank": "a log that says nothing"}, "unknown", "again"),
    ],
)  # fmt: skip
def test_each_kind_of_failure_is_known_and_has_its_rule(
    said: dict[str, Any], kind: str, rule: str
) -> None:
    verdict = verdict_on(said.pop("log", ""), **said)
    assert (verdict.kind, verdict.rule) == (kind, rule), verdict
    assert str(verdict) and verdict.remedy


def test_the_culprits_own_log_decides_and_not_its_consequences() -> None:
    """All ranks lose each other when one runs out of memory."""
    mine = f"{TRACEBACK}torch.OutOfMemoryError: CUDA out of memory"
    verdict = verdict_on("RuntimeError: Connection closed by peer", rank=mine)
    assert (verdict.kind, verdict.node) == ("gpu_memory", "n7")
    assert "CUDA out of memory" in verdict.evidence
    gone = verdict_on("Connection closed by peer", reason="NODE_FAIL", node="n2", rank="")
    assert (gone.kind, gone.rule) == ("node", "elsewhere")


def test_a_hang_moves_the_job_only_if_its_process_was_stopped() -> None:
    how = "no longer responds, for 9 s (it is stopped)"
    stopped = RANK.model_copy(update={"how": how, "node_is_suspect": True})
    loops = RANK.model_copy(update={"how": "has not moved for 9 s: it is in loss (a.py:3)"})
    failed = CommandStatus(state="failed", exit_code=1)
    verdicts = [judge(failed, e, "", started=True, on_cpu=True) for e in (stopped, loops)]
    assert [(v.kind, v.rule, v.node) for v in verdicts] == [
        ("hang", "elsewhere", "n7"),
        ("hang", "back_off", "n7"),
    ]
    assert "loss (a.py:3)" in str(verdicts[1])


# ---- what is a hang, and what is not
def test_a_rank_that_imports_torch_just_now_has_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is looked at in a thread of its own, which must not end by it."""
    torch = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert not progress._has_cuda()
    torch.cuda = ModuleType("cuda")  # type: ignore[attr-defined]
    assert not progress._has_cuda()
    torch.cuda.is_initialized = lambda: True  # type: ignore[attr-defined]
    assert progress._has_cuda()


def test_a_rank_moves_by_ticks_files_and_computing_and_not_by_waiting(tmp_path: Path) -> None:
    clock = ProgressClock()
    clock.moved()
    time.sleep(0.2)
    assert not clock.moved()
    clock.tick()
    assert clock.moved()
    time.sleep(0.2)
    assert not clock.moved()
    (tmp_path / "saved").write_bytes(bytes(100_000))
    assert clock.moved()
    deadline = time.monotonic() + 60
    while not clock.moved():
        assert time.monotonic() < deadline
        sum(range(100_000))


def test_a_rank_that_loads_weights_moves_with_each_tensor(models: Any) -> None:
    """Files of weights are mapped into memory: the kernel counts no bytes that were read."""
    parent = models("qwen3")
    for source in (SafeTensors(parent), ParentFiles(parent)):
        before = CLOCK.ticks
        source["lm_head.weight"] if isinstance(source, SafeTensors) else source.build(torch.float32)
        assert CLOCK.ticks > before + (20 if isinstance(source, ParentFiles) else 0)


def test_a_rank_that_is_ready_shortens_no_others_patience() -> None:
    ranks = [RankProcess(n, 0, -1, ready=n == 0) for n in range(3)]
    assert start_patience(ranks, 5) == 5 and start_patience(ranks[:1], 5) == 1
    ranks[1].ready, ranks[2].code = True, 0  # that it has ended keeps nobody waiting
    assert start_patience(ranks, 5) == 1


def test_a_node_knows_whether_ranks_of_others_move(tmp_path: Path) -> None:
    here, there = (NodeClocks(tmp_path, "end-1", node, 2) for node in (0, 1))
    assert not here.others_move() or not here.others_move()  # nothing was written yet
    there.write()
    assert here.others_move() and not here.others_move()
    there.write()
    assert here.others_move()
    here.write()
    assert not here.others_move() and there.others_move()
    alone = NodeClocks(tmp_path, "end-2", 0, 1)
    alone.write()
    assert not alone.others_move()


def test_clocks_of_nodes_are_written_at_once_and_without_a_root(tmp_path: Path) -> None:
    """Slurm's step id has a dot: what follows it names the node."""
    nodes = [NodeClocks(tmp_path, "job-7.0.123", node, 2) for node in (0, 1)]

    def write(clocks: NodeClocks) -> None:
        for _ in range(500):
            clocks.write()

    with ThreadPoolExecutor() as threads:
        list(threads.map(write, nodes))
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {f"clock-job-7.0.123-{node}": "500" for node in (0, 1)}
    assert nodes[0].others_move()
    away = NodeClocks(tmp_path / "away", "job-7.0.123", 0, 2)
    away.write()  # the shared root does not answer
    assert not list(tmp_path.glob("away*"))


def test_the_rank_that_keeps_the_others_waiting_is_the_culprit() -> None:
    waits = [RankStack(n, "", "all_reduce 7 of group g", waits=True) for n in (0, 1, 3)]
    late = RankStack(2, "", "all_reduce 6 of group g", waits=True)
    works = RankStack(2, "", "loss (a.py:3)")
    stopped = RankStack(2, "it is stopped")
    for one in (late, works, stopped):
        assert culprit([*waits, one])[0] is one
    assert culprit([*waits, works])[1] == (
        "it is in loss (a.py:3); ranks 0-1, 3 wait in all_reduce 7 of group g"
    )


def test_among_ranks_that_wait_the_one_furthest_behind_is_the_culprit() -> None:
    """On GPUs they wait where they read a number: each elsewhere, and none in a collective's code.

    Rank 2 has not called what the others wait in; or has, and its GPU did not end the one before.
    """
    others = {n: {"nccl 0": (6, 7), "nccl 4": (9, 9)} for n in (0, 1, 3)}
    for behind in ({"nccl 0": (6, 6)}, {"nccl 0": (5, 7)}, {"nccl 0": (6, 7), "nccl 4": (8, 9)}):
        stacks = [
            RankStack(n, "", f"step (a.py:{n % 3})", waits=True, reached=others.get(n, behind))
            for n in range(4)
        ]
        assert culprit(stacks)[0].rank == 2, behind


ONE_RANK = """
import os, sys, time, torch
from pathlib import Path
from torch._C import _distributed_c10d as c10d
from cray_agents.trainers.job.failures import hang_report
names, log = sys.argv[1].split(), Path(sys.argv[2])
dump = c10d._dump_fr_trace_json
del c10d._dump_fr_trace_json
for name in names:
    setattr(c10d, name, dump)
hang_report.write_stacks_on_signal(log)
torch.distributed.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
for _ in range(3):
    torch.distributed.all_reduce(torch.ones(1))
while dump().count(b'"retired":true') < 3:  # a thread of torch's own notes each end
    time.sleep(0.01)
hang_report.write_collectives(log)
print(flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_hang_is_read_from_whichever_recorder_torch_has(tmp_path: Path) -> None:
    """torch's own recorder of CPUs, under the names that it and NCCL's have; and no recorder."""
    both = "_dump_fr_trace_json _dump_nccl_trace_json"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_RANK, names, str(tmp_path / f"rank-{number}.txt")],
            stdout=subprocess.PIPE,
            env={**os.environ, "TORCH_FR_BUFFER_SIZE": "200"},
        )
        for number, names in enumerate(["_dump_nccl_trace_json", both, ""])
    ]
    try:
        assert all(rank.stdout is not None and rank.stdout.readline() for rank in ranks)
        pids = {number: rank.pid for number, rank in enumerate(ranks)}
        logs = {number: tmp_path / f"rank-{number}.txt" for number in pids}
        stacks = report_hang(dict.fromkeys(pids, ""), pids, logs, tmp_path / "report.txt")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [stack.reached for stack in stacks] == [{"gloo 0": (3, 3)}, {"gloo 0": (3, 3)}, {}]
    first, _, last = (tmp_path / "report.txt").read_text().partition("==== rank 2")
    assert "not known" not in first
    assert "its collectives are not known: this torch has no flight recorder" in last


def test_a_consequence_replaces_no_cause(tmp_path: Path) -> None:
    cause = BadEnd(rank=-1, node="n1", how="health gate: node n1: no GPU")
    note_end(tmp_path, cause)
    note_end(tmp_path, RANK.model_copy(update={"followed": True}))
    assert read_end(tmp_path) == cause
    note_end(tmp_path, RANK)
    assert read_end(tmp_path) == RANK
    forget_end(tmp_path)
    assert read_end(tmp_path) is None


@pytest.mark.parametrize("late", [True, False])
def test_the_cause_wins_whichever_node_reports_first(late: bool, tmp_path: Path) -> None:
    cause = RANK.model_copy(update={"how": "no longer responds"})
    lost = RANK.model_copy(update={"node": "n8", "followed": True})
    note, other = tmp_path / "note.json", lost.model_copy(update={"node": "n9"})
    order = [lost, cause, other] if late else [cause, lost, other]
    reported = [first_end(note, end, patience=0.0) for end in order]
    assert reported == ([lost, cause, cause] if late else [cause] * 3)
    for end in reversed(reported):  # each node leaves what it learnt, in any order
        note_end(tmp_path, end)
    assert read_end(tmp_path) == cause
    later = RANK.model_copy(update={"node": "n6"})
    assert first_end(note, later, patience=0.0) == cause  # of two causes the first


# ---- what the trainer does


class Site:
    """A trainer on a scheduler whose commands wait until the test says how they end, with a job."""

    def __init__(self, folder: Path, *, pause: float = 0.0) -> None:
        self.home, self.scheduler = Home(folder / "home"), WaitingScheduler()
        make_seed_model(folder / "parent", seed=0, corpus=["What is 1 + 1?"])
        settings = FailureSettings(back_off=(pause,))
        self.trainer = MegatronTrainer(self.home, self.scheduler, failures=settings)
        spec = JobSpec(
            dataset="d",
            parent=str(folder / "parent"),
            parent_sha256="0" * 64,
            hyperparameters=Hyperparameters(steps=8, learning_rate=1e-3),
            layout=Layout(),
        )
        self.id = self.trainer.submit(spec).id
        self.journal = JobJournal(self.home, self.id)

    def end(self, reason: str = "", code: int = 1, *, node: str = "", rank: str = "") -> Any:
        """End the command, and ask after the job."""
        self.journal.claim_attempt()
        if rank:
            note_end(self.journal.folder, RANK.model_copy(update={"log_tail": rank}))
        self.scheduler.end = CommandStatus(state="failed", exit_code=code, reason=reason, node=node)
        return self.trainer.status(self.id)

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        return [event for event in self.journal.events() if event["event"] == "verdict"]


def test_a_node_that_failed_is_left_out_for_a_time_and_told(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site.scheduler.commands[-1].exclude == []
    assert site.end("NODE_FAIL", node="n3").state == "queued"
    assert site.scheduler.commands[-1].exclude == ["n3"]
    (noted,) = site.verdicts
    assert (noted["cause"], noted["node"], noted["attempt"]) == ("node", "n3", 1)
    assert "n3 is left out for 60 minutes" in noted["done"]
    assert "n3 is left out for 60 minutes" in site.journal.log.read_text()
    assert "attempt 1 ended: its node failed (n3)" in sentence(noted, 8)
    assert job_report(site.home, site.id)["verdicts"] == [noted]
    site.end(rank="Xid 79, GPU has fallen off the bus")
    assert site.scheduler.commands[-1].exclude == ["n7", "n3"]  # the newest first
    told = " ".join(explain(site.home, site.id)["why"])
    assert "its node failed (n3)" in told and "n7 is left out until" in told


def test_a_job_that_waits_may_use_a_node_again_whose_time_is_over(tmp_path: Path) -> None:
    site = Site(tmp_path)
    assert site.end("NODE_FAIL", node="n3").state == "queued"
    site.scheduler.reason = "Resources"
    for _ in range(2):
        assert site.trainer.status(site.id).state == "queued"
        assert len(site.scheduler.commands) == 2
    assert site.trainer.unchanged() == set()  # n3 is left out since the last call
    assert site.trainer.unchanged() == {site.id}
    for path in site.home.excluded_nodes.iterdir():
        path.unlink()
    assert site.trainer.unchanged() == set()
    for _ in range(2):
        assert site.trainer.status(site.id).reason == "Resources"
        assert [each.exclude for each in site.scheduler.commands] == [[], ["n3"], []]
    assert read_handover(site.journal).restarts == 1
    assert site.trainer.unchanged() == {site.id}


def test_nothing_is_said_of_other_nodes_where_all_jobs_run_on_one_host(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.trainer.resources = Resources(host=this_host())
    assert site.end("NODE_FAIL", node="n3").state == "queued"
    assert site.scheduler.commands[-1].exclude == [] and len(site.scheduler.commands) == 2
    told = " ".join(explain(site.home, site.id)["why"])
    assert "(n3): NODE_FAIL; started again here" in told and "left out" not in told


def test_an_exclusion_ends(tmp_path: Path) -> None:
    assert exclude_node(tmp_path, "n1", 60, "bad", "job-1")
    assert exclude_node(tmp_path, "n2", 1e-9, "bad", "job-1")
    time.sleep(0.001)
    assert [node.node for node in excluded_nodes(tmp_path)] == ["n1"]
    (tmp_path / "n1.json").write_text("torn")
    assert excluded_nodes(tmp_path) == [] and not list(tmp_path.iterdir())
    assert not exclude_node(tmp_path, "../n1", 60, "no node's name", "job-1")


def test_a_lost_network_is_tried_again_after_a_pause(tmp_path: Path) -> None:
    site = Site(tmp_path, pause=3000.0)
    status = site.end(rank="Connection closed by peer")
    assert (status.state, len(site.scheduler.commands)) == ("queued", 1)
    seconds, _, why = status.reason.removeprefix("starts again in ").partition(" s: ")
    assert 2400 < int(seconds) <= 3000 and "the ranks lost each other (n7)" in why
    assert "the ranks lost each other" in read_status(site.home, site.id).reason
    assert len(site.verdicts) == 1
    site.trainer.status(site.id)
    assert len(site.verdicts) == 1 and len(site.scheduler.commands) == 1
    note = site.journal.folder / "scheduler.json"
    due = read_handover(site.journal).model_copy(update={"due": time.time() - 1})
    note.write_text(due.model_dump_json())
    assert site.trainer.status(site.id).state == "queued"
    assert len(site.scheduler.commands) == 2 and read_handover(site.journal).restarts == 1


def test_memory_that_was_used_up_makes_micro_batches_smaller_and_changes_no_id(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    before = site.journal.spec()
    sizes = []
    for _ in range(MAX_RESTARTS + 1):
        status = site.end("OUT_OF_MEMORY", 137)
        sizes.append(site.journal.microbatch)
    assert sizes == [2048, 1024, 512, 512] and status.state == "failed"
    assert site.journal.spec() == before and before.id == site.id
    assert "a node's memory was used up" in (status.error or "")
    assert "2048 tokens a micro-batch" in site.verdicts[0]["done"]


def test_a_programs_own_error_ends_the_job_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path)
    status = site.end(rank=f"{TRACEBACK}ValueError: too many values to unpack")
    assert status.state == "failed" and len(site.scheduler.commands) == 1
    assert "ValueError: too many values to unpack" in (status.error or "")
    assert site.verdicts[0]["done"] == "given up"
    told = explain(site.home, site.id)
    assert told["state"] == "failed" and "mend the cause" in told["next"]


def test_what_a_start_did_is_not_blamed_on_the_next_one(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.journal.log.write_text("torch.OutOfMemoryError: CUDA out of memory\n")
    site.end("NODE_FAIL", node="n1")
    site.end(code=1)  # without a word
    assert [event["cause"] for event in site.verdicts] == ["node", "unknown"]


def test_slurm_that_cancels_a_job_for_another_is_no_user_who_does(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.journal.log.open("a") as log:
        log.write("slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 1 DUE TO PREEMPTION ***\n")
    site.scheduler.end = CommandStatus(state="cancelled", exit_code=143)
    assert site.trainer.status(site.id).state == "queued"
    assert [event["cause"] for event in site.verdicts] == ["preempted"]
    site.scheduler.end = CommandStatus(state="cancelled", exit_code=143)  # nothing new in its log
    assert site.trainer.status(site.id).state == "cancelled"


def test_a_job_that_is_asked_to_leave_says_so_until_it_has_left(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.journal.claim_attempt()
    site.scheduler.end = CommandStatus(state="running", id="1")
    site.trainer.status(site.id)
    order = site.home.slurm / LEDGER / site.id / "1.preempted"
    why = {"why": "serving is 2 nodes short", "time": time.time()}
    durable.create_file(order, checksums.with_crc(canonical(why)))
    told = " ".join(explain(site.home, site.id)["why"])
    assert "to save and leave its nodes: serving is 2 nodes short." in told
    assert site.end("PREEMPTED: serving is 2 nodes short", code=75).state == "queued"
    (noted,) = site.verdicts
    assert noted["cause"] == "preempted" and "serving is 2 nodes short" in noted["message"]


def test_the_pending_reason_reaches_status_and_why(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.scheduler.reason = "AssocGrpGRES"
    assert site.trainer.status(site.id).reason == "AssocGrpGRES"
    assert read_status(site.home, site.id).reason == "AssocGrpGRES"
    told = explain(site.home, site.id[:8])
    assert "limit of your account" in told["why"][1] and "AssocGrpGRES" in told["why"][1]
    assert describe_reason("SomethingNew")[0] == "SomethingNew"
    site.scheduler.reason = ""
    site.journal.claim_attempt()
    site.scheduler.end = CommandStatus(state="running")
    assert site.trainer.status(site.id).reason == ""
    assert read_status(site.home, site.id).state == "running"
