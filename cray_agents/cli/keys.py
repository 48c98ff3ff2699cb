"""`keys` command: create, list and revoke API keys of the gateway, and what they used.

The commands work on the shared root and need no platform. A running platform sees a change within
a second.
"""

import getpass
import json
import socket
import time
from typing import Annotated

import typer
from rich.markup import escape

from cray_agents.cli.goodput import seconds_of
from cray_agents.cli.root_access import open_root
from cray_agents.cli.runs import open_store
from cray_agents.cli.screen import HomeOption, JsonOption, console, errors, root, show, when
from cray_agents.config import load_config
from cray_agents.paths import Home

ReasonOption = Annotated[str, typer.Option(help="For the audit log.")]

MOST_ROWS = 1000  # of usage

keys = typer.Typer(no_args_is_help=True, help="API keys: create, list, revoke, usage.")


def add_to(app: typer.Typer) -> None:
    """Register the command group."""
    app.add_typer(keys, name="keys")


@keys.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is, or what for.")],
    role: Annotated[
        str, typer.Option(help="use (call models), train (and train them), admin (everything).")
    ] = "use",
    reason: ReasonOption = "",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key. Its secret is shown now and never again."""
    from cray_agents.runtime.gateway.http.api_keys import Keys, role_named

    opened = open_root(load_config({"home": home}), new=True)
    record, secret = Keys(opened).create(name, role_named(role))
    _note(opened, f"keys create --role {role}", record.id, name, reason)
    if as_json:
        print(json.dumps({**record.model_dump(mode="json"), "secret": secret}))
        return
    errors.print(
        f"the key {escape(name)} ({role}); its secret is kept nowhere, so note it now. Clients take"
        " it as api_key, or from OPENAI_API_KEY; cray-agents itself from CRAY_AGENTS_API_KEY.",
        soft_wrap=True,
    )
    print(secret)


@keys.command("list")
def list_keys(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List every key that was ever made, without its secret."""
    from cray_agents.runtime.gateway.http.api_keys import Keys

    known = Keys(root(home))
    rows = [
        {
            "id": record.id,
            "name": record.name,
            "role": record.role.name,
            "state": "revoked" if revoked else "works",
            "created": record.created,
            "when": when(record.created),
        }
        for record, revoked in known.list()
    ]
    columns = ["id", "name", "role", "state", "when"]
    show(rows, columns, as_json=as_json, damaged=known.damaged())


@keys.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(help="Its name or id, as `keys list` shows it.")],
    reason: ReasonOption = "",
    home: HomeOption = None,
) -> None:
    """End a key, for good. It stops working within a second."""
    from cray_agents.runtime.gateway.http.api_keys import Keys

    opened = open_root(load_config({"home": home}))
    for record in Keys(opened).revoke(key):
        _note(opened, "keys revoke", record.id, record.name, reason)
        console.print(f"revoked {escape(record.name)} ({record.id})", soft_wrap=True)


@keys.command("usage")
def usage(
    by: Annotated[str, typer.Option(help="Groups, with commas: key, model.")] = "key,model",
    every: Annotated[
        str | None, typer.Option(help="Also by time: spans of 1h or 1d, say \\[default: none].")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only the last 12h or 7d, say \\[default: all].")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sum up the recorded runs, calls, tokens and seconds of API keys and models."""
    from cray_agents.queries import RunFilter
    from cray_agents.runtime.gateway.http.api_keys import key_names
    from cray_agents.runtime.views.usage import check_groups, usage_table

    groups = [name.strip() for name in by.split(",") if name.strip()]
    check_groups(groups)
    bucket = None if every is None else seconds_of(every, "--every")
    begin = {} if since is None else {"since": time.time() - seconds_of(since, "--since")}
    with open_store(home) as store:
        table = usage_table(
            store,
            RunFilter(**begin),
            groups,
            key_names(root(home)),
            bucket=bucket,
            owner=None,
            limit=MOST_ROWS,
        )
    if as_json:
        print(json.dumps(table, indent=2))
        return
    rows = [{**row, "key": row["name"], "time": row["time"] and when(row["time"])}
            for row in table["data"]]  # fmt: skip
    columns = [*(["time"] if bucket else []), *groups, "runs", "calls", "prompt_tokens"]
    show(rows, [*columns, "sampled_tokens", "seconds", "errors"], as_json=False)
    if table["has_more"]:
        errors.print(f"and more groups: these {MOST_ROWS} are the largest")


def _note(home: Home, action: str, key: str, name: str, reason: str) -> None:
    """Write the change to the audit log; the caller is the user of this host."""
    from cray_agents.runtime.observability.audit_log import AuditLog

    log = AuditLog(home.audit)
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    log.note(who=who, action=action, path=f"{key} {name}", reason=reason)
    log.close()
