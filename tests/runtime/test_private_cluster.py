"""A private Slurm cluster serves its user and root, nobody else, and no other host."""

import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cray_agents.errors import SetupError
from cray_agents.runtime.scheduler.choose import open_scheduler
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import clean_environment, missing_programs
from cray_agents.trainers.job.launch import RankPlacement, listen_for_ranks
from tests.support.strangers import listeners

#: A platform's process: a cluster in the folder named, until its standard input ends.
PLATFORM = """
import sys
from pathlib import Path
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
cluster = PrivateCluster(Path(sys.argv[1]), nodes=2, cpus=2, gpus=[])
cluster.start()
print("up", flush=True)
sys.stdin.read()
cluster.close()
"""
PROBE = """
import subprocess, sys
import cray_agents.errors
subprocess.run([sys.executable, "-c", ""], check=True)
"""
CLIENTS = {"srun": ["srun", "/bin/sh"], "sbatch": ["sbatch", "--wait", "--output=/dev/null"]}


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("slurm") and (missing := missing_programs()):
        pytest.skip(f"Slurm is not installed: {missing}")


@pytest.fixture
def two_users() -> tuple[pwd.struct_passwd, pwd.struct_passwd]:
    """Two that every Unix has, and that are not root."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as two other users")
    first, second, *_ = sorted(
        (user for user in pwd.getpwall() if user.pw_uid and user.pw_gid), key=lambda u: -u.pw_uid
    )
    return first, second


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one, which everybody may enter and write in."""
    made = Path("/tmp") / f"cray-two-users-{os.getpid()}"
    made.mkdir()
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


def acting_as(user: pwd.struct_passwd, *argv: str) -> list[str]:
    """What runs argv as another user, with none of root's powers."""
    ids = [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    return ["setpriv", *ids, "--", *argv]


def starting_as(user: pwd.struct_passwd, *argv: str) -> list[str]:
    """The same for this interpreter, which may lie where only root can read it."""
    command = acting_as(user, sys.executable, *argv)
    probe = acting_as(user, sys.executable, "-c", PROBE)
    if subprocess.run(probe, capture_output=True, check=False, cwd="/").returncode:
        # to read is all it is used for: what is asked here is what the other user can do
        command[1:1] = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    return command


@pytest.mark.slurm
def test_another_user_runs_nothing_in_it(
    two_users: tuple[pwd.struct_passwd, pwd.struct_passwd], folder: Path
) -> None:
    owner, other = two_users
    home = folder / "slurm"
    marks = folder / "marks"
    for made in (home, marks):
        made.mkdir()
        os.chown(made, owner.pw_uid, owner.pw_gid)
    marks.chmod(0o777)

    def ran(user: pwd.struct_passwd, client: str, mark: str) -> tuple[int | None, str]:
        """Whose process the cluster ran for a user, if any, and what the client said."""
        done = subprocess.run(
            acting_as(user, *CLIENTS[client]), input=f"#!/bin/sh\ntouch {marks}/{mark}\n", cwd="/",
            env=clean_environment({"SLURM_CONF": str(folder / "conf"), "HOME": "/"}),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        made = marks / mark
        return (made.stat().st_uid if made.exists() else None), done.stderr

    with subprocess.Popen(
        starting_as(owner, "-c", PLATFORM, str(home)), env=clean_environment({"HOME": "/"}),
        cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as platform:  # fmt: skip
        assert platform.stdout and platform.stdout.readline() == "up\n"
        scratch = (home / "run").readlink()
        assert scratch.stat().st_uid == owner.pw_uid
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
        # Others could learn what stands in it, so this one does.
        shutil.copy(home / "slurm.conf", folder / "conf")
        (folder / "conf").chmod(0o644)
        for client in CLIENTS:
            assert ran(owner, client, f"own-{client}")[0] == owner.pw_uid
        whose, said = ran(other, "sbatch", "others")  # srun would ask for ten seconds
        assert whose is None
        assert "munge.sock" in said and "Permission denied" in said
        # And if the socket were open to all, as elsewhere munged's is.
        scratch.chmod(0o755)
        for client in CLIENTS:
            whose, said = ran(other, client, f"open-{client}")
            assert whose is None
            assert "group not permitted" in said, said
        assert ran(owner, "srun", "own-still")[0] == owner.pw_uid
        assert platform.stdin
        platform.stdin.close()
        assert platform.wait() == 0


def addresses(pid: int) -> set[str]:
    """Where a process and those below it listen."""
    return {one.place[0] for one in listeners(pid) if isinstance(one.place, tuple)}


@pytest.mark.slurm
def test_only_drained_nodes_are_resumed(tmp_path: Path) -> None:
    cluster = PrivateCluster(tmp_path / "slurm", nodes=3, gpus=[])
    cluster.start()
    try:
        for node, state in zip(cluster.nodes, ("drain", "down"), strict=False):
            words = ("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")
            subprocess.run(words, env=cluster.environment, check=True)
        cluster.resume_drained()
        shown = subprocess.run(
            ("sinfo", "-h", "-N", "-o", "%N %t"),
            env=cluster.environment, check=True, capture_output=True, text=True,
        )  # fmt: skip
        states = dict(line.rstrip("*").split() for line in shown.stdout.splitlines())
        assert [states[node] for node in cluster.nodes] == ["idle", "down", "idle"]
    finally:
        cluster.close()


@pytest.mark.slurm
def test_its_daemons_and_clients_listen_on_loopback_alone(tmp_path: Path) -> None:
    cluster = PrivateCluster(tmp_path / "slurm", nodes=2)
    cluster.start()
    try:
        daemons = addresses(cluster.pid)
        with subprocess.Popen(
            ["srun", "sh", "-c", "echo up; read line"], env=cluster.environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as client:  # fmt: skip
            assert client.stdout and client.stdout.readline() == "up\n"
            clients = addresses(client.pid)
            client.communicate("\n")
    finally:
        cluster.close()
    assert daemons and clients
    assert all(address.startswith("127.") for address in daemons | clients)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_jobs_ranks_on_its_virtual_nodes_meet_on_loopback(host: str) -> None:
    with listen_for_ranks(RankPlacement(node=0, nodes=2, world=2, host=host, port=0)) as listener:
        assert listener.getsockname()[0] == host


@pytest.mark.slurm
@pytest.mark.parametrize(("name", "said"), [("192.0.2.7", "leads to 192.0.2.7"), ("", "nowhere")])
def test_a_host_whose_name_leads_elsewhere_has_none(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name or "a.name.invalid")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    with pytest.raises(SetupError, match=f"{said}.*/etc/hosts"):
        open_scheduler("slurm", tmp_path / "slurm")
    with open_scheduler("auto", tmp_path / "slurm") as local:
        assert isinstance(local, LocalProcesses)
        assert "/etc/hosts" in local.reason


@pytest.mark.slurm
def test_a_user_without_a_name_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_123_456_789)
    with pytest.raises(SetupError, match="user 4123456789 has no name"):
        PrivateCluster(tmp_path / "slurm").start()
