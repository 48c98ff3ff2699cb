"""`models`, `runs`, `jobs`, `export`: what lies on the shared root, platform or not.

Only `jobs pause` and `jobs resume` need the running platform: it is what starts jobs and ends them.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cray_agents.cli.running import client, running
from cray_agents.cli.screen import HomeOption, JsonOption, console, show, when
from cray_agents.config import load_config
from cray_agents.errors import BadInput, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.platform import Platform
from cray_agents.records import JobStatus, Run

RunId = Annotated[str, typer.Argument(help="As `runs list` shows it.")]
JobId = Annotated[str, typer.Argument(help="As `jobs list` shows it, or the scheduler's id.")]

models = typer.Typer(no_args_is_help=True, help="Model versions: list, show.")
runs = typer.Typer(no_args_is_help=True, help="Runs of agents: list, show.")
jobs = typer.Typer(no_args_is_help=True, help="Training jobs: list, logs, pause, resume.")


def add_to(app: typer.Typer) -> None:
    """Register the command groups."""
    app.add_typer(models, name="models")
    app.add_typer(runs, name="runs")
    app.add_typer(jobs, name="jobs")
    app.command()(export)


@models.command("list")
def list_models(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List every version of every name; the promoted one is what the bare name means."""
    rows = [row for name in model_names(root(home)) for row in version_rows(root(home), name)]
    show(rows, ["id", "promoted", "job", "when", "checkpoint"], as_json=as_json)


