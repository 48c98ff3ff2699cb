"""`models`: the versions that lie on the shared root, platform or not."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cray_agents.cli.screen import HomeOption, JsonOption, console, show, when
from cray_agents.config import load_config
from cray_agents.paths import Home

models = typer.Typer(no_args_is_help=True, help="Model versions: list, show.")


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    app.add_typer(models, name="models")


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


def root(home: Path | None) -> Home:
    """The shared root a command looks at."""
    return load_config({"home": home}).root


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
