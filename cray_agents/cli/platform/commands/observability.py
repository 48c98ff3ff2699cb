"""`observability` command: write Prometheus' configuration, alerts and Grafana's boards."""

import re
from pathlib import Path
from typing import Annotated

import typer

from cray_agents.cli.screen import errors
from cray_agents.errors import BadInput

TARGET = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):\d{1,5}")

observability = typer.Typer(no_args_is_help=True, help="Boards and alerts for Prometheus, Grafana.")


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    app.add_typer(observability, name="observability")


@observability.command("init")
def init(
    directory: Annotated[Path, typer.Argument(help="The folder to write into.")],
    target: Annotated[
        list[str] | None, typer.Option(help="A gateway as host:port \\[default: 127.0.0.1:8000].")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="A file with an API key, where the gateway asks for one.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace files that were changed.")] = False,
) -> None:
    """Write Prometheus' configuration, alerts, and Grafana's boards into a folder."""
    from cray_agents.runtime.observability.boards.board_files import board_files

    targets = target or ["127.0.0.1:8000"]
    for one in targets:
        if not TARGET.fullmatch(one):
            raise BadInput(f"--target {one!r}: give a gateway as host:port", param="target")
    key = None if key_file is None else str(key_file.expanduser().absolute())
    files = {directory / path: text for path, text in board_files(targets, key).items()}
    changed = [path for path, text in files.items() if path.exists() and path.read_text() != text]
    if changed and not force:
        names = ", ".join(str(path.relative_to(directory)) for path in changed[:3])
        raise BadInput(
            f"{directory} has {len(changed)} other files of these names ({names}): give --force to"
            " replace them, or another folder",
            param="directory",
        )
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise BadInput(f"{directory} cannot be written: {error.strerror}") from error
    errors.print(
        f"{len(files)} files in {directory}. Start `prometheus --config.file=prometheus.yml` there;"
        " Grafana reads grafana/provisioning, with grafana/dashboards at"
        " /var/lib/grafana/dashboards.",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
