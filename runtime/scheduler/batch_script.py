"""Batch script: the bash text that runs a command as a Slurm job.

Called by `slurm.py`, and shown by `jobs show --script`. Tests compare its text. The command always
runs under `srun`, also on one node; but a person's script (kind `script`) runs where it is, as by
sbatch. Besides starting the command, the batch script does this:

- It claims a start by exclusive create. A controller that is killed within seconds of starting a
  job may start the same job again; the second start finds the claim and ends with 75.
- On a private cluster, all of the command's processes hold a lock. A new job of the same name
  waits until the last process of the old one is gone.
- It loads the site's modules, does its prolog, and gives the tasks its variables.
- It outlives SIGTERM. Slurm sends the signal to the tasks, before the time limit as at the end, so
  that they can checkpoint. It is not passed on: an srun that gets it kills its tasks at once.
  Only a person's script gets it from here, and a file notes that.
- With spare nodes it starts the command on each node in a step of its own, which the loss of
  another node does not end. It tells the tasks which nodes there are, and who has left.
- It publishes the exit code as a file, because Slurm forgets ended jobs after minutes.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from cray_agents.config.job_section import JobSettings
from cray_agents.errors import SchedulerError
from cray_agents.ports import Command
from cray_agents.runtime.scheduler.site_environment import (
    command_variables,
    preparation,
    srun_container_options,
    task_argv,
)

LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")  # days-hours:minutes:seconds
REFUSED = 75  # EX_TEMPFAIL: this start was refused, nothing ran

BODY = """
claim="$ledger/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
if ! (set -o noclobber; : > "$claim.started") 2> /dev/null; then
    echo "job $SLURM_JOB_ID was started before: refused" >&2
    exit 75
fi
end() {
    echo "$1" > "$claim.draft" && mv "$claim.draft" "$claim.ended"
    exit "$1"
}
"""

#: Each task takes the lock for itself: it is no child of the script.
LOCK = """\
exec 9> "$lock"
if ! flock --timeout 20 9; then
    echo "processes of an earlier job of this name are alive: refused" >&2
    exit 75
fi
flock --shared 9
"""
TASK_LOCK = """\
exec 9> {lock}
flock --shared --timeout 20 9 || exit 75
"""

#: Slurm numbers a private cluster's GPUs from 0; a task gets their ids.
TASK_GPUS = """\
gpus=({gpus})
ids=()
for number in ${{CUDA_VISIBLE_DEVICES//,/ }}; do ids+=("${{gpus[number]}}"); done
export CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${{ids[*]}}")"
"""

END = """\
child=$!
wait "$child"
code=$?
while [ -n "$again" ]; do
    again=
    wait "$child"
    code=$?
done
[ "$code" -ge 0 ] || code=143  # bash forgets the code of a child that the same SIGTERM ended
end "$code"
"""


#: Of a job with spare nodes. Of a node that was lost srun says 0.
EACH_NODE = """\
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export RANKS_NODES="${{nodes[*]}}" RANKS_SPARES={spares} RANKS_FOLDER="$claim.nodes"
mkdir "$RANKS_FOLDER"
on_node() {{
    trap "" TERM
    srun --nodelist="$1" {start}
    code=$?
    [ -e "$RANKS_FOLDER/ended-$1" ] && exit "$code"
    : > "$RANKS_FOLDER/left-$1"
    [ "$code" = 75 ] && exit 75
    exit 1
}}
trap again=1 TERM
children=()
for node in "${{nodes[@]}}"; do
    on_node "$node" &
    children+=("$!")
done
"""
END_EACH = """\
codes=" "
for child in "${children[@]}"; do
    again=1
    while [ -n "$again" ]; do
        again=
        wait "$child"
        code=$?
    done
    codes+="$code "
done
case "$codes" in *" 75 "*) end 75 ;; *" 0 "*) end 0 ;; *) end 1 ;; esac
"""


def batch_script(
    command: Command,
    ledger: Path,
    lock: Path | None = None,
    gpus: Sequence[str] = (),
    settings: JobSettings | None = None,
    options: Sequence[str] = (),
) -> str:
    """Return the script for the stdin of `sbatch`.

    Args:
        ledger: the command's own folder on the shared root, for claims and exit codes.
        lock: a file on a private cluster's host.
        gpus: the ids of a private cluster's GPUs, in Slurm's order.
        settings: the site's `[job]`.
        options: the site's options of sbatch for all commands. Those of the command's kind and its
            own come after them, and win.

    Raises SchedulerError for a command that cannot run.
    """
    settings = settings or JobSettings()
    if command.nodes < 1 or command.ranks % command.nodes:
        raise SchedulerError(
            f"{command.name}: {command.ranks} ranks do not divide over {command.nodes} nodes"
        )
    if command.spare_nodes and settings.tasks == "rank":
        raise SchedulerError(
            f"{command.name}: spare_nodes need one launcher a node: leave them out, or set"
            " tasks = 'node' in [job]"
        )
    options = [*options, *settings.slurm_options.get(command.kind, []), *command.slurm_options]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{option}" for option in sbatch_options(command, settings.gpu_type, options)),
        *(f"#SBATCH {quote_option(option)}" for option in options),
        "",
    ]
    variables = command_variables(settings, command)
    lines += [f"export {key}={shlex.quote(value)}" for key, value in sorted(variables.items())]
    lines.append(f"ledger={shlex.quote(str(ledger))}")
    if lock:
        lines.append(f"lock={shlex.quote(str(lock))}")
    start, on_term = task_argv_of(command, settings, lock, gpus), "again=1"
    if command.kind == "script":
        on_term = """'again=1; : > "$claim.term"; kill -TERM "$child" 2> /dev/null'"""
    else:
        start = [*srun_argv(command, settings, bind=lock is None), *start]
    run = f"again=\ntrap {on_term} TERM\n{shlex.join(start)} &\n{END}"
    if command.spare_nodes:
        run = EACH_NODE.format(spares=command.spare_nodes, start=shlex.join(start[1:])) + END_EACH
    return (
        "\n".join(lines)
        + BODY
        + (LOCK if lock else "")
        + preparation(settings)
        + 'export RANKS_START="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$(date +%s%N)"\n'
        + run
    )


def task_argv_of(
    command: Command, settings: JobSettings, lock: Path | None, gpus: Sequence[str]
) -> list[str]:
    """Return a task's argv; on a private cluster it first takes the lock, and names its GPUs."""
    argv = task_argv(settings, command)
    if lock is None:
        return argv
    text = TASK_LOCK.format(lock=shlex.quote(str(lock)))
    if command.gpus and gpus:
        text += TASK_GPUS.format(gpus=shlex.join(gpus))
    return ["/bin/bash", "-c", f'{text}exec "$@"', "task", *argv]


