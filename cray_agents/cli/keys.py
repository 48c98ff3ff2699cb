"""`keys` command: create, list and revoke API keys of the gateway.

The commands work on the shared root and need no platform. A running platform sees a change within
a second.
"""

import json
import socket
from pathlib import Path
from typing import Annotated

import typer

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import note, open_root, root, say, settings, show, user, when
from cray_agents.errors import BadInput
from cray_agents.paths import Home

ReasonOption = Annotated[str, typer.Option(help="The reason, for the audit log.")]

commands = Commands("keys", help="API keys: create, list, revoke.")


@commands.command("create")
def create(
    name: Annotated[str, typer.Argument(help="The name of the key: whose it is, or what for.")],
    role: Annotated[
        str,
        typer.Option(
            help="The role: use (call models), train (and train them) or admin (everything)."
        ),
    ] = "use",
    reason: ReasonOption = "",
    secret_file: Annotated[
        Path | None, typer.Option(help="A file with its secret; a key that has it already stays.")
    ] = None,
) -> None:
    """Make a key. Its secret is shown now and never again; one from a file is not shown."""
    from cray_agents.runtime.gateway.http.api_keys import Keys, role_named

    opened, wanted = open_root(settings(), new=True), role_named(role)
    keys, named = Keys(opened), _read_secret(secret_file)
    if named is not None and (found := keys.find(named)) is not None:
        had, revoked = found
        if had.role != wanted:
            raise BadInput(
                f"the key {had.name} has this secret, with the role {had.role.name}: revoke it,"
                " and give another secret",
                param="secret_file",
            )
        say(f"the key {had.name} has this secret {'and was revoked' if revoked else 'already'}")
        return
    record, secret = keys.create(name, wanted, named)
    _note(opened, f"keys create --role {role}", record.id, name, reason)
    if named is not None:
        say(f"made the key {name} ({role})")
        return
    if given().json:
        print(json.dumps({**record.model_dump(mode="json"), "secret": secret}))
        return
    note(
        f"the key {name} ({role}); its secret is kept nowhere, so note it now. Clients take"
        " it as api_key, or from OPENAI_API_KEY; cray-agents itself from CRAY_AGENTS_API_KEY."
    )
    print(secret)


@commands.command("list")
def list_keys() -> None:
    """List every key that was ever made, without its secret."""
    from cray_agents.runtime.gateway.http.api_keys import Keys

    known = Keys(root())
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
    show(rows, columns, damaged=known.damaged())


@commands.command("revoke", takes="")
def revoke(
    key: Annotated[str, typer.Argument(help="The key's name or id, as `keys list` shows it.")],
    reason: ReasonOption = "",
) -> None:
    """End a key, for good. It stops working within a second."""
    from cray_agents.runtime.gateway.http.api_keys import Keys

    opened = open_root(settings())
    for record in Keys(opened).revoke(key):
        _note(opened, "keys revoke", record.id, record.name, reason)
        say(f"revoked {record.name} ({record.id})")


def _read_secret(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text().strip()
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read as a secret: {error}", param="secret_file") from None


def _note(home: Home, action: str, key: str, name: str, reason: str) -> None:
    """Write the change to the audit log; the caller is the user of this host."""
    from cray_agents.runtime.telemetry.audit_log import AuditLog

    log = AuditLog(home.audit)
    log.note(
        who=f"{user()}@{socket.gethostname()}", action=action, path=f"{key} {name}", reason=reason
    )
    log.close()
