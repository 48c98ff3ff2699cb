"""`audit` command: list the changes of a root with their callers, and verify the log's chain."""

import json
from typing import Annotated

import typer

from cray_agents.cli.screen import HomeOption, JsonOption, console, root, show, when
from cray_agents.errors import BadInput

COLUMNS = ["time", "who", "role", "action", "path", "status", "reason"]

audit = typer.Typer(no_args_is_help=True, help="Who changed what: list, verify.")


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    app.add_typer(audit, name="audit")


@audit.command("list")
def list_lines(
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the newest changes, oldest first."""
    from cray_agents.runtime.observability.audit_log import read_audit

    listing = read_audit(root(home).audit)
    lines = listing.rows[-limit:]
    rows = [line.model_dump(mode="json", exclude={"prev", "heads"}) for line in lines]
    if not as_json:
        rows = [{**row, "time": when(row["time"])} for row in rows]
    show(rows, COLUMNS, as_json=as_json, damaged=listing.damaged)


@audit.command("verify")
def verify(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Check every line and the chain between them; exits with 2 if one is damaged or missing."""
    from cray_agents.runtime.observability.audit_log import heads, verify_audit

    folder = root(home).audit
    problems, newest = verify_audit(folder), heads(folder)
    if as_json:
        print(json.dumps({"problems": problems, "heads": newest}))
    if problems:
        raise BadInput("the audit log is not whole: " + "; ".join(problems))
    if not as_json:
        console.print(f"whole: {len(newest)} files. Their newest lines are:", highlight=False)
        for name, last in newest.items():
            console.print(f"  {name} {last}", soft_wrap=True, highlight=False, markup=False)