def sbatch_options(
    command: Command, gpu_type: str | None = None, given: Sequence[str] = ()
) -> list[str]:
    """Return sbatch's options for the resources, the time limit and the output.

    A person's script names its own resources, in its #SBATCH lines or when it is submitted. They
    are among those `given` to sbatch, which win.
    """
    ranks_per_node = command.ranks // command.nodes
    options, to_script = [f"job-name={command.name}"], command.kind == "script"
    nodes = command.nodes + command.spare_nodes
    if not to_script:
        options += [
            f"nodes={nodes}",
            f"ntasks={nodes * ranks_per_node}",
            f"ntasks-per-node={ranks_per_node}",
            f"cpus-per-task={command.cpus_per_rank}",
            *(["no-kill"] if command.spare_nodes else []),
        ]
    if command.gpus:
        options.append(f"gpus-per-node={f'{gpu_type}:' if gpu_type else ''}{ranks_per_node}")
    if command.minutes:
        options.append(f"time={command.minutes}")
    return [
        *options,
        f"signal={'B:' if to_script else ''}TERM@{notice_seconds(command, given)}",
        f"chdir={quote_path(command.directory)}",
        f"output={quote_path(command.log.replace('%', '%%'))}",
        "open-mode=append",
        "no-requeue",
    ]


def notice_seconds(command: Command, given: Sequence[str] = ()) -> int:
    """Return the seconds before a command's time limit at which its tasks get SIGTERM.

    At most half of the limit, its own or that of an option `given` to sbatch. Also without a limit
    of its own: the partition may have one.
    """
    wanted = command.notice_seconds or 60
    limits = [_seconds(option[7:]) for option in given if option.startswith("--time=")]
    limit = limits[-1] if limits else 60 * (command.minutes or 0)
    return max(1, min(wanted, limit // 2)) if limit else wanted


def _seconds(limit: str) -> int:
    """Return the seconds of a time limit as sbatch takes it; 0: none."""
    if (match := LIMIT.fullmatch(limit)) is None:  # such as UNLIMITED
        return 0
    days, *clock = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:  # minutes, or minutes:seconds
        clock = [0, *clock[:2]]
    hours, minutes, seconds = clock
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def quote_option(option: str) -> str:
    """Quote an option's value for an #SBATCH line."""
    name, equals, value = option.partition("=")
    return f"{name}={quote_path(value)}" if equals else option


def quote_path(path: str) -> str:
    """Quote a path for an #SBATCH line. Raises SchedulerError for a line break."""
    if "\n" in path:
        raise SchedulerError(f"a path with a line break cannot be given to Slurm: {path!r}")
    plain = path.replace("/", "").replace("-", "").replace(".", "").replace("_", "")
    return path if plain.isalnum() else '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


def srun_argv(command: Command, settings: JobSettings, *, bind: bool) -> list[str]:
    """Return the srun that starts a command's tasks: one a node, or one a rank.

    With spare nodes it starts those of one node. `bind`: bind tasks to cores; a private cluster
    cannot.
    """
    ranks = command.ranks // command.nodes
    tasks = ranks if settings.tasks == "rank" and command.kind != "replica" else 1
    nodes = 1 if command.spare_nodes else command.nodes
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={tasks * nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={ranks // tasks * command.cpus_per_rank}",
        *([f"--cpu-bind={settings.cpu_bind}"] if bind else []),
        "--quiet",
        "--kill-on-bad-exit=1",
        "--export=ALL",
        *srun_container_options(settings.container, command.directory),
    ]
