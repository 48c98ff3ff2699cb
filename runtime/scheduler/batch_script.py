"""Batch script: the bash text that runs a command as a Slurm job.

Called by `slurm.py`. Tests compare its text. Besides starting the command, the script does this:

- It claims a start by exclusive create. A controller that is killed within seconds of starting a
  job may start the same job again; the second start finds the claim and ends with 75.
- On a private cluster, all of the command's processes inherit a lock. A new job of the same name
  waits until the last process of the old one is gone.
- It passes on SIGTERM, which Slurm sends to the script alone 60 s before the time limit, so that
  the command can checkpoint. A cancelled command may get SIGTERM twice.
- It publishes the exit code as a file, because Slurm forgets ended jobs after minutes.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from cray_agents.errors import SchedulerError
from cray_agents.ports import Command

REFUSED = 75  # EX_TEMPFAIL: this start was refused, nothing ran
LOCK_SECONDS = 20

BODY = """
claim="$ledger/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
if ! (set -o noclobber; : > "$claim.started") 2> /dev/null; then
    echo "job $SLURM_JOB_ID was started before: refused" >&2
    exit 75
fi
"""

LOCK = """\
exec 9> "$lock"
if ! flock --timeout 20 9; then
    echo "processes of an earlier job of this name are alive: refused" >&2
    exit 75
fi
"""

#: Slurm numbers a private cluster's GPUs from 0; the command gets their ids.
GPU_IDS = """\
ids=()
for number in ${CUDA_VISIBLE_DEVICES//,/ }; do ids+=("${gpus[number]}"); done
export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${ids[*]}")"
"""

END = """\
child=$!
again=
trap 'again=1; kill -TERM "$child" 2> /dev/null' TERM
wait "$child"
code=$?
while [ -n "$again" ]; do
    again=
    wait "$child"
    code=$?
done
echo "$code" > "$claim.draft" && mv "$claim.draft" "$claim.ended"
exit "$code"
"""


def batch_script(
    command: Command, ledger: Path, lock: Path | None = None, gpus: Sequence[str] = ()
) -> str:
    """Return the script for the stdin of `sbatch`.

    Args:
        ledger: the command's own folder on the shared root, for claims and exit codes.
        lock: a file on a private cluster's host.
        gpus: the ids of a private cluster's GPUs, in Slurm's order.

    Raises SchedulerError for a command that cannot run.
    """
    if command.nodes < 1 or command.ranks % command.nodes:
        raise SchedulerError(
            f"{command.name}: {command.ranks} ranks do not divide over {command.nodes} nodes"
        )
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in sbatch_options(command)), ""]
    for key, value in sorted(command.environment.items()):
        if not key.isidentifier():
            raise SchedulerError(f"{command.name}: {key!r} cannot name an environment variable")
        lines.append(f"export {key}={shlex.quote(value)}")
    lines.append(f"ledger={shlex.quote(str(ledger))}")
    if lock:
        lines.append(f"lock={shlex.quote(str(lock))}")
    translation = ""
    if command.gpus and gpus:
        translation = f"gpus=({shlex.join(gpus)})\n{GPU_IDS}"
    start = f"{srun_prefix(command)}{shlex.join(command.argv)} &\n"
    return "\n".join(lines) + BODY + (LOCK if lock else "") + translation + start + END


def sbatch_options(command: Command) -> list[str]:
    """Return sbatch's options for the resources, the time limit and the output."""
    ranks_per_node = command.ranks // command.nodes
    options = [
        f"job-name={command.name}",
        f"nodes={command.nodes}",
        f"ntasks={command.ranks}",
        f"ntasks-per-node={ranks_per_node}",
        f"cpus-per-task={command.cpus_per_rank}",
    ]
    if command.gpus:
        options.append(f"gpus-per-node={ranks_per_node}")
    if command.minutes:
        options.append(f"time={command.minutes}")
        options.append(f"signal=B:TERM@{60 if command.minutes > 1 else 30}")
    return [
        *options,
        f"chdir={quote_path(command.directory)}",
        f"output={quote_path(command.log.replace('%', '%%'))}",
        "open-mode=append",
        "no-requeue",
    ]


def quote_path(path: str) -> str:
    """Quote a path for an #SBATCH line. Raises SchedulerError for a line break."""
    if "\n" in path:
        raise SchedulerError(f"a path with a line break cannot be given to Slurm: {path!r}")
    plain = path.replace("/", "").replace("-", "").replace(".", "").replace("_", "")
    return path if plain.isalnum() else '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


def srun_prefix(command: Command) -> str:
    """Return the srun that starts a command once on each of several nodes, or ""."""
    if command.nodes == 1:
        return ""
    cpus = command.ranks // command.nodes * command.cpus_per_rank
    return (
        f"srun --nodes={command.nodes} --ntasks={command.nodes} --ntasks-per-node=1 "
        f"--cpus-per-task={cpus} --kill-on-bad-exit=1 --export=ALL "
    )