@models.command("show")
def show_model(
    version: Annotated[str, typer.Argument(help="name or name@N")],
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one version: where it came from, its metrics and its files."""
    from cray_agents.runtime.registry import Registry

    where = root(home)
    found = Registry(where).resolve(version)
    manifest = json.loads((where.checkpoint(found.checkpoint) / "manifest.json").read_text())
    probe = manifest.pop("probe")
    record = found.model_dump() | {"id": found.id, "manifest": manifest, "probes": len(probe)}
    print(json.dumps(record, indent=2)) if as_json else console.print_json(data=record)


@runs.command("list")
def list_runs(
    home: HomeOption = None,
    loop: Annotated[str | None, typer.Option(help="Only of this loop.")] = None,
    generation: Annotated[int | None, typer.Option(help="Only of this generation.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only of this agent.")] = None,
    split: Annotated[str | None, typer.Option(help="train, holdout or test.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List stored runs, newest last."""
    wanted: dict[str, Any] = {
        "loop": loop,
        "generation": generation,
        "agent": agent,
        "split": split,
    }
    rows = [run_row(run) for run in stored(root(home), **wanted)][-limit:]
    columns = ["id", "agent", "model", "stop_reason", "reward", "turns", "input", "output"]
    show(rows, columns, as_json=as_json)


@runs.command("show")
def show_run(run_id: RunId, home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show one run: what was said, which tools were called, its rewards."""
    from cray_agents.runtime.store import Store

    run = Store(root(home)).run(run_id)
    if as_json:
        print(run.model_dump_json(indent=2))
        return
    console.print(f"[bold]{run.id}[/]  {run.agent}  {run.model}  {run.stop_reason}")
    for message in run.trajectory.messages:
        text = str(message.get("content") or "")
        for call in message.get("tool_calls") or []:
            text += f"{call['function']['name']}({call['function']['arguments']})"
        console.print(f"[cyan]{message['role']:>10}[/]  ", end="")
        console.print(text, markup=False)
    for reward in run.rewards:
        console.print(f"    [green]reward[/]  {reward.name} = {reward.value:g}")
    usage = run.usage
    console.print(
        f"[dim]{usage.calls} calls, {usage.prompt_tokens} + {usage.completion_tokens} tokens, "
        f"{run.seconds:.2f} s[/]"
    )


@jobs.command("list")
def list_jobs(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List training jobs, oldest first."""
    show(
        job_rows(root(home)),
        ["id", "scheduler_job_id", "state", "step", "loss_first", "loss_last", "checkpoint"],
        as_json=as_json,
    )


@jobs.command("logs")
def job_logs(
    job_id: JobId,
    home: HomeOption = None,
    tail: Annotated[int, typer.Option(min=1, help="The last so many lines.")] = 100,
) -> None:
    """Print the end of a job's log."""
    where = root(home)
    log = where.job(named_job(where, job_id)) / "log.txt"
    if log.exists():
        print("\n".join(log.read_text(errors="replace").splitlines()[-tail:]))


@jobs.command("pause")
def pause_job(job_id: JobId, home: HomeOption = None) -> None:
    """Let a job save where it stands and end its processes; it stays so until `jobs resume`."""
    show_job(asyncio.run(tell(root(home), job_id, Platform.pause_job)))


@jobs.command("resume")
def resume_job(job_id: JobId, home: HomeOption = None) -> None:
    """Let a paused job go on from where it was paused."""
    show_job(asyncio.run(tell(root(home), job_id, Platform.resume_job)))


async def tell(
    home: Home, job_id: str, what: Callable[[Platform, str], Awaitable[JobStatus]]
) -> JobStatus:
    """Ask the platform of a root something of a job. Raises NotFound, BadInput, SetupError."""
    named = named_job(home, job_id)
    info = running(home)
    if info is None:
        raise SetupError(f"no platform runs on {home.root}: start it with `cray-agents up`")
    platform = client(info)
    try:
        return await what(platform, named)
    finally:
        await platform.close()


def show_job(job: JobStatus) -> None:
    """A line for what was asked; pausing takes as long as the present step and a save."""
    console.print(f"{job.id} is {job.state} at step {job.step} of {job.steps}")


def named_job(home: Home, job_id: str) -> str:
    """The id of a job, also by its scheduler's id. Raises NotFound."""
    named = [row["id"] for row in job_rows(home) if job_id in (row["id"], row["scheduler_job_id"])]
    if not named:
        raise NotFound(f"no job {job_id!r}; see `cray-agents jobs list`", param="job_id")
    return str(named[-1])


def export(
    form: Annotated[
        str, typer.Option("--format", help="jsonl (whole runs) or openai (chat messages).")
    ] = "jsonl",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Default: stdout.")] = None,
    home: HomeOption = None,
    loop: Annotated[str | None, typer.Option(help="Only of this loop.")] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Only with at least this reward.")
    ] = None,
) -> None:
    """Write stored runs as JSON lines: whole, tokens included, or as OpenAI chat examples."""
    if form not in ("jsonl", "openai"):
        raise BadInput(f"format {form!r} is not known; valid: jsonl, openai", param="format")
    written = 0
    with output.open("w") if output else sys.stdout as stream:
        for run in stored(root(home), tokens=True, loop=loop):
            if min_reward is not None and (run.reward is None or run.reward < min_reward):
                continue
            stream.write(export_line(run, form) + "\n")
            written += 1
    if output:
        console.print(f"{written} runs written to {output}")


def export_line(run: Run, form: str) -> str:
    """A run as one line of a format."""
    if form == "jsonl":
        return run.model_dump_json()
    tools = run.calls[0].tools if run.calls else []
    example = {"messages": run.trajectory.messages} | ({"tools": tools} if tools else {})
    return json.dumps(example, ensure_ascii=False)


def root(home: Path | None) -> Home:
    """The shared root a command looks at."""
    return load_config({"home": home}).root


def stored(home: Home, *, tokens: bool = False, **wanted: Any) -> list[Run]:
    """The stored runs with these properties, oldest first; with their calls' tokens if asked."""
    from cray_agents.runtime.run_index import RunQuery
    from cray_agents.runtime.store import Store

    found = Store(home).runs(RunQuery(**wanted), "full" if tokens else "none")
    return sorted(found, key=lambda run: run.started)


def model_names(home: Home) -> list[str]:
    """The names that have versions."""
    return sorted(path.name for path in home.models.iterdir()) if home.models.exists() else []


def version_rows(home: Home, name: str) -> list[dict[str, Any]]:
    """One row for each version of a name."""
    from cray_agents.runtime.registry import Registry

    registry = Registry(home)
    promoted = registry.promoted(name)
    return [
        version.model_dump()
        | {
            "id": version.id,
            "promoted": promoted is not None and version.number == promoted.number,
            "when": when(version.created),
        }
        for version in registry.versions(name)
    ]


def job_rows(home: Home) -> list[dict[str, Any]]:
    """One row for each job directory."""
    from cray_agents.trainers.megatron_trainer import read_status

    if not home.jobs.exists():
        return []
    found = sorted(home.jobs.iterdir(), key=lambda path: (path / "spec.json").stat().st_mtime)
    return [read_status(home, path.name).model_dump() for path in found]


def run_row(run: Run) -> dict[str, Any]:
    """A run as a row."""
    return {
        "id": run.id,
        "agent": run.agent,
        "model": run.model,
        "loop": run.loop,
        "generation": run.generation,
        "split": run.task.split if run.task else None,
        "stop_reason": run.stop_reason.value,
        "reward": run.reward,
        "turns": len(run.trajectory.turns),
        "input": run.input if len(run.input) <= 40 else run.input[:37] + "...",
        "output": run.output,
        "started": run.started,
    }
