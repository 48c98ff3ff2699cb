"""The Slurm scheduler: the batch script, several nodes, GPUs, a controller that dies."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cray_agents.config import Config
from cray_agents.config.job_section import SLURM_OWN, JobContainer, JobSettings
from cray_agents.errors import BadInput, SchedulerError, SetupError
from cray_agents.ports import Command, CommandStatus
from cray_agents.runtime.scheduler import choose, site_environment
from cray_agents.runtime.scheduler import slurm as slurm_scheduler
from cray_agents.runtime.scheduler.batch_script import batch_script
from cray_agents.runtime.scheduler.choose import configured_scheduler, open_scheduler
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import missing_programs, with_shared_root
from cray_agents.runtime.scheduler.slurm import NodeRoom, Slurm, read_node
from tests.support.waiting import wait_until

slurm = pytest.mark.slurm
BARE = JobSettings(inherit=[])


@pytest.fixture
def home(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    if request.node.get_closest_marker("slurm") and (missing := missing_programs()):
        pytest.skip(f"Slurm is not installed: {missing}")
    return tmp_path / "a home" / "slurm"


def command(folder: Path, script: str, name: str = "job", **options: object) -> Command:
    folder.mkdir(parents=True, exist_ok=True)
    return Command(
        name=name,
        argv=["/bin/bash", "-c", script],
        directory=str(folder),
        log=str(folder / f"{name}.log"),
        **options,
    )


def end_of(scheduler: Slurm | LocalProcesses, name: str = "job") -> CommandStatus:
    wait_until(lambda: scheduler.status(name).state not in ("queued", "running"))
    return scheduler.status(name)


TRAIN = Command(
    name="train-1",
    argv=["python", "-m", "train", "a b"],
    directory="/home/me/my work",
    log="/logs/50%.txt",
    environment={"B": "2", "A": "it's"},
    nodes=2,
    ranks=4,
    cpus_per_rank=3,
    gpus=True,
    minutes=90,
)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ranks": 3}, "divide"),
        ({"environment": {"A;B": "1"}}, "environment"),
        ({"log": "/a\nb"}, "line break"),
    ],
)
def test_what_no_script_can_say_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(SchedulerError, match=said):
        batch_script(TRAIN.model_copy(update=wrong), Path("/l"))


@pytest.mark.parametrize(
    ("minutes", "wanted", "seconds"),
    [(1, None, 30), (90, None, 60), (None, 900, 900), (240, 900, 900), (20, 900, 600)],
)
def test_notice_is_at_most_half_of_the_time(
    minutes: int | None, wanted: int | None, seconds: int
) -> None:
    timed = TRAIN.model_copy(update={"minutes": minutes, "notice_seconds": wanted})
    assert f"#SBATCH --signal=TERM@{seconds}\n" in batch_script(timed, Path("/l"))


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("1", 30), ("0:20", 10), ("2:30", 60), ("1:00:00", 60), ("1-0", 60), ("0-0:1", 30), ("x", 60),
     ("0", 60)],
)  # fmt: skip
def test_notice_fits_the_limit_of_a_scripts_own_lines(limit: str, seconds: int) -> None:
    options = ["--time=5-0", f"--time={limit}"]  # the last one wins
    script = TRAIN.model_copy(update={"kind": "script", "slurm_options": options, "minutes": None})
    assert f"#SBATCH --signal=B:TERM@{seconds}\n" in batch_script(script, Path("/l"))


def test_a_signal_to_script_and_task_together_leaves_their_exit_code(tmp_path: Path) -> None:
    """As Slurm sends it to all processes of a job. The script notes it, and its end is told."""
    text = batch_script(
        command(tmp_path, "echo up; exec sleep 60").model_copy(update={"kind": "script"}), tmp_path
    )
    for number in range(6):
        environment = {**os.environ, "SLURM_JOB_ID": str(number)}
        argv = ["/bin/bash", "-c", text]
        with subprocess.Popen(
            argv, env=environment, stdout=-1, stderr=-1, cwd=tmp_path, start_new_session=True
        ) as batch:
            assert batch.stdout and batch.stdout.readline() == b"up\n"
            os.killpg(batch.pid, signal.SIGTERM)
            assert batch.wait(120) == 143
        assert (tmp_path / f"{number}.0.ended").read_text() == "143\n"
        assert (tmp_path / f"{number}.0.term").exists()


def test_a_site_decides_how_jobs_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_IB_HCA": "mlx5", "FI_PROVIDER": "cxi", "HF_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    site = JobSettings(
        environment={"B": "site's", "NCCL_DEBUG": "INFO"},
        fabric="efa",
        modules=["cuda/12.9", "nccl"],
        prolog=["ulimit -l unlimited"],
        tasks="rank",
        cpu_bind="none",
        gpu_type="h200",
        slurm_options={"training": ["--qos=long"], "session": ["--qos=short"]},
    )
    lines = batch_script(TRAIN, Path("/l"), settings=site, options=["--qos=usual"]).splitlines()
    assert "#SBATCH --gpus-per-node=h200:2" in lines
    assert [line for line in lines if "qos" in line] == [  # of two, sbatch takes the last
        "#SBATCH --qos=usual",
        "#SBATCH --qos=long",
    ]
    exports = dict(line[7:].split("=", 1) for line in lines if line.startswith("export "))
    assert (exports["B"], exports["NCCL_DEBUG"], exports["FI_PROVIDER"]) == (
        "'site'\"'\"'s'",
        "INFO",
        "cxi",
    )
    assert (exports["NCCL_IB_HCA"], exports["FI_EFA_FORK_SAFE"]) == ("mlx5", "1")
    assert not {"HF_TOKEN", "CUDA_VISIBLE_DEVICES"} & set(exports)
    (load,) = [n for n, line in enumerate(lines) if line.startswith("module load cuda/12.9 nccl")]
    start = (
        "srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=3 --cpu-bind=none"
        " --quiet --kill-on-bad-exit=1 --export=ALL python -m train 'a b' &"
    )
    assert load < lines.index("ulimit -l unlimited") < lines.index(start)
    cpu = batch_script(TRAIN.model_copy(update={"gpus": False}), Path("/l"), settings=BARE)
    assert "NCCL" not in cpu


def test_tasks_run_in_the_sites_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/host")
    image = JobContainer(image="/images/train.sqsh", mounts=["/data:/data:ro"], python="/py")
    site = with_shared_root(JobSettings(container=image), "/shared")
    own = TRAIN.model_copy(update={"argv": [sys.executable, "-m", "train"]})
    pyxis = batch_script(own, Path("/l"), settings=site)
    assert (
        " --export=ALL --container-image=/images/train.sqsh"
        " --container-mounts=/shared:/shared,/data:/data:ro"
        " '--container-workdir=/home/me/my work' /py -m train &\n"
    ) in pyxis
    assert "/of/the/host" not in pyxis
    other = site.container.model_copy(update={"runtime": "apptainer"})
    apptainer = batch_script(own, Path("/l"), settings=site.model_copy(update={"container": other}))
    assert (
        "--export=ALL apptainer exec --nv --bind=/shared:/shared --bind=/data:/data:ro"
        " '--pwd=/home/me/my work' /images/train.sqsh /py -m train &\n"
    ) in apptainer


def test_the_room_of_nodes_is_read_with_and_without_gpus() -> None:
    """Lines as sinfo of 22.05 prints them; those of GPUs after its manual."""
    assert read_node("127.0.0.1  idle  0/4/0/4  (null)  gpu:0") == NodeRoom("127.0.0.1", 4, 4)
    busy = read_node("n1 mix 24/72/0/96 gpu:h200:8(S:0-1),shard:4 gpu:h200:6(IDX:0-5),shard:0")
    assert busy == NodeRoom("n1", 96, 72, 8, 2)
    assert read_node("n2 drain* 0/0/96/96 gpu:8 gpu:0") is None


def test_what_the_script_sets_is_no_sites_to_set() -> None:
    script = batch_script(TRAIN, Path("/l"))
    options = [line[10:] for line in script.splitlines() if line.startswith("#SBATCH --")]
    assert {option.partition("=")[0] for option in options} <= set(SLURM_OWN)


def test_the_script_outlives_sigterm_and_refuses_a_second_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [[ $1 = --* ]]; do shift; done; exec "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    tasks = "echo up; while [ ! -e stop ]; do sleep 0.05; done; exit 9"
    script = batch_script(command(tmp_path, tasks), tmp_path)
    environment = {**os.environ, "SLURM_JOB_ID": "7"}
    argv = ["/bin/bash", "-c", script]
    with subprocess.Popen(argv, env=environment, stdout=-1, cwd=tmp_path) as batch:
        assert batch.stdout
        batch.stdout.readline()
        batch.send_signal(signal.SIGTERM)  # to the script alone: an srun would kill its tasks
        with pytest.raises(subprocess.TimeoutExpired):
            batch.wait(0.3)
        (tmp_path / "stop").touch()
        assert batch.wait(120) == 9
    assert (tmp_path / "7.0.ended").read_text() == "9\n"
    again = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (75, "")
    assert "refused" in again.stderr


@slurm
@pytest.mark.parametrize("nodes", [1, 2])
def test_tasks_get_slurms_early_signal_and_have_time(home: Path, nodes: int) -> None:
    cluster = PrivateCluster(home, nodes=nodes, cpus=1)
    cluster.start()
    both = f"until [ $(grep -c ^saved job.log) = {nodes} ]; do sleep 0.05; done"
    # a task that ends with an error has Slurm kill the others: the first one ends last
    others = 'for task in $(sed -n "s/^up //p" job.log); do'
    others += " while [ $task != $$ ] && [ -e /proc/$task ]; do sleep 0.05; done; done"
    end = f"[ $SLURM_PROCID = 0 ] || exit 0; {others}; exit 9"
    script = f"trap 'sleep 0.5; echo saved; {both}; {end}' TERM; echo up $$"
    script += "; while :; do sleep 0.05; done"
    with Slurm(home, cluster) as scheduler:
        wanted = command(home, script, nodes=nodes, ranks=nodes)
        job = scheduler.submit(wanted)
        log = Path(wanted.log)
        wait_until(lambda: log.exists() and log.read_text().count("up") == nodes)
        signal_tasks = ["scancel", "--signal=TERM", job]  # as --signal=TERM@60 does
        subprocess.run(signal_tasks, env=cluster.environment, check=True)
        assert end_of(scheduler).exit_code == 9
    assert log.read_text().count("saved") == nodes


@slurm
def test_modules_variables_and_tasks_of_a_real_job(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules" / "init" / "bash"
    modules.parent.mkdir(parents=True)
    modules.write_text('module() { export LOADED="$*"; [ "$2" != none/1 ]; }\n')
    monkeypatch.setenv("MODULESHOME", str(tmp_path / "modules"))
    site = JobSettings(
        environment={"SITE": "a 'b'"},
        modules=["cuda/12.9"],
        prolog=['export BEFORE="$SITE on $(hostname)"'],
        tasks="rank",
    )
    cluster = PrivateCluster(home, nodes=2, cpus=2)
    cluster.start()
    script = 'echo "$SLURM_PROCID|$LOADED|$BEFORE|$SITE"'
    with Slurm(home, cluster, settings=site) as scheduler:
        wide = command(home, script, nodes=2, ranks=4)
        scheduler.submit(wide)
        assert end_of(scheduler).state == "succeeded"
        text = f"load cuda/12.9|a 'b' on {socket.gethostname()}|a 'b'"
        lines = sorted(Path(wide.log).read_text().splitlines())
        assert lines == [f"{task}|{text}" for task in range(4)]
    missing = site.model_copy(update={"modules": ["none/1"]})
    with LocalProcesses(tmp_path / "local", settings=site) as local:
        local.submit(alone := command(tmp_path, 'echo "$LOADED|$BEFORE|$SITE"', "alone"))
        assert end_of(local, "alone").state == "succeeded"
        assert Path(alone.log).read_text() == text + "\n"
        with pytest.raises(SchedulerError, match="leave slurm_options out"):
            local.submit(command(tmp_path, "true", "other", slurm_options=["--qos=long"]))
    with LocalProcesses(tmp_path / "local", settings=missing) as local:
        local.submit(alone := command(tmp_path, "true", "without"))
        assert end_of(local, "without").exit_code == 1
        assert "module load failed" in Path(alone.log).read_text()


@pytest.mark.slow
@slurm
def test_several_nodes_and_gpus(home: Path) -> None:
    cluster = PrivateCluster(home, nodes=2, cpus=4, gpus=["0", "1"])
    cluster.start()
    with Slurm(home, cluster) as scheduler:
        script = 'echo "$SLURM_PROCID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $SLURM_CPUS_PER_TASK"'
        wide = command(home, script, nodes=2, ranks=4, cpus_per_rank=2, gpus=True)
        late = "sleep $((SLURM_PROCID * 3)); exit $((SLURM_PROCID * 5))"  # the other is not ended
        bad = command(home, late, "bad", nodes=2, ranks=2)
        scheduler.submit(wide)
        scheduler.submit(bad)
        assert end_of(scheduler).state == "succeeded"
        lines = sorted(Path(wide.log).read_text().splitlines())
        assert lines == ["0 127.0.0.1 0,1 4", "1 127.0.0.2 0,1 4"]
        assert end_of(scheduler, "bad").exit_code == 5  # the worst rank's


@slurm
def test_excluded_nodes_are_left_out_as_far_as_others_are_left(home: Path) -> None:
    cluster = PrivateCluster(home, nodes=2, cpus=2)
    cluster.start()
    first, second = cluster.nodes
    with Slurm(home, cluster) as scheduler:
        where = "echo $SLURMD_NODENAME"
        lone = command(home, where, exclude=[first, "no-node-of-this-cluster"])
        neither = command(home, where, "neither", exclude=[second, first])  # the first one counts
        wide = command(home, where, "wide", nodes=2, ranks=2, exclude=[first])
        for each in (lone, neither, wide):
            scheduler.submit(each)
            assert end_of(scheduler, each.name).state == "succeeded"
        shown = [Path(each.log).read_text().split() for each in (lone, neither, wide)]
        assert [sorted(nodes) for nodes in shown] == [[second], [first], [first, second]]

        scheduler.submit(command(home, "echo up; sleep 60", "lost", exclude=[first]))
        log = home / "lost.log"
        wait_until(lambda: log.exists() and "up" in log.read_text())
        environment = cluster.environment
        down = ["scontrol", "update", f"nodename={second}", "state=down", "reason=test"]
        subprocess.run(down, env=environment, check=True)
        ended = end_of(scheduler, "lost")
        assert (ended.state, ended.node) == ("failed", second) and "NODE_FAIL" in ended.reason
        scheduler.submit(command(home, where, "after", exclude=[first]))  # the other one is down
        assert end_of(scheduler, "after").state == "succeeded"
        for name in ("long", "next"):
            scheduler.submit(command(home, "sleep 60", name, nodes=2, ranks=2, cpus_per_rank=2))
        wait_until(lambda: bool(scheduler.status("next").reason))
        assert scheduler.status("next").state == "queued"


@pytest.mark.slow
@slurm
def test_a_job_that_waits_may_begin_on_a_node_that_is_no_longer_left_out(home: Path) -> None:
    cluster = PrivateCluster(home, nodes=2, cpus=2)
    cluster.start()
    first = cluster.nodes[0]
    with Slurm(home, cluster) as scheduler:
        scheduler.submit(command(home, "sleep 60", "full", exclude=[first], cpus_per_rank=2))
        waits = command(home, "echo $SLURMD_NODENAME", exclude=[first])
        number = scheduler.submit(waits)
        wait_until(lambda: bool(scheduler.status(waits.name).reason))
        assert scheduler.submit(waits) == number  # leaves it out still
        time.sleep(3)  # Slurm looks every two seconds
        assert scheduler.status(waits.name).state == "queued"
        assert scheduler.submit(waits.model_copy(update={"exclude": []})) == number
        assert end_of(scheduler).state == "succeeded"
        assert Path(waits.log).read_text().split() == [first]
        assert scheduler.submit(command(home, "sleep 60", "full")) != number  # it runs: no change


@pytest.mark.slow
@slurm
def test_a_private_cluster_gives_each_gpu_to_one_job_by_its_id(home: Path) -> None:
    cluster = PrivateCluster(home, cpus=4, gpus=["5", "GPU-5f-12", "MIG-9a"])
    cluster.start()
    with Slurm(home, cluster) as scheduler:
        script = f"echo $CUDA_VISIBLE_DEVICES; while [ ! -e '{home}/stop' ]; do sleep 0.05; done"
        sizes = {"first": 1, "second": 2, "third": 3}
        jobs = [command(home, script, name, ranks=size, gpus=True) for name, size in sizes.items()]
        for each in jobs:
            scheduler.submit(each)
        begun = [Path(each.log) for each in jobs[:2]]
        wait_until(lambda: all(log.exists() and log.read_text() for log in begun))
        assert scheduler.status("third").state == "queued"
        (home / "stop").touch()
        assert [end_of(scheduler, name).state for name in sizes] == ["succeeded"] * 3
        shown = [Path(each.log).read_text().strip() for each in jobs]
        assert sorted(shown[0].split(",") + shown[1].split(",")) == ["5", "GPU-5f-12", "MIG-9a"]
        assert shown[2] == "5,GPU-5f-12,MIG-9a"


def test_gpus_are_divided_only_where_jobs_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    settings = {"home": tmp_path, "scheduler": "local", "train_gpu": "H100"}
    with configured_scheduler(Config.model_validate(settings), replicas=1) as local:
        assert local.gpus == ("5",)
    with configured_scheduler(Config.model_validate(settings)) as alone:
        assert alone.gpus == ("4", "5")
    split = settings | {"share_gpus": "split"}
    with pytest.raises(BadInput, match="need 3 GPUs, and this host has GPUs 4, 5"):
        configured_scheduler(Config.model_validate(split), replicas=2)
    with configured_scheduler(Config.model_validate(settings), replicas=2) as by_turns:
        assert isinstance(by_turns, LocalProcesses)
        assert by_turns.turns and by_turns.gpus == ("4", "5") and not local.turns
    monkeypatch.setattr(choose, "site_cluster", lambda: None)
    auto = settings | {"scheduler": "auto"}
    with configured_scheduler(Config.model_validate(auto), replicas=2) as chosen:
        assert isinstance(chosen, LocalProcesses) and "turns with replicas" in chosen.reason
    with pytest.raises(BadInput, match="a private Slurm starts jobs as soon as a GPU is free"):
        configured_scheduler(Config.model_validate(settings | {"scheduler": "slurm"}), replicas=2)
    assert Slurm(tmp_path).gpus is None  # a site's


@pytest.mark.slow
@slurm
def test_a_killed_controller_comes_back_and_loses_no_running_job(home: Path) -> None:
    with open_scheduler("slurm", home) as scheduler:
        assert isinstance(scheduler, Slurm)
        assert scheduler.cluster
        scheduler.submit(command(home, "echo up; sleep 2; echo down"))
        wait_until(lambda: (home / "job.log").exists() and "up" in (home / "job.log").read_text())
        children = ["ps", "--ppid", str(scheduler.cluster.pid), "-o", "pid=,comm="]
        rows = subprocess.run(children, capture_output=True, text=True, check=True).stdout
        (controller,) = [row.split()[0] for row in rows.splitlines() if "slurmctld" in row]
        os.kill(int(controller), signal.SIGKILL)
        state = end_of(scheduler).state
        text = (home / "job.log").read_text()
        assert text.count("up") == 1  # whatever the controller had saved: no second copy
        assert state in (["succeeded"] if "down" in text else ["failed", "unknown"])  # not saved
        scheduler.submit(command(home, "true", "next"))
        assert end_of(scheduler, "next").state == "succeeded"


@pytest.mark.slow
@slurm
def test_what_slurm_has_forgotten_is_read_from_the_ledger(home: Path) -> None:
    with open_scheduler("slurm", home) as scheduler:
        first = scheduler.submit(command(home, "exit 3"))
        end_of(scheduler)
    shutil.rmtree(home / "state")
    with open_scheduler("slurm", home) as scheduler:
        assert scheduler.status("job") == CommandStatus(state="failed", id=first, exit_code=3)
        assert int(scheduler.submit(command(home, "true"))) > int(first)


@pytest.mark.slow
@slurm
def test_auto_takes_a_site_then_a_private_cluster_then_processes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    with open_scheduler("auto", home) as private:
        assert isinstance(private, Slurm)
        assert private.cluster
        monkeypatch.setenv("SLURM_CONF", str(private.cluster.configuration))
        with open_scheduler("auto", home / "other") as site:
            assert isinstance(site, Slurm)
            assert site.cluster is None
            assert "answers" in site.reason
            site.submit(command(home, "sleep 0.3; echo $SLURM_JOB_NAME"))
        assert end_of(private).state == "succeeded"  # closing a site's scheduler ends no job
        monkeypatch.delenv("SLURM_CONF")
    (home / "state" / "clustername").write_text("somebody-elses")
    with open_scheduler("auto", home) as local:
        assert isinstance(local, LocalProcesses)
        assert "slurmctld did not come up" in local.reason
    with pytest.raises(SetupError, match="CLUSTER NAME MISMATCH"):
        open_scheduler("slurm", home)


@pytest.mark.slow
@slurm
def test_two_roots_at_a_site_keep_to_their_own_jobs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_scheduler("slurm", home) as private:
        assert isinstance(private, Slurm)
        assert private.cluster
        monkeypatch.setenv("SLURM_CONF", str(private.cluster.configuration))

        def opened(root: str, partition: str = "all") -> Slurm | LocalProcesses:
            settings = {"home": tmp_path / root, "slurm_options": [f"--partition={partition}"]}
            return configured_scheduler(Config.model_validate(settings))

        with opened("one") as one, opened("two") as two, opened("one", "none") as wrong:
            with pytest.raises(SchedulerError, match="partition"):
                wrong.submit(command(home, "true", "other"))
            first = one.submit(command(home, "sleep 60"))
            assert two.status("job").state == "unknown"
            assert two.submit(command(home, "exit 3")) != first
            assert end_of(two).exit_code == 3
            two.cancel("job")
            assert one.status("job").state in ("queued", "running")
            with opened("one") as again:  # of the same root, after a crash
                assert again.submit(command(home, "true")) == first
            one.cancel("job")
            assert end_of(one).state == "cancelled"


def test_a_client_that_is_killed_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal ended it: Slurm has refused nothing."""
    starts, squeue = tmp_path / "starts", tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\necho >> {starts}\n[ $(wc -l < {starts}) = 3 ] || kill -9 $$\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with Slurm(tmp_path / "slurm") as scheduler:
        assert scheduler.status("job").state == "unknown"
        monkeypatch.setattr(slurm_scheduler, "QUEUE_SECONDS", 0.0)
        monkeypatch.setattr(slurm_scheduler, "PATIENCE_SECONDS", 0.0)
        with pytest.raises(SchedulerError, match="squeue ended with -9"):
            scheduler.status("job")
    assert starts.read_text() == "\n" * 4


@pytest.mark.slow
def test_a_client_that_reads_late_gets_the_whole_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "squeue": "",
        "sbatch": f"sleep 1.2; cat > '{tmp_path}/got'; echo 7",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with Slurm(tmp_path / "slurm") as scheduler:
        long = command(tmp_path, "true", environment={"LONG": "x" * 200_000})  # more than a pipe
        assert scheduler.submit(long) == "7"
    got = (tmp_path / "got").read_text()
    assert "x" * 200_000 in got and got.endswith('end "$code"\n')


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(site_environment, "SBIN", ())
    assert set(missing_programs()) == set(site_environment.PROGRAMS)
    with pytest.raises(SetupError, match=r"slurmctld.*apt-get install"):
        open_scheduler("slurm", tmp_path)
    with open_scheduler("auto", tmp_path) as local:
        assert "Slurm is not installed here" in local.reason
